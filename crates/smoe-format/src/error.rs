//! What can be wrong with a file.

use std::io;
use std::path::{Path, PathBuf};

/// A file that cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A file that has to be there.
    #[error("{}: {what} is missing; {advice}", path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
        /// What it is.
        what: &'static str,
        /// What to do.
        advice: String,
    },
    /// The file ends before what it promises.
    #[error("{}: {what} needs {expected} bytes, the file has {found}; it was probably not copied or downloaded to its end", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        what: String,
        /// Bytes needed.
        expected: u64,
        /// Bytes there.
        found: u64,
    },
    /// A field holds what it cannot hold.
    #[error("{}: {what} is {found}; expected {expected}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Field or tensor.
        what: String,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Bytes that changed since they were written.
    #[error("{}: checksum of {what} is {found:016x}, expected {expected:016x}; the file is damaged, copy or pack it again", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Which part.
        what: String,
        /// In the file.
        expected: u64,
        /// Of the bytes.
        found: u64,
    },
    /// Some other kind of file.
    #[error("{}: {reason}", path.display())]
    NotAVault {
        /// The file.
        path: PathBuf,
        /// What it is instead, and what to do.
        reason: String,
    },
    /// A tensor asked for that the checkpoint does not hold.
    #[error("{}: holds no tensor {name}", path.display())]
    UnknownTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Its name.
        name: String,
    },
}

impl FormatError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn invalid(
        path: &Path,
        what: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            what: what.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
