//! What a configuration says about a model, checked.
//!
//! The parts are separate so that families combine them: a router, an attention, a rotary embedding, one kind of
//! feed-forward block per layer. A family (see [`crate::family`]) fills them in from its own keys.

use crate::config_keys::Keys;
use crate::error::ConfigError;
use crate::family;

/// Limits on what a configuration may ask for. They are far above any published model and keep products of two
/// of them within 64 bits and allocations derived from them within reason.
pub(crate) mod limits {
    /// Layers.
    pub(crate) const LAYERS: usize = 1_024;
    /// Width of the residual stream, of a feed-forward block or of an expert.
    pub(crate) const WIDTH: usize = 1 << 18;
    /// Attention heads.
    pub(crate) const HEADS: usize = 1_024;
    /// Width of an attention head; attention keeps one key row of this length on the stack.
    pub(crate) const HEAD_DIM: usize = 512;
    /// Query heads that share a key/value head; attention keeps one block of scores for each on the stack.
    pub(crate) const QUERIES_PER_KV_HEAD: usize = 64;
    /// Experts of a layer.
    pub(crate) const EXPERTS: usize = 4_096;
    /// Experts that a token is sent to.
    pub(crate) const TOP_K: usize = 256;
    /// Rows of the embedding table.
    pub(crate) const VOCABULARY: usize = 1 << 22;
    /// Positions.
    pub(crate) const CONTEXT: usize = 1 << 27;
}

/// How router logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RouterScore {
    /// Softmax over all experts, before the choice.
    Softmax,
}

/// The choice of experts in a sparse layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterConfig {
    /// From logits to scores.
    pub score: RouterScore,
    /// Number of routed experts.
    pub experts: usize,
    /// Number of experts that each token is sent to.
    pub top_k: usize,
    /// Whether the chosen scores are divided by their sum (`norm_topk_prob`).
    pub renormalize: bool,
}

/// Grouped-query attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Whether the four projections have biases.
    pub bias: bool,
    /// Number of last positions that a query sees, itself included; none: all.
    pub window: Option<usize>,
}

/// Scaling of the rotary embedding's frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// YaRN (Peng et al. 2023, arXiv 2309.00071): high frequencies kept, low ones divided, a ramp in between.
    Yarn {
        /// The divisor of the lowest frequencies.
        factor: f64,
        /// Context that the model was trained with, in positions.
        original_context: f64,
        /// Multiplies cosine and sine.
        attention_factor: f64,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is divided by the whole factor.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
    },
}

/// Rotary position embedding over the whole head, halves rotated against each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// The feed-forward block of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// Gate, up and down projections that every token passes.
    Dense {
        /// Rows of gate and up.
        intermediate: usize,
    },
    /// A router and experts of this width.
    Sparse {
        /// Rows of an expert's gate and up.
        intermediate: usize,
    },
}

/// Whether logits come from the embedding table or from a matrix of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadTying {
    /// The embedding table is used twice.
    Tied,
    /// `lm_head.weight` exists.
    Untied,
    /// The configuration does not say; the tensors decide.
    ByTensors,
}

/// A model's architecture, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family's name, as `model_type` has it.
    pub family: &'static str,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Attention, the same in all layers.
    pub attention: AttentionConfig,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Router, the same in all sparse layers.
    pub router: RouterConfig,
    /// Feed-forward block of each layer.
    pub layers: Vec<FeedForward>,
    /// Where the logits come from.
    pub head: HeadTying,
    /// Positions that the model is made for.
    pub context_length: usize,
}

/// Choices of the person who packs or runs a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct ConfigOptions {
    /// Unknown keys (dotted paths) that are declared harmless.
    pub ignored_keys: Vec<String>,
}

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] names the first key that is missing, contradictory, unknown or not implemented.
    pub fn from_json(text: &str, options: &ConfigOptions) -> Result<Self, ConfigError> {
        let mut keys = Keys::parse(text)?;
        let family = family::of(&mut keys)?;
        (family.config)(keys, options)
    }

    /// Number of sparse layers.
    #[must_use]
    pub fn sparse_layers(&self) -> usize {
        self.layers.iter().filter(|layer| matches!(layer, FeedForward::Sparse { .. })).count()
    }
}
