//! A reader that does everything a drive may do, and some that it should not. For tests.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use crate::random::mix;
use crate::read_at::{AccessMode, ReadAt};

/// How often something goes wrong, in 1,024ths of the calls, and how badly.
#[derive(Debug, Clone, Default)]
pub struct ChaosOptions {
    /// Start of the random sequence.
    pub seed: u64,
    /// Longest delay of a call; reads overtake each other.
    pub delay: Duration,
    /// Calls that return a part only.
    pub short: u64,
    /// Calls that end with EINTR.
    pub interrupted: u64,
    /// Calls that end with EIO. More than two thirds and three retries will not be enough.
    pub failing: u64,
    /// Calls that flip a bit.
    pub flipped: u64,
    /// Bytes that can never be read.
    pub dead: Option<Range<u64>>,
}

impl ChaosOptions {
    /// Everything that a stream has to survive without a trace.
    #[must_use]
    pub fn survivable(seed: u64) -> ChaosOptions {
        ChaosOptions {
            seed,
            delay: Duration::from_micros(400),
            short: 300,
            interrupted: 100,
            failing: 40,
            flipped: 0,
            dead: None,
        }
    }
}

/// A reader between a backend and its bytes.
pub struct ChaosReader<R> {
    inner: R,
    options: ChaosOptions,
    calls: AtomicU64,
}

impl<R: ReadAt> ChaosReader<R> {
    /// Puts itself in front of `inner`.
    pub fn new(inner: R, options: ChaosOptions) -> ChaosReader<R> {
        ChaosReader { inner, options, calls: AtomicU64::new(0) }
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl<R: ReadAt> ReadAt for ChaosReader<R> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let options = &self.options;
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let dice = |which: u64| mix(options.seed ^ mix(call.wrapping_mul(8).wrapping_add(which)));
        let happens = |which: u64, often: u64| dice(which) % 1024 < often;
        let delay = options.delay.as_nanos() as u64;
        if delay > 0 {
            std::thread::sleep(Duration::from_nanos(dice(0) % delay));
        }
        let end = offset.saturating_add(buf.len() as u64);
        if options.dead.as_ref().is_some_and(|dead| offset < dead.end && dead.start < end) {
            return Err(Errno::IO.into());
        }
        if happens(1, options.interrupted) {
            return Err(Errno::INTR.into());
        }
        if happens(2, options.failing) {
            return Err(Errno::IO.into());
        }
        let wanted = match happens(3, options.short) && buf.len() > 1 {
            true => 1 + dice(4) as usize % (buf.len() - 1),
            false => buf.len(),
        };
        let count = self.inner.read_at(&mut buf[..wanted], offset)?;
        if count > 0 && happens(5, options.flipped) {
            buf[dice(6) as usize % count] ^= 1 << (dice(7) % 8);
        }
        Ok(count)
    }

    fn access(&self) -> AccessMode {
        self.inner.access()
    }
}
