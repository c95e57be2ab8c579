//! What will be written, decided before anything is.

use std::collections::BTreeMap;
use std::path::Path;

use smoe_format::vault::PART_ALIGNMENT;
use smoe_format::{
    Checkpoint, ExpertLayer, Provenance, RecordPart, ResidentEntry, SUPERBLOCK_BYTES, Superblock, VaultHeader,
};
use smoe_model::{
    ConfigOptions, ExpertLayerPlan, ModelConfig, SourceTensor, TensorPlan, WeightClass, plan_tensors,
};
use smoe_quant::BlockFormat;
use smoe_text::{ChatTemplate, TextFiles, Tokenizer};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::error::PackError;

/// Choices of the person who packs.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Format of experts.
    pub experts: BlockFormat,
    /// Format of dense matrices.
    pub dense: BlockFormat,
    /// Alignment of sections and records: 4096 or 16384.
    pub alignment: u64,
    /// Keys of `config.json` that do not matter.
    pub ignored_keys: Vec<String>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            experts: BlockFormat::Q4_0,
            dense: BlockFormat::Q8_0,
            alignment: 4096,
            ignored_keys: Vec::new(),
        }
    }
}

/// Tensors of one kind in one format.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct FormatUse {
    /// `experts`, `dense`, `norm`, `router` or `bias`.
    pub class: &'static str,
    /// Name of the format.
    pub format: String,
    /// Matrices and vectors.
    pub tensors: u64,
    /// Weights.
    pub elements: u64,
    /// Bytes in the vault.
    pub bytes: u64,
}

/// A checkpoint that can be packed, and where everything goes.
pub struct PackPlan {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) header: VaultHeader,
    pub(crate) header_json: Vec<u8>,
    /// Without the checksum table's checksum, which is known at the end.
    pub(crate) superblock: Superblock,
    pub(crate) units: Vec<Unit>,
    pub(crate) must_equal: Vec<(String, String)>,
    formats: Vec<FormatUse>,
}

/// A piece of work: one entry of the checksum table.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    /// First byte in the file.
    pub(crate) offset: u64,
    /// Length with padding.
    pub(crate) bytes: u64,
    /// Matrices, in order of their offsets.
    pub(crate) parts: Vec<Part>,
}

/// A matrix within a unit.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) class: &'static str,
    pub(crate) tensor: String,
    pub(crate) first_row: u64,
    pub(crate) rows: u64,
    pub(crate) columns: usize,
    pub(crate) source: BlockFormat,
    pub(crate) format: BlockFormat,
    /// First byte within the unit.
    pub(crate) offset: u64,
}

/// Class of the experts' matrices in reports.
pub(crate) const EXPERTS: &str = "experts";

impl PackPlan {
    /// Opens a checkpoint and decides where everything goes; reads no weights.
    ///
    /// # Errors
    /// [`PackError`] names the file, key or tensor that stands in the way.
    pub fn new(path: &Path, options: &PackOptions) -> Result<Self, PackError> {
        let checkpoint = Checkpoint::open(path)?;
        let config_error = |source| PackError::Config { path: path.to_owned(), source };
        let config_options = ConfigOptions { ignored_keys: options.ignored_keys.clone() };
        let config = ModelConfig::from_json(&checkpoint.config, &config_options).map_err(config_error)?;
        check_text_side(&checkpoint)?;
        let sources: BTreeMap<_, _> = checkpoint
            .tensors()
            .iter()
            .map(|(name, tensor)| {
                (name.clone(), SourceTensor { dtype: tensor.dtype.clone(), shape: tensor.shape.clone() })
            })
            .collect();
        let tensors = plan_tensors(&config, &sources).map_err(config_error)?;
        let mut layout = Layout::new(&checkpoint, options);
        let resident = layout.resident(&tensors);
        let experts = layout.experts(&tensors);
        let Layout { fallbacks, formats, .. } = layout;
        let provenance = Provenance {
            source: checkpoint_name(path),
            packed_by: format!("smoe {}", env!("CARGO_PKG_VERSION")),
            expert_format: options.experts.name().to_owned(),
            dense_format: options.dense.name().to_owned(),
            fallbacks,
            ignored_tensors: tensors.ignored.iter().map(|(name, why)| format!("{name}: {why}")).collect(),
            ignored_keys: options.ignored_keys.clone(),
        };
        Ok(Self::place(
            checkpoint,
            resident,
            experts,
            provenance,
            formats,
            tensors.must_equal,
            options.alignment,
        ))
    }

    /// Puts the sections one after the other.
    fn place(
        checkpoint: Checkpoint,
        (resident, resident_units, resident_bytes): (Vec<ResidentEntry>, Vec<Unit>, u64),
        (expert_layers, expert_units, expert_bytes): (Vec<ExpertLayer>, Vec<Unit>, u64),
        provenance: Provenance,
        formats: Vec<FormatUse>,
        must_equal: Vec<(String, String)>,
        alignment: u64,
    ) -> Self {
        let header = VaultHeader {
            config: checkpoint.config.clone(),
            generation_config: checkpoint.generation_config.clone(),
            tokenizer: checkpoint.tokenizer.clone(),
            tokenizer_config: checkpoint.tokenizer_config.clone(),
            chat_template: checkpoint.chat_template.clone(),
            resident,
            expert_layers,
            provenance,
        };
        // Strings and numbers only: serializing cannot fail.
        let header_json = serde_json::to_vec(&header).unwrap_or_default();
        let aligned = |offset: u64| offset.next_multiple_of(alignment);
        let resident_start = aligned(SUPERBLOCK_BYTES + header_json.len() as u64);
        let experts_start = aligned(resident_start + resident_bytes);
        let checksums_start = aligned(experts_start + expert_bytes);
        let checksums_bytes = 8 * header.checksums();
        let superblock = Superblock {
            alignment: alignment as u32,
            header: (SUPERBLOCK_BYTES, header_json.len() as u64),
            header_checksum: xxh3_64(&header_json),
            resident: (resident_start, resident_bytes),
            experts: (experts_start, expert_bytes),
            checksums: (checksums_start, checksums_bytes),
            checksums_checksum: 0,
            total_bytes: checksums_start + checksums_bytes,
        };
        // In the order of the checksum table.
        let place = |start: u64| move |unit: Unit| Unit { offset: start + unit.offset, ..unit };
        let mut units: Vec<_> = expert_units.into_iter().map(place(experts_start)).collect();
        units.extend(resident_units.into_iter().map(place(resident_start)));
        Self { checkpoint, header, header_json, superblock, units, must_equal, formats }
    }

    /// What the vault's header will say.
    #[must_use]
    pub fn header(&self) -> &VaultHeader {
        &self.header
    }

    /// Length of the vault.
    #[must_use]
    pub fn vault_bytes(&self) -> u64 {
        self.superblock.total_bytes
    }

    /// Length of the resident section.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.superblock.resident.1
    }

    /// Length of the expert section.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.superblock.experts.1
    }

    /// Bytes that are read from the checkpoint.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.units.iter().map(Unit::source_bytes).sum()
    }

    /// How much of what is in which format.
    #[must_use]
    pub fn formats(&self) -> &[FormatUse] {
        &self.formats
    }

    /// Identifies the plan and the files it reads: a partial vault may only be continued by an equal one.
    pub(crate) fn fingerprint(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let mut hash = Xxh3::new();
        hash.update(&self.superblock.encode());
        hash.update(&self.header_json);
        for (path, bytes) in self.checkpoint.shards() {
            hash.update(path.as_os_str().as_encoded_bytes());
            hash.update(&bytes.to_le_bytes());
            if let Ok(metadata) = std::fs::metadata(path) {
                hash.update(&metadata.mtime().to_le_bytes());
                hash.update(&metadata.mtime_nsec().to_le_bytes());
            }
        }
        hash.digest()
    }
}

impl Unit {
    pub(crate) fn source_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.elements() * part.source.block_bytes() as u64).sum()
    }
}

impl Part {
    pub(crate) fn elements(&self) -> u64 {
        self.rows * self.columns as u64
    }

    pub(crate) fn row_bytes(&self) -> u64 {
        self.format.row_bytes(self.columns).unwrap_or(0) as u64
    }
}

/// A vault without a working tokenizer or template would be found out too late.
fn check_text_side(checkpoint: &Checkpoint) -> Result<(), PackError> {
    let text_error = |source| PackError::Text { path: checkpoint.path().to_owned(), source };
    let files = TextFiles {
        tokenizer: &checkpoint.tokenizer,
        tokenizer_config: checkpoint.tokenizer_config.as_deref(),
        generation_config: checkpoint.generation_config.as_deref(),
        config: &checkpoint.config,
        chat_template: checkpoint.chat_template.as_deref(),
    };
    Tokenizer::from_files(&files).map_err(text_error)?;
    ChatTemplate::from_files(&files).map_err(text_error)?;
    Ok(())
}

/// Name of the directory, without the path that only this machine has.
fn checkpoint_name(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    absolute.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// The layout in the making.
struct Layout<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a PackOptions,
    fallbacks: Vec<String>,
    formats: Vec<FormatUse>,
}

impl<'a> Layout<'a> {
    fn new(checkpoint: &'a Checkpoint, options: &'a PackOptions) -> Self {
        Self { checkpoint, options, fallbacks: Vec::new(), formats: Vec::new() }
    }

    /// Format of a tensor's elements in the checkpoint; the plan has checked that it is one of these.
    fn source_format(&self, tensor: &str) -> BlockFormat {
        let dtype = self.checkpoint.tensors().get(tensor).map(|tensor| tensor.dtype.as_str());
        match dtype {
            Some("F16") => BlockFormat::F16,
            Some("F32") => BlockFormat::F32,
            _ => BlockFormat::BF16,
        }
    }

    /// The format asked for, or the checkpoint's own where rows do not divide into its blocks.
    fn choose(
        &mut self,
        wanted: BlockFormat,
        source: BlockFormat,
        columns: usize,
        what: &str,
    ) -> BlockFormat {
        if wanted.row_bytes(columns).is_some() {
            return wanted;
        }
        let block = wanted.block_len();
        self.fallbacks.push(format!(
            "{what}: {source} instead of {wanted}, as rows of {columns} are no multiple of {block}"
        ));
        source
    }

    fn count(&mut self, class: &'static str, format: BlockFormat, elements: u64, bytes: u64) {
        let name = format.name();
        let found = self.formats.iter_mut().find(|entry| entry.class == class && entry.format == name);
        match found {
            Some(entry) => {
                entry.tensors += 1;
                entry.elements += elements;
                entry.bytes += bytes;
            }
            None => {
                let entry = FormatUse { class, format: name.to_owned(), tensors: 1, elements, bytes };
                self.formats.push(entry);
            }
        }
    }

    fn resident(&mut self, tensors: &TensorPlan) -> (Vec<ResidentEntry>, Vec<Unit>, u64) {
        let (mut entries, mut units, mut end) = (Vec::new(), Vec::new(), 0_u64);
        for tensor in &tensors.resident {
            let source = self.source_format(&tensor.name);
            let (class, format) = match tensor.class {
                WeightClass::Norm => ("norm", source),
                WeightClass::Router => ("router", source),
                WeightClass::Bias => ("bias", source),
                WeightClass::Dense => {
                    ("dense", self.choose(self.options.dense, source, tensor.columns, &tensor.name))
                }
            };
            let offset = end.next_multiple_of(PART_ALIGNMENT);
            let part = Part {
                class,
                tensor: tensor.name.clone(),
                first_row: 0,
                rows: tensor.rows as u64,
                columns: tensor.columns,
                source,
                format,
                offset: 0,
            };
            let bytes = part.row_bytes() * part.rows;
            end = offset + bytes;
            self.count(class, format, part.elements(), bytes);
            let columns = tensor.columns as u64;
            // Vectors have one dimension, matrices two, also those of a single row.
            let shape = match tensor.class {
                WeightClass::Norm | WeightClass::Bias => vec![columns],
                _ => vec![tensor.rows as u64, columns],
            };
            entries.push(ResidentEntry { name: tensor.name.clone(), format, shape, offset, bytes });
            units.push(Unit { offset, bytes, parts: vec![part] });
        }
        (entries, units, end)
    }

    fn experts(&mut self, tensors: &TensorPlan) -> (Vec<ExpertLayer>, Vec<Unit>, u64) {
        let (mut layers, mut units, mut end) = (Vec::new(), Vec::new(), 0_u64);
        for plan in &tensors.expert_layers {
            let layer = self.expert_layer(plan, end);
            for expert in 0..plan.experts {
                let mut parts = Vec::new();
                for (source, placed) in plan.parts(expert).into_iter().zip(&layer.parts) {
                    self.count(EXPERTS, placed.format, placed.rows * placed.columns, placed.bytes);
                    parts.push(Part {
                        class: EXPERTS,
                        source: self.source_format(&source.tensor),
                        tensor: source.tensor,
                        first_row: source.first_row,
                        rows: placed.rows,
                        columns: source.columns,
                        format: placed.format,
                        offset: placed.offset,
                    });
                }
                units.push(Unit { offset: end, bytes: layer.stride, parts });
                end += layer.stride;
            }
            layers.push(layer);
        }
        (layers, units, end)
    }

    fn expert_layer(&mut self, plan: &ExpertLayerPlan, base: u64) -> ExpertLayer {
        let (mut parts, mut end) = (Vec::new(), 0_u64);
        for (name, source) in ["gate", "up", "down"].into_iter().zip(plan.parts(0)) {
            // All experts of a layer share a layout, so the first one's type decides where a format falls back.
            let own = self.source_format(&source.tensor);
            let what = format!("{name} of the experts of layer {}", plan.layer);
            let format = self.choose(self.options.experts, own, source.columns, &what);
            let offset = end.next_multiple_of(PART_ALIGNMENT);
            let bytes = format.row_bytes(source.columns).unwrap_or(0) as u64 * source.rows as u64;
            end = offset + bytes;
            let (rows, columns) = (source.rows as u64, source.columns as u64);
            parts.push(RecordPart { name: name.to_owned(), format, rows, columns, offset, bytes });
        }
        ExpertLayer {
            layer: plan.layer as u32,
            base,
            stride: end.next_multiple_of(self.options.alignment),
            record_bytes: end,
            count: plan.experts as u32,
            parts,
        }
    }
}
