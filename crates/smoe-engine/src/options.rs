//! How an engine is set up.

use smoe_model::KvFormat;
use smoe_stream::IoChoice;

/// Size of the expert cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheSize {
    /// What the budget leaves.
    #[default]
    Auto,
    /// Room for every expert.
    All,
    /// At most this many bytes.
    Bytes(u64),
}

/// Options of [`crate::Engine::open`].
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Threads that compute; none: the processors that this process may use.
    pub threads: Option<usize>,
    /// Size of the expert cache.
    pub cache: CacheSize,
    /// Budget for everything in bytes; none: what the machine has to spare.
    pub memory: Option<u64>,
    /// Context in tokens; none: the model's own, at most [`crate::DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Precision of the KV cache.
    pub kv: KvFormat,
    /// How experts are read.
    pub io: IoChoice,
    /// Largest prefill chunk in tokens; none: chosen by the budget.
    pub chunk: Option<usize>,
    /// Positions whose logits are computed together; 1 for generation.
    pub logits_rows: usize,
    /// Whether to measure where the time goes.
    pub instrument: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            cache: CacheSize::Auto,
            memory: None,
            context: None,
            kv: KvFormat::F16,
            io: IoChoice::Auto,
            chunk: None,
            logits_rows: 1,
            instrument: false,
        }
    }
}
