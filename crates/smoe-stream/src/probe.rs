//! How fast the drive and memory are, measured for a moment.

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::aligned::AlignedBuffer;
use crate::direct::aligned_bytes;
use crate::error::StreamError;
use crate::random::mix;
use crate::read_at::ReadAt;
use crate::transfer::{ReadStats, read_full};

/// A probe of the drive ends after this time or these bytes, whichever comes first.
const DRIVE_PROBE_TIME: Duration = Duration::from_millis(400);
const DRIVE_PROBE_BYTES: u64 = 2 << 30;

/// Time for which memory is read.
const MEMORY_PROBE_TIME: Duration = Duration::from_millis(150);

/// What a drive delivered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DriveProbe {
    /// Bytes per second of all threads together.
    pub bytes_per_s: f64,
    /// Bytes that were read.
    pub bytes: u64,
}

/// Reads records of `request_bytes` at random multiples of it within `region`, with `depth` threads.
///
/// # Errors
/// [`StreamError::Probe`] where no request fits into the region, [`StreamError::OutOfMemory`]. Failing reads only end
/// the probe early.
pub fn probe_drive(
    reader: &dyn ReadAt,
    region: Range<u64>,
    request_bytes: u64,
    depth: usize,
) -> Result<DriveProbe, StreamError> {
    let region_bytes = region.end.saturating_sub(region.start);
    let records = region_bytes.checked_div(request_bytes).unwrap_or(0);
    let length = usize::try_from(request_bytes).unwrap_or(usize::MAX);
    if records == 0 {
        return Err(StreamError::Probe { region_bytes, request_bytes });
    }
    let alignment = reader.access().alignment_bytes as usize;
    let mut buffers = Vec::new();
    for _ in 0..depth.max(1) {
        buffers.push(aligned_bytes(length, alignment)?);
    }
    let (next, total, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let started = Instant::now();
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            let (next, total, stop, region) = (&next, &total, &stop, region.clone());
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let record = mix(next.fetch_add(1, Ordering::Relaxed)) % records;
                    let offset = region.start + record * request_bytes;
                    let read = read_full(reader, &mut buffer[..length], offset, &mut ReadStats::default());
                    let bytes = total.fetch_add(request_bytes, Ordering::Relaxed) + request_bytes;
                    if read.is_err() || bytes >= DRIVE_PROBE_BYTES || started.elapsed() >= DRIVE_PROBE_TIME {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let bytes = total.load(Ordering::Relaxed);
    Ok(DriveProbe { bytes_per_s: bytes as f64 / started.elapsed().as_secs_f64(), bytes })
}

/// Bytes per second that `threads` threads read from a buffer of `bytes` bytes (at least a mebibyte) in turn.
///
/// The buffer must be larger than the processor's caches for the result to be memory's; it is freed afterwards.
///
/// # Errors
/// [`StreamError::OutOfMemory`].
pub fn probe_memory(threads: usize, bytes: usize) -> Result<f64, StreamError> {
    let threads = threads.max(1);
    let mut buffer = AlignedBuffer::new(bytes.max(1 << 20))?;
    // Every page is written once, so that each is backed by memory of its own.
    buffer.fill(1);
    let part = buffer.len() / threads / 64 * 64;
    let total = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for part in buffer.chunks_exact(part.max(64)).take(threads) {
            let total = &total;
            scope.spawn(move || {
                while started.elapsed() < MEMORY_PROBE_TIME {
                    black_box(sum(part));
                    total.fetch_add(part.len() as u64, Ordering::Relaxed);
                }
            });
        }
    });
    Ok(total.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
}

/// Adds all words up, in eight lanes that the compiler keeps in vector registers.
fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0_u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (lane, word) in lanes.iter_mut().zip(line.as_chunks::<8>().0) {
            *lane = lane.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    lanes.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_report_what_they_read() {
        let data = vec![3_u8; 64 << 10];
        let probe = probe_drive(&data, 4096..65536, 4096, 2).unwrap();
        assert!(probe.bytes >= 4096 && probe.bytes_per_s > 0.0);
        assert!(probe_memory(2, 1 << 20).unwrap() > 0.0);
    }

    #[test]
    fn regions_without_room_are_refused() {
        let data = vec![0; 4096];
        for (region, request) in [(0..4095, 4096), (0..4096, 0), (10..10, 1)] {
            let error = probe_drive(&data, region, request, 1).unwrap_err();
            assert!(matches!(error, StreamError::Probe { .. }), "{error}");
        }
    }

    #[test]
    fn a_failing_reader_ends_the_probe() {
        let empty: Vec<u8> = Vec::new();
        assert!(probe_drive(&empty, 0..1 << 20, 4096, 3).unwrap().bytes <= 3 * 4096);
    }
}
