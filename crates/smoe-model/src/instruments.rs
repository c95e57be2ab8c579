//! Where a token's time goes.

use std::time::Instant;

/// What the engine was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Bucket {
    /// Attention and other dense layers.
    Attention,
    /// Router and the look-up of experts.
    Router,
    /// Arithmetic of routed experts.
    Experts,
    /// Waiting for the drive.
    Drive,
    /// Final norm and LM head.
    Head,
    /// Sampling.
    Sampling,
    /// Anything else.
    Other,
}

impl Bucket {
    /// All buckets with the names they are reported under.
    pub const ALL: [(Bucket, &'static str); 7] = [
        (Bucket::Attention, "attention"),
        (Bucket::Router, "router"),
        (Bucket::Experts, "experts"),
        (Bucket::Drive, "drive"),
        (Bucket::Head, "head"),
        (Bucket::Sampling, "sampling"),
        (Bucket::Other, "other"),
    ];
}

/// A stopwatch with one total for each [`Bucket`]; it reads no clock unless enabled.
#[derive(Debug, Default)]
pub struct Instruments {
    last: Option<Instant>,
    nanoseconds: [u64; Bucket::ALL.len()],
}

impl Instruments {
    /// Starts or stops the clock; totals begin at zero.
    pub fn enable(&mut self, enabled: bool) {
        *self = Self { last: enabled.then(Instant::now), ..Self::default() };
    }

    /// Adds the time since the last call to a bucket.
    #[inline]
    pub fn lap(&mut self, bucket: Bucket) {
        if let Some(last) = self.last {
            let now = Instant::now();
            self.nanoseconds[bucket as usize] += (now - last).as_nanos() as u64;
            self.last = Some(now);
        }
    }

    /// Total of a bucket in milliseconds.
    #[must_use]
    pub fn milliseconds(&self, bucket: Bucket) -> f64 {
        self.nanoseconds[bucket as usize] as f64 / 1e6
    }
}
