//! Page-aligned, zeroed, anonymous memory that direct reads accept.
// Mapping memory is an unsafe system interface; this module is the only owner of the mappings it makes.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::{fmt, io, slice};

use rustix::mm::{MapFlags, ProtFlags};

use crate::StreamError;

/// Size and alignment of a huge page on x86-64 and on aarch64 with 4 KiB base pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Owned bytes at a page boundary; at a 2 MiB boundary, with huge pages asked for, from 2 MiB on.
///
/// The pages are zero and cost no memory until they are touched, so the resident set grows with use.
pub struct AlignedBuffer {
    /// First byte of the buffer, within the mapping (dangling for an empty buffer).
    start: NonNull<u8>,
    len: usize,
    /// Start and length of the whole mapping; length 0 means that there is none.
    mapping: NonNull<u8>,
    mapping_bytes: usize,
}

// SAFETY: the buffer owns its mapping exclusively, like `Box<[u8]>`; nothing in it is tied to a thread.
unsafe impl Send for AlignedBuffer {}
// SAFETY: shared access gives out `&[u8]` only; all writes need `&mut self` or go through `SlotArena`, which has its
// own argument.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// Maps `bytes` zeroed bytes.
    ///
    /// # Errors
    /// [`StreamError::OutOfMemory`] where the system refuses the mapping or the size overflows an address.
    pub fn new(bytes: usize) -> Result<AlignedBuffer, StreamError> {
        if bytes == 0 {
            let dangling = NonNull::<u8>::dangling();
            return Ok(AlignedBuffer { start: dangling, len: 0, mapping: dangling, mapping_bytes: 0 });
        }
        let out_of_memory = |source| StreamError::OutOfMemory { bytes: bytes as u64, source };
        let huge = bytes >= HUGE_PAGE_BYTES;
        // The kernel aligns to a base page only: map one huge page more and start at the boundary within.
        let slack = if huge { HUGE_PAGE_BYTES } else { 0 };
        let mapping_bytes = bytes
            .checked_next_multiple_of(rustix::param::page_size())
            .and_then(|rounded| rounded.checked_add(slack))
            .filter(|total| isize::try_from(*total).is_ok())
            .ok_or_else(|| out_of_memory(io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: a null hint asks for a new private mapping at an address of the kernel's choice; no existing memory
        // is replaced.
        let address = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapping_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|error| out_of_memory(error.into()))?;
        let mapping = NonNull::new(address.cast::<u8>())
            .ok_or_else(|| out_of_memory(io::ErrorKind::OutOfMemory.into()))?;
        let shift = if huge { mapping.as_ptr().align_offset(HUGE_PAGE_BYTES) } else { 0 };
        debug_assert!(shift <= slack);
        // SAFETY: the start is below HUGE_PAGE_BYTES bytes into a mapping that has that much slack.
        let start = unsafe { mapping.add(shift) };
        let buffer = AlignedBuffer { start, len: bytes, mapping, mapping_bytes };
        buffer.ask_for_huge_pages();
        Ok(buffer)
    }

    /// Asks for huge pages where the buffer is large enough; a refusal costs speed only, so it is no error.
    fn ask_for_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.len >= HUGE_PAGE_BYTES {
            // SAFETY: the range lies within the mapping, and the advice changes neither contents nor validity.
            let _ = unsafe {
                rustix::mm::madvise(self.start.as_ptr().cast(), self.len, rustix::mm::Advice::LinuxHugepage)
            };
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte, with permission to reach the whole buffer, and without making a reference to any of it.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.start
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start..start + len` is mapped, zero-initialized and owned by this buffer (or empty).
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if self.mapping_bytes > 0 {
            // SAFETY: the mapping was made by `new` with this length, and nothing can use it after the owner is gone.
            let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.mapping_bytes) };
        }
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_writable_and_aligned() {
        for bytes in [1, 4095, 4096, 4097, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5] {
            let mut buffer = AlignedBuffer::new(bytes).unwrap();
            assert_eq!(buffer.len(), bytes);
            let alignment = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 4096 };
            assert_eq!(buffer.as_ptr() as usize % alignment, 0, "{bytes} bytes");
            assert!(buffer.iter().all(|&byte| byte == 0));
            buffer.fill(0xA5);
            assert!(buffer.iter().all(|&byte| byte == 0xA5));
        }
    }

    #[test]
    fn an_empty_buffer_is_usable() {
        let mut buffer = AlignedBuffer::new(0).unwrap();
        assert!(buffer.is_empty());
        assert_eq!(buffer.iter().count(), 0);
        buffer.fill(1);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for bytes in [usize::MAX, usize::MAX - 4096, isize::MAX as usize, 1 << 60] {
            let error = AlignedBuffer::new(bytes).unwrap_err();
            assert!(
                matches!(error, StreamError::OutOfMemory { bytes: b, .. } if b == bytes as u64),
                "{error}"
            );
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn untouched_pages_cost_no_memory() {
        let before = crate::process_rss_bytes().unwrap();
        let mut buffer = AlignedBuffer::new(1 << 30).unwrap();
        let mapped = crate::process_rss_bytes().unwrap();
        assert!(
            mapped < before + (256 << 20),
            "mapping 1 GiB grew the resident set from {before} to {mapped}"
        );
        buffer[..64 << 20].fill(1);
        let touched = crate::process_rss_bytes().unwrap();
        assert!(touched >= mapped + (48 << 20), "touching 64 MiB grew it from {mapped} to {touched}");
    }
}
