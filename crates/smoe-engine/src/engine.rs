//! A vault that is ready to run.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use smoe_format::{ExpertLayer, Vault};
use smoe_model::{
    Compute, ConfigOptions, KvCache, Model, ModelConfig, ModelError, ModelState, OnLogits, RecordLayout,
    RecordPart, ResidentWeights, Run, StreamedLayer, WeightEntry,
};
use smoe_stream::{
    AlignedBuffer, DEFAULT_PREAD_THREADS, DEFAULT_QUEUE_CAPACITY, ExpertStream, FileReader, IoMode,
    LayerExtent, PreadPool, ReadAt, StreamCounters, StreamError, peak_rss_bytes, probe_drive, probe_memory,
    read_exact, usable_cpus,
};
use smoe_text::{ChatTemplate, TextFiles, Tokenizer};

use crate::budget::{DEFAULT_CONTEXT, MemoryPlan, Needs, state_options};
use crate::error::EngineError;
use crate::options::EngineOptions;
use crate::report::{IoReport, MemoryReport};
use crate::routing::RoutingStatistics;

/// What can be said while a vault is being opened.
#[derive(Debug, Clone, Copy)]
pub enum OpenProgress {
    /// Bytes of the resident weights read so far, of all.
    Resident {
        /// So far.
        done: u64,
        /// All.
        total: u64,
    },
}

/// A model with its text side, its memory and one sequence.
pub struct Engine {
    path: PathBuf,
    vault: Vault,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    model: Model,
    pub(crate) compute: Compute,
    pub(crate) state: ModelState,
    pub(crate) stream: ExpertStream,
    plan: MemoryPlan,
    options: EngineOptions,
    /// Tokens whose keys and values the KV cache holds.
    pub(crate) sequence: Vec<u32>,
    pub(crate) routing: RoutingStatistics,
    /// Probed where instruments are on.
    pub(crate) limits: Option<MachineLimits>,
}

/// Limits of this machine, probed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MachineLimits {
    pub(crate) drive_bytes_per_s: Option<f64>,
    pub(crate) memory_bytes_per_s: f64,
}

impl Engine {
    /// Opens a vault, divides the budget, and reads the resident weights.
    ///
    /// # Errors
    /// [`EngineError`] names the file and what is wrong with it, or what would fit.
    pub fn open(
        path: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(OpenProgress),
    ) -> Result<Self, EngineError> {
        let io = options.io;
        Self::open_with(path, options, progress, |vault| Ok(FileReader::open(vault.path(), io)?))
    }

    /// [`Engine::open`] with another source of the vault's bytes; tests inject faults with it.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_with<R: ReadAt + 'static>(
        path: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(OpenProgress),
        reader: impl FnOnce(&Vault) -> Result<R, EngineError>,
    ) -> Result<Self, EngineError> {
        let vault = Vault::open(path)?;
        let header = vault.header();
        let config_error = |source| EngineError::Config { path: path.to_owned(), source };
        let config_options = ConfigOptions { ignored_keys: header.provenance.ignored_keys.clone() };
        let config = ModelConfig::from_json(&header.config, &config_options).map_err(config_error)?;
        let files = TextFiles {
            tokenizer: &header.tokenizer,
            tokenizer_config: header.tokenizer_config.as_deref(),
            generation_config: header.generation_config.as_deref(),
            config: &header.config,
            chat_template: header.chat_template.as_deref(),
        };
        let tokenizer = Arc::new(Tokenizer::from_files(&files)?);
        let template = ChatTemplate::from_files(&files)?;
        let context = context_of(&options, &config)?;
        let streamed = header.expert_layers.iter().map(streamed_layer).collect::<Result<Vec<_>, _>>()?;
        let kv_bytes = KvCache::bytes_needed(&config, options.kv, context)?;
        let needs = needs(&vault, &config, kv_bytes);
        let plan = MemoryPlan::new(&config, &needs, &options, context)?;

        let threads = options.threads.unwrap_or_else(usable_cpus);
        let reader: Arc<dyn ReadAt> = Arc::new(reader(&vault)?);
        // Probed before the memory is taken for good, so that the probes' buffers fit into the budget too.
        let limits = match options.instrument {
            true => Some(MachineLimits::probe(&vault, &*reader, threads, plan.probe_bytes())?),
            false => None,
        };
        let weights = read_resident(&vault, &*reader, progress)?;
        let model = Model::new(config, weights, &streamed)?;
        let state = model.state(&state_options(&options, context, plan.chunk))?;
        let backend = PreadPool::new(reader, DEFAULT_PREAD_THREADS, DEFAULT_QUEUE_CAPACITY)?;
        let extents = extents(&vault);
        let stream = ExpertStream::new(
            path,
            Box::new(backend),
            extents,
            plan.cache_bytes,
            needs.least_slots as usize,
        )?;
        let compute = Compute::new(threads);
        let routing = RoutingStatistics::new(&vault, model.config().router.top_k);
        Ok(Self {
            path: path.to_owned(),
            vault,
            tokenizer,
            template,
            model,
            compute,
            state,
            stream,
            sequence: Vec::with_capacity(plan.context),
            plan,
            options,
            routing,
            limits,
        })
    }

    /// The vault's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The vault.
    #[must_use]
    pub fn vault(&self) -> &Vault {
        &self.vault
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokenizer, to be used while the engine is at work.
    #[must_use]
    pub fn tokenizer_handle(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }

    /// Name of the kernels' instruction set.
    #[must_use]
    pub fn kernels(&self) -> &'static str {
        self.compute.kernels.name()
    }

    /// Threads that compute.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.compute.pool.threads()
    }

    /// The chat template.
    ///
    /// # Errors
    /// The vault holds none.
    pub fn template(&self) -> Result<&ChatTemplate, EngineError> {
        self.template.as_ref().ok_or_else(|| EngineError::NoChatTemplate { path: self.path.clone() })
    }

    /// The architecture.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// How the budget is spent.
    #[must_use]
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Context in tokens.
    #[must_use]
    pub fn context(&self) -> usize {
        self.plan.context
    }

    /// The options it was opened with.
    #[must_use]
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// How experts are read, as it turned out.
    #[must_use]
    pub fn io_mode(&self) -> IoMode {
        self.stream.mode()
    }

    /// Counters of the expert cache since the vault was opened.
    #[must_use]
    pub fn counters(&self) -> StreamCounters {
        self.stream.counters()
    }

    /// Bytes of all expert records.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.vault.header().expert_layers.iter().map(|layer| layer.stride * u64::from(layer.count)).sum()
    }

    /// Tokens whose keys and values are kept.
    #[must_use]
    pub fn sequence(&self) -> &[u32] {
        &self.sequence
    }

    /// Forgets the sequence. Experts stay in the cache.
    pub fn reset(&mut self) {
        self.sequence.clear();
    }

    /// Keeps the first `tokens` of the sequence and forgets the others.
    pub(crate) fn rewind(&mut self, tokens: usize) {
        self.sequence.truncate(tokens);
    }

    /// Appends tokens to the sequence, at most a chunk of them, and hands out logits from index `logits_from` on.
    ///
    /// # Errors
    /// [`EngineError::Model`]; the sequence is then as before.
    pub fn advance(
        &mut self,
        tokens: &[u32],
        logits_from: usize,
        cancel: Option<&AtomicBool>,
        on_logits: OnLogits<'_>,
    ) -> Result<(), EngineError> {
        let mut run = Run { compute: &self.compute, stream: &mut self.stream, cancel };
        let position = self.sequence.len();
        match self.model.forward(&mut run, &mut self.state, tokens, position, logits_from, on_logits) {
            Ok(()) => {
                self.sequence.extend_from_slice(tokens);
                self.routing.record(&self.state, tokens.len());
                Ok(())
            }
            Err(error) => {
                self.stream.abandon();
                Err(error.into())
            }
        }
    }

    /// Experts that a token of the last [`Engine::advance`] was sent to, by rank.
    #[must_use]
    pub fn chosen_experts(&self, sparse_layer: usize, token: usize) -> &[u32] {
        self.state.chosen_experts(sparse_layer, token)
    }

    /// Memory as planned and as it turned out.
    #[must_use]
    pub fn memory_report(&self) -> MemoryReport {
        MemoryReport {
            budget_bytes: self.plan.budget_bytes,
            program_bytes: self.plan.program_bytes,
            resident_bytes: self.plan.resident_bytes,
            kv_bytes: self.plan.kv_bytes,
            scratch_bytes: self.plan.scratch_bytes,
            cache_bytes: self.stream.cache_bytes(),
            peak_rss_bytes: peak_rss_bytes().unwrap_or(0),
        }
    }

    /// How experts are read, for reports.
    #[must_use]
    pub fn io_report(&self) -> IoReport {
        let mode = self.stream.mode();
        IoReport {
            mode: mode.to_string(),
            alignment_bytes: mode.alignment_bytes,
            depth: mode.depth as usize,
            reason: mode.reason.clone(),
        }
    }

    /// Weight bytes that one decoded token touches.
    pub(crate) fn bytes_touched_per_token(&self) -> u64 {
        let header = self.vault.header();
        let top_k = self.config().router.top_k as u64;
        let experts: u64 = header.expert_layers.iter().map(|layer| layer.record_bytes * top_k).sum();
        let resident: u64 = header.resident.iter().map(|entry| entry.bytes).sum();
        // An embedding table that is not the head too gives one row only.
        let has_head = header.resident.iter().any(|entry| entry.name == "lm_head.weight");
        let table = header.resident.iter().find(|entry| entry.name == "model.embed_tokens.weight");
        let untouched = table.filter(|_| has_head).map_or(0, |entry| entry.bytes);
        experts + resident - untouched
    }
}

impl MachineLimits {
    /// Probes memory with a buffer of `bytes`, and the drive with reads of whole records into no more than that.
    fn probe(vault: &Vault, reader: &dyn ReadAt, threads: usize, bytes: usize) -> Result<Self, EngineError> {
        let memory_bytes_per_s = probe_memory(threads, bytes)?;
        let stride = vault.header().expert_layers.iter().map(|layer| layer.stride).max();
        let drive = stride.and_then(|stride| {
            let (offset, length) = vault.expert_section();
            let depth = (bytes as u64 / stride).clamp(1, DEFAULT_PREAD_THREADS as u64) as usize;
            probe_drive(reader, offset..offset + length, stride, depth).ok()
        });
        Ok(Self { drive_bytes_per_s: drive.map(|probe| probe.bytes_per_s), memory_bytes_per_s })
    }
}

fn context_of(options: &EngineOptions, config: &ModelConfig) -> Result<usize, EngineError> {
    let limit = config.context_length;
    match options.context {
        Some(asked) if asked > limit => Err(EngineError::ContextTooLong { asked, limit }),
        Some(asked) => Ok(asked.max(1)),
        None => Ok(limit.min(DEFAULT_CONTEXT)),
    }
}

fn needs(vault: &Vault, config: &ModelConfig, kv_bytes: u64) -> Needs {
    let layers = &vault.header().expert_layers;
    let experts = layers.iter().map(|layer| u64::from(layer.count)).sum();
    Needs {
        resident_bytes: vault.resident_section().1,
        slot_bytes: layers.iter().map(|layer| layer.stride).max().unwrap_or(0),
        experts,
        kv_bytes,
        least_slots: (config.router.top_k as u64).min(experts),
    }
}

fn streamed_layer(layer: &ExpertLayer) -> Result<StreamedLayer, EngineError> {
    let part = |name: &str| -> Result<RecordPart, EngineError> {
        let found = layer.parts.iter().find(|part| part.name == name).ok_or_else(|| {
            ModelError::Config(smoe_model::ConfigError::Contradiction(format!(
                "layer {}: the expert records have no {name} part",
                layer.layer
            )))
        })?;
        Ok(RecordPart {
            format: found.format,
            rows: found.rows as usize,
            columns: found.columns as usize,
            offset: found.offset as usize,
            bytes: found.bytes as usize,
        })
    };
    Ok(StreamedLayer {
        layer: layer.layer as usize,
        experts: layer.count as usize,
        record_bytes: layer.record_bytes,
        record: RecordLayout { gate: part("gate")?, up: part("up")?, down: part("down")? },
    })
}

fn extents(vault: &Vault) -> Vec<LayerExtent> {
    let (start, _) = vault.expert_section();
    let layers = &vault.header().expert_layers;
    let checksums =
        |index: usize, count: u32| (0..count).map(|expert| vault.expert_checksum(index, expert)).collect();
    layers
        .iter()
        .enumerate()
        .map(|(index, layer)| LayerExtent {
            base: start + layer.base,
            stride: layer.stride,
            record_bytes: layer.record_bytes,
            count: layer.count,
            checksums: checksums(index, layer.count),
        })
        .collect()
}

/// Bytes of the resident section that are read at a time.
const RESIDENT_STEP_BYTES: usize = 8 << 20;

/// Reads the dense backbone, past the page cache where that works, and verifies it.
fn read_resident(
    vault: &Vault,
    reader: &dyn ReadAt,
    progress: &mut dyn FnMut(OpenProgress),
) -> Result<ResidentWeights, EngineError> {
    let (start, total) = vault.resident_section();
    let length = usize::try_from(total).map_err(|_| StreamError::TooLarge { bytes: total })?;
    let mut buffer = AlignedBuffer::new(length)?;
    let mut done = 0;
    for step in buffer.chunks_mut(RESIDENT_STEP_BYTES) {
        read_exact(reader, vault.path(), step, start + done)?;
        done += step.len() as u64;
        progress(OpenProgress::Resident { done, total });
    }
    let mut entries = HashMap::new();
    for (index, entry) in vault.header().resident.iter().enumerate() {
        let offset = entry.offset as usize;
        let bytes = &mut buffer[offset..offset + entry.bytes as usize];
        if vault.check_resident(index, bytes).is_err() {
            // A bit that was flipped on the way is gone at the second reading, one on the drive is not.
            read_exact(reader, vault.path(), bytes, start + entry.offset)?;
            vault.check_resident(index, bytes)?;
        }
        let (rows, columns) = match entry.shape[..] {
            [columns] => (1, columns),
            [rows, columns] => (rows, columns),
            _ => (0, 0),
        };
        let place =
            WeightEntry { format: entry.format, rows: rows as usize, columns: columns as usize, offset };
        entries.insert(entry.name.clone(), place);
    }
    Ok(ResidentWeights::new(buffer, entries))
}
