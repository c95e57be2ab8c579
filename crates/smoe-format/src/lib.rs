//! Safetensors files, checkpoint directories and vaults: untrusted bytes in, checked views out.
//!
//! Readers here trust no byte: every length, count and offset is compared with a named limit and with the bytes that are
//! there before it is used. What weights mean is not known here.

mod checkpoint;
mod error;
pub mod safetensors;
mod text_file;
pub mod vault;

pub use checkpoint::{Checkpoint, CheckpointTensor};
pub use error::FormatError;
pub use vault::{
    ExpertLayer, Provenance, RecordPart, ResidentEntry, SUPERBLOCK_BYTES, Superblock, Vault, VaultHeader,
};
