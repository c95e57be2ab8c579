//! Opening a file past the page cache, and finding out whether that really works.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use crate::{AlignedBuffer, StreamError};

/// Smallest alignment used for direct reads: strides are multiples of it, and drives with 4 KiB sectors that accept
/// 512-byte requests serve those slowly.
#[cfg(target_os = "linux")]
pub(crate) const MIN_DIRECT_ALIGNMENT: usize = 4096;

/// Alignments tried where the system does not tell: the usual one, then those of larger sectors. Smaller ones need no
/// try, as what is aligned to 4096 is aligned to 512.
#[cfg(target_os = "linux")]
const PROBED_ALIGNMENTS: [usize; 4] = [4096, 8192, 16384, 65536];

/// A file opened past the cache, or the reason why it cannot be.
pub(crate) enum DirectOpen {
    /// Reads bypass the cache at this alignment (1: any).
    Ready { file: File, alignment: usize, name: &'static str },
    /// They do not; the reason is for people.
    Refused(String),
}

/// Whether an error says "not this way" rather than "not these bytes".
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let refusals = [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOSYS];
    Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

/// Opens `path` past the cache and reads its first block to see that the file system means it.
///
/// # Errors
/// Whatever opening says, except that direct reads are not supported.
#[cfg(target_os = "linux")]
pub(crate) fn open_direct(path: &Path) -> io::Result<DirectOpen> {
    use std::os::unix::fs::OpenOptionsExt;

    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if is_refusal(&error) => {
            return Ok(DirectOpen::Refused(format!("direct reads refused at open: {error}")));
        }
        Err(error) => return Err(error),
    };
    if is_in_memory(&file) {
        // tmpfs accepts O_DIRECT and then copies from the page cache, which is where its files live.
        return Ok(DirectOpen::Refused("the file system keeps its files in memory".into()));
    }
    let candidates = match told_alignment(&file) {
        Some(0) => {
            return Ok(DirectOpen::Refused("the file system has no direct reads for this file".into()));
        }
        Some(alignment) => vec![alignment.max(MIN_DIRECT_ALIGNMENT)],
        None => PROBED_ALIGNMENTS.to_vec(),
    };
    let mut refusal = String::new();
    for alignment in candidates {
        match try_first_read(&file, alignment) {
            Ok(()) => return Ok(DirectOpen::Ready { file, alignment, name: "direct" }),
            Err(error) => refusal = format!("direct reads refused at the first read: {error}"),
        }
    }
    Ok(DirectOpen::Refused(refusal))
}

/// macOS has no alignment to keep: the descriptor is told not to cache.
#[cfg(target_os = "macos")]
pub(crate) fn open_direct(path: &Path) -> io::Result<DirectOpen> {
    let file = OpenOptions::new().read(true).open(path)?;
    Ok(match rustix::fs::fcntl_nocache(&file, true) {
        Ok(()) => DirectOpen::Ready { file, alignment: 1, name: "uncached" },
        Err(error) => DirectOpen::Refused(format!("F_NOCACHE refused: {error}")),
    })
}

/// Elsewhere reads go through the cache.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
pub(crate) fn open_direct(_path: &Path) -> io::Result<DirectOpen> {
    Ok(DirectOpen::Refused("direct reads are not implemented on this system".into()))
}

/// Switches a descriptor from direct to buffered reads, for all threads that use it.
pub(crate) fn make_buffered(file: &File) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let flags = rustix::fs::fcntl_getfl(file)?;
        rustix::fs::fcntl_setfl(file, flags - rustix::fs::OFlags::DIRECT)?;
    }
    let _ = file;
    advise_random(file);
    Ok(())
}

/// Opens `path` through the page cache.
pub(crate) fn open_buffered(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).open(path)?;
    advise_random(&file);
    Ok(file)
}

/// Records are read whole and in no order: read-ahead would fetch bytes that nobody asked for.
fn advise_random(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    let _ = file;
}

/// Whether the file lives on tmpfs or ramfs.
#[cfg(target_os = "linux")]
fn is_in_memory(file: &File) -> bool {
    const TMPFS_MAGIC: u32 = 0x0102_1994;
    const RAMFS_MAGIC: u32 = 0x8584_58f6;
    // The field's type differs between architectures; magic numbers have 32 bits.
    rustix::fs::fstatfs(file).is_ok_and(|fs| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(fs.f_type as u32)))
}

/// The alignment that the system states for this file (Linux 6.1 and later, where the file system reports it);
/// `Some(0)`: none, direct reads are not supported.
#[cfg(target_os = "linux")]
fn told_alignment(file: &File) -> Option<usize> {
    use rustix::fs::{AtFlags, StatxFlags};

    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
    let alignment = memory.max(offset);
    match memory == 0 || offset == 0 || !alignment.is_power_of_two() {
        true => Some(0),
        false => Some(alignment),
    }
}

/// Reads the first block; errors other than a refusal are left to the reads that matter.
#[cfg(target_os = "linux")]
fn try_first_read(file: &File, alignment: usize) -> io::Result<()> {
    use std::os::unix::fs::FileExt;

    let mut buffer = aligned_bytes(alignment, alignment).map_err(io::Error::other)?;
    loop {
        match file.read_at(&mut buffer, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_refusal(&error) => return Err(error),
            _ => return Ok(()),
        }
    }
}

/// A buffer of at least `bytes` whose address is a multiple of `alignment`.
pub(crate) fn aligned_bytes(bytes: usize, alignment: usize) -> Result<AlignedBuffer, StreamError> {
    // Buffers are page-aligned, those of 2 MiB and more huge-page-aligned; the rare alignment between needs the latter.
    let needs_more = alignment > rustix::param::page_size();
    AlignedBuffer::new(if needs_more { bytes.max(crate::HUGE_PAGE_BYTES) } else { bytes })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn tmpfs_is_not_called_direct() {
        let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else { return };
        std::fs::write(file.path(), vec![1; 8192]).unwrap();
        if !is_in_memory(file.as_file()) {
            return;
        }
        assert!(matches!(open_direct(file.path()).unwrap(), DirectOpen::Refused(_)));
    }

    #[test]
    fn proc_files_are_not_called_direct() {
        let DirectOpen::Refused(reason) = open_direct(Path::new("/proc/self/status")).unwrap() else {
            panic!("procfs has no direct reads");
        };
        assert!(reason.contains("refused at open"), "{reason}");
    }

    #[test]
    fn only_refusals_are_refusals() {
        use rustix::io::Errno;
        assert!(is_refusal(&Errno::INVAL.into()));
        assert!(is_refusal(&Errno::OPNOTSUPP.into()));
        assert!(!is_refusal(&Errno::IO.into()));
        assert!(!is_refusal(&io::Error::other("anything")));
    }

    #[test]
    fn alignments_larger_than_a_page_are_met() {
        for alignment in [512, 4096, 8192, 65536] {
            let buffer = aligned_bytes(alignment, alignment).unwrap();
            assert_eq!(buffer.as_ptr() as usize % alignment, 0);
        }
    }
}
