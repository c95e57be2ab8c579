//! Opening a vault and reading its parts.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::{HEADER_LIMIT_BYTES, SUPERBLOCK_BYTES, Superblock, VaultHeader};
use crate::error::FormatError;
use crate::text_file;

/// A vault whose superblock, header and checksum table have been checked.
#[derive(Debug)]
pub struct Vault {
    path: PathBuf,
    file: File,
    superblock: Superblock,
    header: VaultHeader,
    /// Experts first, layer by layer, then resident tensors.
    checksums: Vec<u64>,
    /// Index of each layer's first expert in `checksums`.
    first_expert: Vec<usize>,
}

impl Vault {
    /// Opens a vault. Memory is bounded by the file's length and by the header's limit.
    ///
    /// # Errors
    /// The file is no vault, was cut short, or is damaged.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let (file, bytes) = text_file::open_regular(path)?;
        let mut block = vec![0; SUPERBLOCK_BYTES.min(bytes) as usize];
        file.read_exact_at(&mut block, 0).map_err(FormatError::io(path))?;
        let superblock = Superblock::decode(path, &block, bytes)?;
        if superblock.header.1 > HEADER_LIMIT_BYTES {
            let limit = format!("at most {HEADER_LIMIT_BYTES}");
            return Err(FormatError::invalid(path, "length of the header", limit, superblock.header.1));
        }
        let read_section = |(offset, length): (u64, u64), what: &str, expected: u64| {
            let mut section = vec![0; length as usize];
            file.read_exact_at(&mut section, offset).map_err(FormatError::io(path))?;
            match xxh3_64(&section) {
                found if found == expected => Ok(section),
                found => {
                    Err(FormatError::Checksum { path: path.to_owned(), what: what.into(), expected, found })
                }
            }
        };
        let json = read_section(superblock.header, "the header", superblock.header_checksum)?;
        let header = VaultHeader::parse(path, &json, &superblock)?;
        drop(json);
        // The header has confirmed the table's length, which its limits bound.
        let table = read_section(superblock.checksums, "the checksum table", superblock.checksums_checksum)?;
        let checksums = table.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let first_expert = header
            .expert_layers
            .iter()
            .scan(0, |next, layer| {
                let first = *next;
                *next += layer.count as usize;
                Some(first)
            })
            .collect();
        Ok(Self { path: path.to_owned(), file, superblock, header, checksums, first_expert })
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the superblock says.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// What the header says.
    #[must_use]
    pub fn header(&self) -> &VaultHeader {
        &self.header
    }

    /// Offset and length of the resident section.
    #[must_use]
    pub fn resident_section(&self) -> (u64, u64) {
        self.superblock.resident
    }

    /// Offset and length of the expert section.
    #[must_use]
    pub fn expert_section(&self) -> (u64, u64) {
        self.superblock.experts
    }

    /// Checksum of an expert's record (its whole stride), by index into the expert layers.
    ///
    /// # Panics
    /// There is no such expert.
    #[must_use]
    pub fn expert_checksum(&self, layer_index: usize, expert: u32) -> u64 {
        assert!(expert < self.header.expert_layers[layer_index].count, "expert {expert}");
        self.checksums[self.first_expert[layer_index] + expert as usize]
    }

    /// Checksum of a resident tensor, by its index in the table.
    ///
    /// # Panics
    /// There is no such tensor.
    #[must_use]
    pub fn resident_checksum(&self, index: usize) -> u64 {
        self.checksums[self.checksums.len() - self.header.resident.len() + index]
    }

    /// Compares a resident tensor's bytes with its checksum.
    ///
    /// # Errors
    /// They differ.
    ///
    /// # Panics
    /// There is no such tensor.
    pub fn check_resident(&self, index: usize, bytes: &[u8]) -> Result<(), FormatError> {
        let expected = self.resident_checksum(index);
        match xxh3_64(bytes) {
            found if found == expected => Ok(()),
            found => {
                let what = format!("resident tensor {}", self.header.resident[index].name);
                Err(FormatError::Checksum { path: self.path.clone(), what, expected, found })
            }
        }
    }

    /// Reads a resident tensor (`buf` is as long as it) and compares its checksum.
    ///
    /// # Errors
    /// The read failed or the bytes changed.
    ///
    /// # Panics
    /// There is no such tensor.
    pub fn read_resident(&self, index: usize, buf: &mut [u8]) -> Result<(), FormatError> {
        let offset = self.superblock.resident.0 + self.header.resident[index].offset;
        self.read(offset, buf)?;
        self.check_resident(index, buf)
    }

    /// Reads an expert's record (`buf` is as long as the layer's stride) and compares its checksum.
    ///
    /// # Errors
    /// The read failed or the bytes changed.
    ///
    /// # Panics
    /// There is no such expert.
    pub fn read_expert(&self, layer_index: usize, expert: u32, buf: &mut [u8]) -> Result<(), FormatError> {
        let layer = &self.header.expert_layers[layer_index];
        let expected = self.expert_checksum(layer_index, expert);
        let offset = self.superblock.experts.0 + layer.base + u64::from(expert) * layer.stride;
        self.read(offset, buf)?;
        match xxh3_64(buf) {
            found if found == expected => Ok(()),
            found => {
                let what = format!("expert {expert} of layer {}", layer.layer);
                Err(FormatError::Checksum { path: self.path.clone(), what, expected, found })
            }
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), FormatError> {
        self.file.read_exact_at(buf, offset).map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => FormatError::Truncated {
                path: self.path.clone(),
                what: "the vault".into(),
                expected: self.superblock.total_bytes,
                found: self.file.metadata().map_or(0, |metadata| metadata.len()),
            },
            _ => FormatError::Io { path: self.path.clone(), source },
        })
    }
}
