//! Text files of a checkpoint, with a limit on their length.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::error::FormatError;

/// Opens a regular file; anything else (a directory, a pipe, a device) could block or never end.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), FormatError> {
    let metadata = std::fs::metadata(path).map_err(FormatError::io(path))?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() { "a directory" } else { "no regular file" };
        return Err(FormatError::invalid(path, "this path", "a file", kind));
    }
    let file = File::open(path).map_err(FormatError::io(path))?;
    Ok((file, metadata.len()))
}

/// Reads a whole file as UTF-8.
pub(crate) fn read(path: &Path, limit_bytes: u64) -> Result<String, FormatError> {
    let (file, bytes) = open_regular(path)?;
    let too_long = |found: u64| {
        FormatError::invalid(path, "its length in bytes", format!("at most {limit_bytes}"), found)
    };
    if bytes > limit_bytes {
        return Err(too_long(bytes));
    }
    let mut content = Vec::new();
    // One byte more than allowed, so that a file that grew meanwhile is noticed.
    file.take(limit_bytes + 1).read_to_end(&mut content).map_err(FormatError::io(path))?;
    if content.len() as u64 > limit_bytes {
        return Err(too_long(content.len() as u64));
    }
    String::from_utf8(content).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        FormatError::invalid(path, "its text", "UTF-8", format!("invalid from byte {at} on"))
    })
}

/// [`read`] for a file that may be absent.
pub(crate) fn read_if_there(path: &Path, limit_bytes: u64) -> Result<Option<String>, FormatError> {
    match read(path, limit_bytes) {
        Ok(text) => Ok(Some(text)),
        Err(FormatError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
