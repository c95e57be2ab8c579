//! Vaults: one file that holds a packed model. The bytes are described in `docs/vault-format.md`.

mod header;
mod open;
mod superblock;

pub use header::{ExpertLayer, HEADER_LIMIT_BYTES, Provenance, RecordPart, ResidentEntry, VaultHeader};
pub use open::Vault;
pub use superblock::{MAGIC, SUPERBLOCK_BYTES, Superblock, VERSION};

/// Resident tensors and parts of a record begin at multiples of this: a cache line.
pub const PART_ALIGNMENT: u64 = 64;
/// Alignments of sections and records that this version writes and reads.
pub const ALIGNMENTS: [u64; 2] = [4096, 16384];
