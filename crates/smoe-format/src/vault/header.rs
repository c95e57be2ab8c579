//! The JSON header: texts of the checkpoint, and tables of what lies where.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use smoe_quant::BlockFormat;

use super::{PART_ALIGNMENT, Superblock};
use crate::error::FormatError;

/// Longest header in bytes: a tokenizer at its limit and the largest tables.
pub const HEADER_LIMIT_BYTES: u64 = 512 << 20;
/// Most resident tensors; the largest models have some thousands.
const RESIDENT_LIMIT: usize = 1 << 20;
/// Most expert layers, and experts of one; published models have about 100 and up to 1,024.
const LAYERS_LIMIT: usize = 4096;
const EXPERTS_LIMIT: u32 = 1 << 16;
/// Largest dimension of a matrix; vocabularies have up to about 300,000 entries.
const DIMENSION_LIMIT: u64 = 1 << 31;

/// Everything that a vault says about its model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VaultHeader {
    /// `config.json`, as the checkpoint has it.
    pub config: String,
    /// `generation_config.json`.
    pub generation_config: Option<String>,
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<String>,
    /// `chat_template.jinja`.
    pub chat_template: Option<String>,
    /// Tensors of the resident section, in its order.
    pub resident: Vec<ResidentEntry>,
    /// Sparse layers, in the model's order.
    pub expert_layers: Vec<ExpertLayer>,
    /// Where the vault comes from.
    pub provenance: Provenance,
}

/// A resident tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentEntry {
    /// Its name in the checkpoint.
    pub name: String,
    /// Block format of its rows.
    #[serde(with = "format_name")]
    pub format: BlockFormat,
    /// One dimension or two: `[columns]` or `[rows, columns]`.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the section.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The experts of one layer: `count` records, `stride` bytes apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLayer {
    /// Index of the layer in the model.
    pub layer: u32,
    /// First byte, counted from the start of the expert section.
    pub base: u64,
    /// Bytes from one record to the next.
    pub stride: u64,
    /// Bytes of a record that mean something; zeros follow.
    pub record_bytes: u64,
    /// Number of experts.
    pub count: u32,
    /// What lies where in a record.
    pub parts: Vec<RecordPart>,
}

/// A matrix within a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordPart {
    /// `gate`, `up` or `down`.
    pub name: String,
    /// Block format of its rows.
    #[serde(with = "format_name")]
    pub format: BlockFormat,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// First byte, counted from the start of the record.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Where a vault comes from and how it was made.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Provenance {
    /// Name of the checkpoint's directory.
    pub source: String,
    /// `smoe` and its version.
    pub packed_by: String,
    /// Format that was asked for for experts.
    pub expert_format: String,
    /// Format that was asked for for dense weights.
    pub dense_format: String,
    /// Tensors that took another format, with the reason.
    pub fallbacks: Vec<String>,
    /// Tensors that were not packed, with the reason.
    pub ignored_tensors: Vec<String>,
    /// Keys of `config.json` that the packer was told to ignore.
    pub ignored_keys: Vec<String>,
}

impl VaultHeader {
    /// Reads and checks a header against its superblock.
    ///
    /// # Errors
    /// The JSON is not what it should be, or a table entry lies outside its section, overlaps another, or contradicts its
    /// own shape.
    pub fn parse(path: &Path, json: &[u8], superblock: &Superblock) -> Result<Self, FormatError> {
        let header: Self = serde_json::from_slice(json)
            .map_err(|error| FormatError::invalid(path, "the vault's header", "its JSON object", error))?;
        header.check(path, superblock)?;
        Ok(header)
    }

    /// Number of entries of the checksum table.
    #[must_use]
    pub fn checksums(&self) -> u64 {
        let experts: u64 = self.expert_layers.iter().map(|layer| u64::from(layer.count)).sum();
        experts + self.resident.len() as u64
    }

    fn check(&self, path: &Path, superblock: &Superblock) -> Result<(), FormatError> {
        if self.resident.len() > RESIDENT_LIMIT || self.expert_layers.len() > LAYERS_LIMIT {
            let found = format!("{} and {}", self.resident.len(), self.expert_layers.len());
            let limit = format!("at most {RESIDENT_LIMIT} and {LAYERS_LIMIT}");
            return Err(FormatError::invalid(
                path,
                "the number of resident tensors and layers",
                limit,
                found,
            ));
        }
        let mut names = HashSet::new();
        let mut end = 0;
        for entry in &self.resident {
            if !names.insert(entry.name.as_str()) {
                return Err(FormatError::invalid(
                    path,
                    format!("tensor {}", entry.name),
                    "listed once",
                    "twice",
                ));
            }
            end = entry.check(path, end, superblock.resident.1)?;
        }
        let mut end = 0;
        let mut next_layer = 0;
        for layer in &self.expert_layers {
            if layer.layer < next_layer {
                let what = "the order of expert layers";
                return Err(FormatError::invalid(path, what, format!("{next_layer} or more"), layer.layer));
            }
            next_layer = layer.layer.saturating_add(1);
            end = layer.check(path, end, superblock)?;
        }
        let expected = self.checksums() * 8;
        if superblock.checksums.1 != expected {
            let what = "length of the checksum table";
            return Err(FormatError::invalid(path, what, expected, superblock.checksums.1));
        }
        Ok(())
    }
}

/// Bytes of a matrix, if its rows divide into blocks and the number fits.
fn matrix_bytes(format: BlockFormat, rows: u64, columns: u64) -> Option<u64> {
    if rows == 0 || rows > DIMENSION_LIMIT || columns > DIMENSION_LIMIT {
        return None;
    }
    let row_bytes = format.row_bytes(usize::try_from(columns).ok()?)?;
    (row_bytes as u64).checked_mul(rows)
}

impl ResidentEntry {
    /// Checks against the end of the entry before and the section's length; returns its own end.
    fn check(&self, path: &Path, start: u64, section_bytes: u64) -> Result<u64, FormatError> {
        let name = &self.name;
        let expected = match self.shape[..] {
            [columns] => matrix_bytes(self.format, 1, columns),
            [rows, columns] => matrix_bytes(self.format, rows, columns),
            _ => None,
        };
        if expected != Some(self.bytes) {
            return Err(FormatError::invalid(
                path,
                format!("length in bytes of tensor {name} ({} {:?})", self.format, self.shape),
                expected.map_or("a matrix or vector of whole blocks".into(), |bytes| bytes.to_string()),
                self.bytes,
            ));
        }
        let end = self.offset.checked_add(self.bytes).filter(|&end| end <= section_bytes);
        match end {
            Some(end) if self.offset >= start && self.offset.is_multiple_of(PART_ALIGNMENT) => Ok(end),
            _ => Err(FormatError::invalid(
                path,
                format!("place of tensor {name}"),
                format!("a multiple of {PART_ALIGNMENT} from {start} on, within {section_bytes}"),
                format!("{} + {}", self.offset, self.bytes),
            )),
        }
    }
}

impl ExpertLayer {
    /// Checks against the end of the layer before and the sections; returns its own end.
    fn check(&self, path: &Path, start: u64, superblock: &Superblock) -> Result<u64, FormatError> {
        let invalid = |what: &str, expected: String, found: String| {
            FormatError::invalid(path, format!("{what} of expert layer {}", self.layer), expected, found)
        };
        let alignment = u64::from(superblock.alignment);
        if self.count == 0 || self.count > EXPERTS_LIMIT {
            return Err(invalid("count", format!("1 to {EXPERTS_LIMIT}"), self.count.to_string()));
        }
        if self.stride == 0 || !self.stride.is_multiple_of(alignment) {
            return Err(invalid("stride", format!("a multiple of {alignment}"), self.stride.to_string()));
        }
        if self.record_bytes == 0 || self.record_bytes > self.stride {
            return Err(invalid(
                "record_bytes",
                format!("1 to {}", self.stride),
                self.record_bytes.to_string(),
            ));
        }
        let section_bytes = superblock.experts.1;
        let end =
            self.stride.checked_mul(u64::from(self.count)).and_then(|bytes| self.base.checked_add(bytes));
        let end = end
            .filter(|&end| end <= section_bytes && self.base >= start && self.base.is_multiple_of(alignment));
        let Some(end) = end else {
            let expected = format!("a multiple of {alignment} from {start} on, within {section_bytes}");
            return Err(invalid(
                "place",
                expected,
                format!("{} + {} × {}", self.base, self.count, self.stride),
            ));
        };
        let mut names = HashSet::new();
        let mut part_start = 0;
        for part in &self.parts {
            let what = format!("part {}", part.name);
            if !names.insert(part.name.as_str()) {
                return Err(invalid(&what, "listed once".into(), "twice".into()));
            }
            let bytes = matrix_bytes(part.format, part.rows, part.columns);
            if bytes != Some(part.bytes) {
                let expected = bytes.map_or("whole blocks".into(), |bytes| format!("{bytes} bytes"));
                return Err(invalid(&what, expected, format!("{} bytes", part.bytes)));
            }
            let part_end = part.offset.checked_add(part.bytes).filter(|&end| end <= self.record_bytes);
            let placed = part.offset >= part_start && part.offset.is_multiple_of(PART_ALIGNMENT);
            let Some(part_end) = part_end.filter(|_| placed) else {
                let expected =
                    format!("a multiple of {PART_ALIGNMENT} from {part_start} on, within the record");
                return Err(invalid(&what, expected, format!("{} + {}", part.offset, part.bytes)));
            };
            part_start = part_end;
        }
        Ok(end)
    }
}

/// Formats by name.
mod format_name {
    use super::*;

    pub(super) fn serialize<S: Serializer>(format: &BlockFormat, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(format.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BlockFormat, D::Error> {
        let name = String::deserialize(deserializer)?;
        BlockFormat::from_name(&name).ok_or_else(|| D::Error::custom(format!("unknown block format {name}")))
    }
}
