//! The first 4 KiB: magic, version, where the sections lie, and their checksums.

use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use super::ALIGNMENTS;
use crate::error::FormatError;

/// Length of the superblock; the header follows.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// First bytes of a vault.
pub const MAGIC: [u8; 8] = *b"SMOEVLT\n";
/// Version of the layout.
pub const VERSION: u32 = 1;

/// First bytes of vaults that the original S-MoE engine wrote.
const S_MOE_MAGIC: [u8; 8] = [b'S', b'M', b'O', b'E', 0xDE, 0xEA, 0x00, 0x01];
const GGUF_MAGIC: [u8; 4] = *b"GGUF";

/// What the superblock says; a section is its offset and its length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Alignment of sections and expert records.
    pub alignment: u32,
    /// The JSON header.
    pub header: (u64, u64),
    /// XXH3-64 of the header.
    pub header_checksum: u64,
    /// Resident tensors.
    pub resident: (u64, u64),
    /// Expert records.
    pub experts: (u64, u64),
    /// Checksum table.
    pub checksums: (u64, u64),
    /// XXH3-64 of the checksum table.
    pub checksums_checksum: u64,
    /// Length of the file.
    pub total_bytes: u64,
}

/// Offsets of the fields.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 8;
    pub(super) const ALIGNMENT: usize = 12;
    pub(super) const HEADER: usize = 16;
    pub(super) const HEADER_CHECKSUM: usize = 32;
    pub(super) const RESIDENT: usize = 40;
    pub(super) const EXPERTS: usize = 56;
    pub(super) const CHECKSUMS: usize = 72;
    pub(super) const CHECKSUMS_CHECKSUM: usize = 88;
    pub(super) const TOTAL: usize = 96;
    pub(super) const END: usize = 104;
    pub(super) const CHECKSUM: usize = 4088;
}
const _: () = assert!(at::CHECKSUM + 8 == SUPERBLOCK_BYTES as usize);

impl Superblock {
    /// The block as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES as usize] {
        let mut block = [0; SUPERBLOCK_BYTES as usize];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(at::MAGIC, &MAGIC);
        put(at::VERSION, &VERSION.to_le_bytes());
        put(at::ALIGNMENT, &self.alignment.to_le_bytes());
        for (at, (offset, bytes)) in [
            (at::HEADER, self.header),
            (at::RESIDENT, self.resident),
            (at::EXPERTS, self.experts),
            (at::CHECKSUMS, self.checksums),
        ] {
            put(at, &offset.to_le_bytes());
            put(at + 8, &bytes.to_le_bytes());
        }
        put(at::HEADER_CHECKSUM, &self.header_checksum.to_le_bytes());
        put(at::CHECKSUMS_CHECKSUM, &self.checksums_checksum.to_le_bytes());
        put(at::TOTAL, &self.total_bytes.to_le_bytes());
        let checksum = xxh3_64(&block[..at::CHECKSUM]);
        block[at::CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        block
    }

    /// Reads and checks the block of a file of `file_bytes`.
    ///
    /// # Errors
    /// The file is no vault, one of another version, cut short, or damaged.
    pub fn decode(path: &Path, block: &[u8], file_bytes: u64) -> Result<Self, FormatError> {
        let not_a_vault =
            |reason: &str| FormatError::NotAVault { path: path.to_owned(), reason: reason.into() };
        recognize(block).map_or(Ok(()), |reason| Err(not_a_vault(reason)))?;
        let truncated = |what: &str, expected, found| FormatError::Truncated {
            path: path.to_owned(),
            what: what.into(),
            expected,
            found,
        };
        let Some(block) = block.first_chunk::<{ SUPERBLOCK_BYTES as usize }>() else {
            return Err(truncated("the superblock", SUPERBLOCK_BYTES, block.len() as u64));
        };
        let version = read_u32(block, at::VERSION);
        if version != VERSION {
            let hint = if version > VERSION { "a newer smoe wrote it" } else { "pack the checkpoint again" };
            return Err(FormatError::invalid(
                path,
                "the vault's version",
                format!("{VERSION} ({hint})"),
                version,
            ));
        }
        let expected = read_u64(block, at::CHECKSUM);
        let found = xxh3_64(&block[..at::CHECKSUM]);
        if expected != found {
            return Err(FormatError::Checksum {
                path: path.to_owned(),
                what: "the superblock".into(),
                expected,
                found,
            });
        }
        let section = |at| (read_u64(block, at), read_u64(block, at + 8));
        let superblock = Self {
            alignment: read_u32(block, at::ALIGNMENT),
            header: section(at::HEADER),
            header_checksum: read_u64(block, at::HEADER_CHECKSUM),
            resident: section(at::RESIDENT),
            experts: section(at::EXPERTS),
            checksums: section(at::CHECKSUMS),
            checksums_checksum: read_u64(block, at::CHECKSUMS_CHECKSUM),
            total_bytes: read_u64(block, at::TOTAL),
        };
        superblock.check(path)?;
        if block[at::END..at::CHECKSUM].iter().any(|&byte| byte != 0) {
            return Err(FormatError::invalid(
                path,
                "the superblock's reserved bytes",
                "zeros",
                "something else",
            ));
        }
        if superblock.total_bytes > file_bytes {
            return Err(truncated("the vault", superblock.total_bytes, file_bytes));
        }
        if superblock.total_bytes < file_bytes {
            return Err(FormatError::invalid(
                path,
                "its length in bytes",
                superblock.total_bytes,
                file_bytes,
            ));
        }
        Ok(superblock)
    }

    /// Sections follow each other, aligned, up to the end of the file.
    fn check(&self, path: &Path) -> Result<(), FormatError> {
        let alignment = u64::from(self.alignment);
        if !ALIGNMENTS.contains(&alignment) {
            return Err(FormatError::invalid(path, "the alignment", "4096 or 16384", alignment));
        }
        let sections = [
            ("the header", self.header, SUPERBLOCK_BYTES),
            ("the resident section", self.resident, alignment),
            ("the expert section", self.experts, alignment),
            ("the checksum table", self.checksums, alignment),
        ];
        let mut end = SUPERBLOCK_BYTES;
        for (name, (offset, bytes), alignment) in sections {
            if offset < end || !offset.is_multiple_of(alignment) {
                let expected = format!("a multiple of {alignment} from {end} on");
                return Err(FormatError::invalid(path, format!("offset of {name}"), expected, offset));
            }
            end = offset.checked_add(bytes).filter(|&end| end <= self.total_bytes).ok_or_else(|| {
                let expected = format!("within {} bytes", self.total_bytes);
                FormatError::invalid(path, format!("end of {name}"), expected, format!("{offset} + {bytes}"))
            })?;
        }
        if end != self.total_bytes {
            return Err(FormatError::invalid(path, "end of the checksum table", self.total_bytes, end));
        }
        Ok(())
    }
}

/// What a file is that is no vault; none for a vault.
fn recognize(block: &[u8]) -> Option<&'static str> {
    if block.starts_with(&MAGIC) {
        return None;
    }
    if block.starts_with(&S_MOE_MAGIC) {
        return Some(
            "this is a vault of the original S-MoE engine, whose layout smoe does not read; pack the checkpoint again \
             with `smoe pack`",
        );
    }
    if block.starts_with(&GGUF_MAGIC) {
        return Some(
            "this is a GGUF file, not a vault; pack the model's checkpoint directory with `smoe pack`",
        );
    }
    if block.is_empty() {
        return Some("the file is empty; expected a vault (pack a checkpoint directory with `smoe pack`)");
    }
    Some("this is not a vault (the magic bytes are missing); pack a checkpoint directory with `smoe pack`")
}

fn read_u32(block: &[u8; SUPERBLOCK_BYTES as usize], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&block[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn read_u64(block: &[u8; SUPERBLOCK_BYTES as usize], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&block[at..at + 8]);
    u64::from_le_bytes(bytes)
}
