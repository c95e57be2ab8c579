//! A file read past the page cache where that works, through it where not, and never silently the one for the other.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::direct::{self, DirectOpen};
use crate::transfer::{self, ReadFailure, ReadStats};
use crate::{AccessMode, AlignedBuffer, IoChoice, ReadAt, StreamError};

/// Bytes read at once on behalf of a caller whose memory or offset is not aligned. Large enough for a drive's full
/// rate, small enough not to matter in a budget.
const BOUNCE_BYTES: usize = 4 << 20;

/// Bounce buffers kept for the next unaligned read; more threads than this at once allocate anew.
const KEPT_BOUNCE_BUFFERS: usize = 2;

/// An open file with its length at open time.
///
/// Requests that are aligned to [`AccessMode::alignment_bytes`] (offset, length and address) are read straight into
/// the caller's memory. All others are correct too, through an aligned copy of the enclosing range.
pub struct FileReader {
    file: File,
    path: PathBuf,
    len: u64,
    /// Mode at open time; `direct` is cleared when a later read is refused.
    name: &'static str,
    alignment: usize,
    direct: AtomicBool,
    reason: Mutex<Option<String>>,
    bounces: Mutex<Vec<AlignedBuffer>>,
    bounced_reads: AtomicU64,
}

impl FileReader {
    /// Opens a regular file; `IoChoice::Buffered` through the page cache, every other choice past it if possible.
    ///
    /// # Errors
    /// [`StreamError::Open`], [`StreamError::NotAFile`].
    pub fn open(path: &Path, choice: IoChoice) -> Result<FileReader, StreamError> {
        let label = || path.display().to_string();
        let open_error = |source| StreamError::Open { file: label(), source };
        // Asked before opening, which would block on a pipe without a writer.
        if !std::fs::metadata(path).map_err(open_error)?.is_file() {
            return Err(StreamError::NotAFile { file: label() });
        }
        let opened = match choice {
            IoChoice::Buffered => DirectOpen::Refused("asked for".into()),
            IoChoice::Auto | IoChoice::Pread => direct::open_direct(path).map_err(open_error)?,
        };
        let (file, alignment, name, reason) = match opened {
            DirectOpen::Ready { file, alignment, name } => (file, alignment, name, None),
            DirectOpen::Refused(reason) => {
                (direct::open_buffered(path).map_err(open_error)?, 1, "buffered", Some(reason))
            }
        };
        let metadata = file.metadata().map_err(open_error)?;
        if !metadata.is_file() {
            return Err(StreamError::NotAFile { file: label() });
        }
        Ok(FileReader {
            file,
            path: path.to_owned(),
            len: metadata.len(),
            name,
            alignment,
            direct: AtomicBool::new(alignment > 1),
            reason: Mutex::new(reason),
            bounces: Mutex::new(Vec::with_capacity(KEPT_BOUNCE_BUFFERS)),
            bounced_reads: AtomicU64::new(0),
        })
    }

    /// Path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the file in bytes when it was opened.
    pub fn file_len(&self) -> u64 {
        self.len
    }

    /// Direct reads that needed an aligned copy; 0 for a file whose strides fit the alignment.
    pub fn bounced_reads(&self) -> u64 {
        self.bounced_reads.load(Ordering::Relaxed)
    }

    /// Fills `buf` from `offset` on, whatever their alignment, without growing the page cache in direct mode. The same
    /// retries as for experts apply.
    ///
    /// # Errors
    /// [`StreamError::Read`], [`StreamError::Truncated`].
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), StreamError> {
        read_exact(self, &self.path, buf, offset)
    }

    /// Reads straight into `buf`; a refusal turns the reader buffered for good and is recorded.
    fn read_straight(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        match self.file.read_at(buf, offset) {
            Err(error) if direct::is_refusal(&error) && self.direct.load(Ordering::Acquire) => {
                direct::make_buffered(&self.file)?;
                let reason =
                    format!("direct read of {} bytes at offset {offset} was refused: {error}", buf.len());
                *lock(&self.reason) = Some(reason);
                self.direct.store(false, Ordering::Release);
                self.file.read_at(buf, offset)
            }
            // Another thread may have turned the reader buffered between the refusal and the check.
            Err(error) if direct::is_refusal(&error) && self.alignment > 1 => self.file.read_at(buf, offset),
            other => other,
        }
    }

    /// Reads the enclosing aligned range into a bounce buffer and copies out what was asked for.
    fn read_bounced(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.bounced_reads.fetch_add(1, Ordering::Relaxed);
        let head = (offset % self.alignment as u64) as usize;
        let wanted = head.saturating_add(buf.len()).min(BOUNCE_BYTES);
        let wanted = wanted.next_multiple_of(self.alignment).min(BOUNCE_BYTES);
        let kept = lock(&self.bounces).pop();
        let mut bounce = match kept {
            Some(bounce) => bounce,
            None => direct::aligned_bytes(BOUNCE_BYTES, self.alignment).map_err(io::Error::other)?,
        };
        let result = self.read_straight(&mut bounce[..wanted], offset - head as u64).map(|count| {
            let count = count.saturating_sub(head).min(buf.len());
            buf[..count].copy_from_slice(&bounce[head..head + count]);
            count
        });
        let mut bounces = lock(&self.bounces);
        if bounces.len() < KEPT_BOUNCE_BUFFERS {
            bounces.push(bounce);
        }
        result
    }
}

impl ReadAt for FileReader {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let aligned = (buf.as_ptr() as usize).is_multiple_of(self.alignment)
            && buf.len().is_multiple_of(self.alignment)
            && offset.is_multiple_of(self.alignment as u64);
        if aligned || buf.is_empty() || !self.direct.load(Ordering::Acquire) {
            self.read_straight(buf, offset)
        } else {
            self.read_bounced(buf, offset)
        }
    }

    fn access(&self) -> AccessMode {
        let reason = lock(&self.reason).clone();
        if self.alignment > 1 && !self.direct.load(Ordering::Acquire) {
            return AccessMode::buffered(reason);
        }
        AccessMode { name: self.name, alignment_bytes: self.alignment as u64, reason }
    }
}

/// Fills `buf` from any reader; `path` is for messages. The same retries as for experts apply.
///
/// # Errors
/// [`StreamError::Read`], [`StreamError::Truncated`].
pub fn read_exact(reader: &dyn ReadAt, path: &Path, buf: &mut [u8], offset: u64) -> Result<(), StreamError> {
    let bytes = buf.len() as u64;
    transfer::read_full(reader, buf, offset, &mut ReadStats::default()).map_err(|failure| {
        let file = path.display().to_string();
        match failure {
            ReadFailure::Io(source) => StreamError::Read { file, offset, bytes, source },
            ReadFailure::Truncated { filled } => {
                StreamError::Truncated { file, offset, bytes, found: filled as u64 }
            }
            ReadFailure::Checksum { .. } => {
                StreamError::Read { file, offset, bytes, source: io::Error::other("checksum mismatch") }
            }
        }
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A file on a disk (the build directory), not in memory, so that direct reads are real where they can be.
    fn file_with(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(bytes).unwrap();
        file.as_file().sync_all().unwrap();
        file
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| crate::random::mix(i as u64) as u8).collect()
    }

    #[test]
    fn every_offset_length_and_address_reads_the_same_bytes() {
        let data = pattern(3 * 4096 + 777);
        let file = file_with(&data);
        for choice in [IoChoice::Auto, IoChoice::Pread, IoChoice::Buffered] {
            let reader = FileReader::open(file.path(), choice).unwrap();
            assert_eq!(reader.file_len(), data.len() as u64);
            for offset in [0, 1, 511, 512, 4095, 4096, 4097, 8192, data.len() - 1] {
                for len in [0, 1, 512, 4095, 4096, 4097, data.len()] {
                    let len = len.min(data.len() - offset);
                    for shift in [0, 1] {
                        let mut memory = AlignedBuffer::new(data.len() + 1).unwrap();
                        let buf = &mut memory[shift..shift + len];
                        reader.read_exact_at(buf, offset as u64).unwrap();
                        assert!(buf == &data[offset..offset + len], "{choice:?} {offset} {len} {shift}");
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_larger_than_the_bounce_buffer_are_complete() {
        let data = pattern(2 * BOUNCE_BYTES + 4096 + 5);
        let file = file_with(&data);
        let reader = FileReader::open(file.path(), IoChoice::Auto).unwrap();
        let mut buf = vec![0; data.len() - 3];
        reader.read_exact_at(&mut buf, 3).unwrap();
        assert!(buf == data[3..]);
        assert_eq!(lock(&reader.bounces).len(), usize::from(reader.bounced_reads() > 0));
    }

    #[test]
    fn reading_past_the_end_says_how_much_there_was() {
        let file = file_with(&pattern(5000));
        for choice in [IoChoice::Auto, IoChoice::Buffered] {
            let reader = FileReader::open(file.path(), choice).unwrap();
            let error = reader.read_exact_at(&mut [0; 2000], 4000).unwrap_err();
            assert!(matches!(error, StreamError::Truncated { found: 1000, bytes: 2000, .. }), "{error}");
            let error = reader.read_exact_at(&mut [0; 10], 1 << 40).unwrap_err();
            assert!(matches!(error, StreamError::Truncated { found: 0, .. }), "{error}");
        }
    }

    #[test]
    fn a_file_cut_after_opening_is_reported() {
        let file = file_with(&pattern(16384));
        let reader = FileReader::open(file.path(), IoChoice::Auto).unwrap();
        file.as_file().set_len(4096).unwrap();
        let error = reader.read_exact_at(&mut [0; 16384], 0).unwrap_err();
        assert!(matches!(error, StreamError::Truncated { found: 4096, .. }), "{error}");
        assert!(error.to_string().contains("shorter than when it was opened"), "{error}");
    }

    #[test]
    fn missing_files_directories_and_pipes_are_named() {
        let error = FileReader::open(Path::new("no/such/file"), IoChoice::Auto).err().unwrap();
        assert!(error.to_string().starts_with("cannot open no/such/file: "), "{error}");
        let error = FileReader::open(Path::new("/"), IoChoice::Auto).err().unwrap();
        assert_eq!(error.to_string(), "/ is not a regular file");
        let error = FileReader::open(Path::new("/dev/null"), IoChoice::Auto).err().unwrap();
        assert!(matches!(error, StreamError::NotAFile { .. }), "{error}");
    }

    #[test]
    fn an_asked_for_buffered_mode_says_so() {
        let file = file_with(&pattern(100));
        let reader = FileReader::open(file.path(), IoChoice::Buffered).unwrap();
        assert_eq!(reader.access(), AccessMode::buffered(Some("asked for".into())));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_read_that_is_refused_later_turns_the_reader_buffered_and_says_why() {
        let data = pattern(8192);
        let file = file_with(&data);
        let mut reader = FileReader::open(file.path(), IoChoice::Auto).unwrap();
        if reader.access().name != "direct" {
            return; // This file system has no direct reads, so it cannot refuse one.
        }
        // Believe in a finer alignment than the system has, as a wrong report would make us.
        reader.alignment = 2;
        let mut memory = AlignedBuffer::new(4096).unwrap();
        reader.read_exact_at(&mut memory[2..102], 6).unwrap();
        assert_eq!(memory[2..102], data[6..106]);
        let access = reader.access();
        assert_eq!((access.name, access.alignment_bytes), ("buffered", 1));
        let reason = access.reason.unwrap();
        assert!(reason.starts_with("direct read of 100 bytes at offset 6 was refused"), "{reason}");
        reader.read_exact_at(&mut memory[1..1001], 7).unwrap();
        assert_eq!(memory[1..1001], data[7..1007]);
    }
}
