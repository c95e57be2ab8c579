//! Why a checkpoint could not be packed.

use std::io;
use std::path::{Path, PathBuf};

use smoe_format::FormatError;
use smoe_model::ConfigError;
use smoe_quant::QuantError;
use smoe_text::TextError;

/// Errors of packing and verifying.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// A file of the checkpoint, or the vault, cannot be used.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The configuration or the tensors cannot be used.
    #[error("{}: {source}", path.display())]
    Config {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The tokenizer or the chat template cannot be used.
    #[error("{}: {source}", path.display())]
    Text {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong.
        source: TextError,
    },
    /// A weight that is no number.
    #[error("{}: tensor {tensor} holds {value} at element {element}; expected finite numbers, the checkpoint is damaged", path.display())]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index of the element.
        element: u64,
        /// What it is.
        value: f32,
    },
    /// A weight beyond a format's range.
    #[error("{}: tensor {tensor} holds {value} at element {element}, more than {format} can hold; choose BF16 or F32", path.display())]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index of the element.
        element: u64,
        /// What it is.
        value: f32,
        /// The format asked for.
        format: &'static str,
    },
    /// Two tensors that must be the same.
    #[error(
        "{}: tie_word_embeddings says that {first} and {second} are the same weights, but they differ from byte {byte} on; \
         the checkpoint contradicts itself", path.display()
    )]
    NotEqual {
        /// The checkpoint.
        path: PathBuf,
        /// One.
        first: String,
        /// The other.
        second: String,
        /// First byte that differs.
        byte: u64,
    },
    /// The vault is there already.
    #[error("{} exists already; give --force to replace it", path.display())]
    Exists {
        /// The vault.
        path: PathBuf,
    },
    /// The output is no name for a file.
    #[error("{}: {reason}", path.display())]
    Output {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Another process packs the same vault.
    #[error("{} is being written by another process", path.display())]
    Busy {
        /// The partial file.
        path: PathBuf,
    },
    /// Not enough room.
    #[error(
        "{}: no space left: the vault needs {needed} bytes more, {} are free; free some, or choose another drive or \
         smaller formats", path.display(), free.map_or("too few".to_owned(), |free| free.to_string())
    )]
    NoSpace {
        /// The partial file.
        path: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes there are, where known.
        free: Option<u64>,
    },
    /// A file longer than files may be.
    #[error(
        "{}: the vault needs {bytes} bytes in one file, more than the limit of this process (ulimit -f) or of the file system",
        path.display()
    )]
    FileLimit {
        /// The partial file.
        path: PathBuf,
        /// Length of the vault.
        bytes: u64,
    },
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The user asked to stop.
    #[error("interrupted after {done} of {total} parts; the same command resumes")]
    Interrupted {
        /// Finished parts.
        done: usize,
        /// All parts.
        total: usize,
    },
    /// A checkpoint file changed while it was read, or a bug.
    #[error("tensor {tensor}: {source}")]
    Convert {
        /// The tensor.
        tensor: String,
        /// What did not fit.
        source: QuantError,
    },
}

impl PackError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}
