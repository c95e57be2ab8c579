//! What a backend reads from.

use std::io;
use std::sync::Arc;

/// How reads reach the bytes, as it happened and not as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessMode {
    /// `direct` (past the page cache), `uncached` (macOS: the cache is told to keep nothing), `buffered` or `memory`.
    pub name: &'static str,
    /// Alignment that offsets, lengths and addresses need in order to be read without a copy; 1: any.
    pub alignment_bytes: u64,
    /// Why the mode is not the best one; `None` where it is.
    pub reason: Option<String>,
}

impl AccessMode {
    /// Through the page cache, with the reason for it.
    pub fn buffered(reason: Option<String>) -> AccessMode {
        AccessMode { name: "buffered", alignment_bytes: 1, reason }
    }
}

/// Bytes that several threads can read by offset at once.
pub trait ReadAt: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`; a short count is allowed, 0 (for a buffer that is not empty) means
    /// that the bytes end before `offset`.
    ///
    /// # Errors
    /// The system's; the caller decides which to retry.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// How the bytes are reached at this moment.
    fn access(&self) -> AccessMode {
        AccessMode { name: "memory", alignment_bytes: 1, reason: None }
    }
}

impl<R: ReadAt + ?Sized> ReadAt for Arc<R> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        (**self).read_at(buf, offset)
    }

    fn access(&self) -> AccessMode {
        (**self).access()
    }
}

/// Bytes in memory, as a reference for the readers of files.
impl ReadAt for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|start| self.get(start..)).unwrap_or(&[]);
        let count = rest.len().min(buf.len());
        buf[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}
