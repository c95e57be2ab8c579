//! Space on the drive that a file would be written to.

use std::fs::File;
use std::io;
use std::path::Path;

/// Bytes that an unprivileged user may still write in the file system of a directory; none if the system does not tell.
#[must_use]
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Bytes that a file takes on its drive.
pub(crate) fn allocated_bytes(file: &File) -> u64 {
    use std::os::unix::fs::MetadataExt;
    /// The unit of `st_blocks`, whatever the file system's blocks are.
    const BLOCK_BYTES: u64 = 512;
    file.metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(BLOCK_BYTES))
}

/// Makes a file as long as it will be, with space for all of it where the file system can promise that.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::io::Errno;
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    file.set_len(bytes)
}

/// Tells the system that a file's pages will not be needed again soon; a whole checkpoint passes through here.
pub(crate) fn forget_pages(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    let _ = file;
}

pub(crate) fn is_no_space(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

/// Whether a file grew beyond the process's limit or the file system's.
pub(crate) fn is_file_limit(error: &io::Error) -> bool {
    rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::FBIG)
}
