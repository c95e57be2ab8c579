//! One complete, checked read: interruptions, short counts, transient errors and checksums are dealt with here, the
//! same way for every backend and for resident weights.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_64;

use crate::ReadAt;

/// Waits before each retry of a transient error; as many retries as entries. A drive that resets its link answers
/// again within milliseconds; a dead one should end the request soon.
const RETRY_WAITS: [Duration; 3] =
    [Duration::from_micros(500), Duration::from_millis(2), Duration::from_millis(10)];

/// Interruptions of one read before it counts as failed; real signals never come this thick.
const MAX_INTERRUPTIONS: u64 = 1 << 20;

/// What it took to fill one buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Calls of `read_at`.
    pub calls: u64,
    /// Bytes that arrived, those read again included.
    pub bytes: u64,
    /// Calls that a signal interrupted.
    pub interrupted: u64,
    /// Calls that returned fewer bytes than asked for.
    pub short_reads: u64,
    /// Calls repeated after a transient error.
    pub retries: u64,
    /// Whole reads repeated after a checksum mismatch.
    pub rereads: u64,
    /// Time spent, checksums and waits included.
    pub busy_ns: u64,
}

/// Why a buffer could not be filled.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReadFailure {
    /// The system's error, after the retries.
    Io(io::Error),
    /// The bytes ended after `filled` of those asked for.
    Truncated {
        /// Bytes that were there.
        filled: usize,
    },
    /// The bytes are not those of the checksum, twice.
    Checksum {
        /// The checksum asked for.
        expected: u64,
        /// The checksum of the second reading.
        found: u64,
    },
}

/// Fills `buf` from `offset` on. Interrupted and short reads continue, a transient error (EIO, EAGAIN, …) is retried
/// three times with a short wait.
///
/// # Errors
/// [`ReadFailure::Io`] where an error persists, [`ReadFailure::Truncated`] where the bytes end early.
pub fn read_full(
    reader: &dyn ReadAt,
    buf: &mut [u8],
    offset: u64,
    stats: &mut ReadStats,
) -> Result<(), ReadFailure> {
    let mut filled = 0;
    let mut failures = 0;
    while filled < buf.len() {
        let rest = &mut buf[filled..];
        let position =
            offset.checked_add(filled as u64).ok_or_else(|| failure("offset overflows 64 bits"))?;
        stats.calls += 1;
        match reader.read_at(rest, position) {
            Ok(0) => return Err(ReadFailure::Truncated { filled }),
            Ok(count) if count > rest.len() => {
                return Err(failure("reader returned more bytes than asked for"));
            }
            Ok(count) => {
                stats.short_reads += u64::from(count < rest.len());
                stats.bytes += count as u64;
                filled += count;
                failures = 0;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                stats.interrupted += 1;
                if stats.interrupted > MAX_INTERRUPTIONS {
                    return Err(ReadFailure::Io(error));
                }
            }
            Err(error) => {
                let wait = RETRY_WAITS.get(failures).filter(|_| is_transient(&error));
                let Some(wait) = wait else { return Err(ReadFailure::Io(error)) };
                failures += 1;
                stats.retries += 1;
                std::thread::sleep(*wait);
            }
        }
    }
    Ok(())
}

/// [`read_full`], then compares the XXH3-64 of the buffer; a mismatch is read once more (a flipped bit on the way is
/// gone then, one on the medium is not).
pub(crate) fn read_verified(
    reader: &dyn ReadAt,
    buf: &mut [u8],
    offset: u64,
    checksum: Option<u64>,
    stats: &mut ReadStats,
) -> Result<(), ReadFailure> {
    let started = Instant::now();
    let result = read_and_compare(reader, buf, offset, checksum, stats);
    stats.busy_ns += started.elapsed().as_nanos() as u64;
    result
}

fn read_and_compare(
    reader: &dyn ReadAt,
    buf: &mut [u8],
    offset: u64,
    checksum: Option<u64>,
    stats: &mut ReadStats,
) -> Result<(), ReadFailure> {
    read_full(reader, buf, offset, stats)?;
    let Some(expected) = checksum else { return Ok(()) };
    if xxh3_64(buf) == expected {
        return Ok(());
    }
    stats.rereads += 1;
    read_full(reader, buf, offset, stats)?;
    match xxh3_64(buf) {
        found if found == expected => Ok(()),
        found => Err(ReadFailure::Checksum { expected, found }),
    }
}

/// Errors that may go away by themselves.
fn is_transient(error: &io::Error) -> bool {
    let transient = [Errno::IO, Errno::AGAIN, Errno::NOMEM, Errno::BUSY, Errno::TIMEDOUT];
    Errno::from_io_error(error).is_some_and(|errno| transient.contains(&errno))
}

fn failure(what: &'static str) -> ReadFailure {
    ReadFailure::Io(io::Error::new(io::ErrorKind::InvalidInput, what))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Answers from a script; whatever comes after it reads zeros, full length.
    struct Script(Mutex<Vec<io::Result<usize>>>);

    impl Script {
        fn new(mut answers: Vec<io::Result<usize>>) -> Script {
            answers.reverse();
            Script(Mutex::new(answers))
        }
    }

    impl ReadAt for Script {
        fn read_at(&self, buf: &mut [u8], _offset: u64) -> io::Result<usize> {
            self.0.lock().unwrap().pop().unwrap_or(Ok(buf.len()))
        }
    }

    fn errno(errno: Errno) -> io::Result<usize> {
        Err(errno.into())
    }

    #[test]
    fn interruptions_short_counts_and_transient_errors_are_survived() {
        let script = Script::new(vec![
            errno(Errno::INTR),
            Ok(10),
            errno(Errno::IO),
            errno(Errno::IO),
            errno(Errno::AGAIN),
            Ok(1),
            errno(Errno::IO),
        ]);
        let mut stats = ReadStats::default();
        read_full(&script, &mut [0; 100], 0, &mut stats).unwrap();
        assert_eq!(
            stats,
            ReadStats {
                calls: 8,
                bytes: 100,
                interrupted: 1,
                short_reads: 2,
                retries: 4,
                rereads: 0,
                busy_ns: 0
            }
        );
    }

    #[test]
    fn a_fourth_transient_error_in_a_row_is_final() {
        let script = Script::new((0..4).map(|_| errno(Errno::IO)).collect());
        let mut stats = ReadStats::default();
        let failure = read_full(&script, &mut [0; 100], 0, &mut stats).unwrap_err();
        assert!(matches!(&failure, ReadFailure::Io(error) if error.raw_os_error() == Some(5)), "{failure:?}");
        assert_eq!((stats.calls, stats.retries), (4, 3));
    }

    #[test]
    fn a_permanent_error_is_not_retried() {
        let script = Script::new(vec![errno(Errno::BADF)]);
        let mut stats = ReadStats::default();
        assert!(read_full(&script, &mut [0; 100], 0, &mut stats).is_err());
        assert_eq!((stats.calls, stats.retries), (1, 0));
    }

    #[test]
    fn an_early_end_says_how_much_there_was() {
        let script = Script::new(vec![Ok(60), Ok(0)]);
        let failure = read_full(&script, &mut [0; 100], 0, &mut ReadStats::default()).unwrap_err();
        assert!(matches!(failure, ReadFailure::Truncated { filled: 60 }), "{failure:?}");
    }

    #[test]
    fn lying_counts_and_offsets_are_errors() {
        let script = Script::new(vec![Ok(101)]);
        assert!(read_full(&script, &mut [0; 100], 0, &mut ReadStats::default()).is_err());
        let script = Script::new(vec![Ok(1)]);
        assert!(read_full(&script, &mut [0; 100], u64::MAX, &mut ReadStats::default()).is_err());
    }

    #[test]
    fn a_checksum_mismatch_is_read_once_more() {
        let data: Vec<u8> = (0..200_u8).collect();
        let expected = xxh3_64(&data);
        let mut buf = vec![0; 200];
        let mut stats = ReadStats::default();
        read_verified(&data, &mut buf, 0, Some(expected), &mut stats).unwrap();
        assert_eq!((stats.rereads, buf == data), (0, true));
        let failure = read_verified(&data, &mut buf, 0, Some(expected ^ 1), &mut stats).unwrap_err();
        assert!(
            matches!(failure, ReadFailure::Checksum { expected: e, found } if e == expected ^ 1 && found == expected)
        );
        assert_eq!(stats.rereads, 1);
    }
}
