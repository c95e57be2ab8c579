//! Errors of reading a configuration and of running a model.

use smoe_quant::QuantError;
use smoe_stream::StreamError;

/// What is wrong with a model's configuration or with the tensors it comes with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not a JSON object.
    #[error("config.json: {0}")]
    Json(String),
    /// The architecture is none of those that are implemented.
    #[error("config.json: architecture {found} is not supported; supported: {supported}")]
    UnknownArchitecture {
        /// What the configuration names.
        found: String,
        /// What this version runs.
        supported: String,
    },
    /// A key without which the model is not defined.
    #[error("config.json: {key} is missing; expected {expected}")]
    Missing {
        /// The key, or both spellings of it.
        key: String,
        /// What it should hold.
        expected: String,
    },
    /// A key that holds something else than it should.
    #[error("config.json: {key} is {found}; expected {expected}")]
    Invalid {
        /// The key.
        key: String,
        /// What it should hold.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// Two statements that cannot both be true.
    #[error("config.json: {0}")]
    Contradiction(String),
    /// A key that would change the result and that this version does not implement.
    #[error("config.json: {key} = {found} would change the result and is not implemented ({reason})")]
    Unsupported {
        /// The key.
        key: String,
        /// What it holds.
        found: String,
        /// What is implemented instead.
        reason: String,
    },
    /// A key nobody here has heard of.
    #[error(
        "config.json: unknown key {key} = {found}; it may change the result, so it is not skipped silently \
         (if it is known to be harmless, pass --ignore-key {key})"
    )]
    UnknownKey {
        /// The key.
        key: String,
        /// What it holds.
        found: String,
    },
    /// A tensor that the configuration asks for.
    #[error("tensor {name} is missing ({why}); expected shape {expected}")]
    MissingTensor {
        /// The tensor's name in the checkpoint.
        name: String,
        /// What asks for it.
        why: String,
        /// The shape it should have.
        expected: String,
    },
    /// A tensor of another shape than the configuration says.
    #[error("tensor {name} has shape {found}; the configuration asks for {expected}")]
    Shape {
        /// The tensor's name.
        name: String,
        /// Shape by the configuration.
        expected: String,
        /// Shape in the file.
        found: String,
    },
    /// A tensor of a type that weights cannot have.
    #[error("tensor {name} is {found}; expected F32, F16 or BF16")]
    Dtype {
        /// The tensor's name.
        name: String,
        /// Its type in the file.
        found: String,
    },
    /// Tensors that nothing uses.
    #[error(
        "{count} tensor(s) of the checkpoint are not used by {family} with this configuration, first: {names}; {hint}"
    )]
    UnusedTensors {
        /// How many.
        count: usize,
        /// The family's name.
        family: &'static str,
        /// The first few names.
        names: String,
        /// Which key would use them.
        hint: String,
    },
}

/// What can go wrong while a model runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The configuration or the tensors do not fit.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An expert could not be read.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A kernel refused its operands.
    #[error("layer {layer}: {source}")]
    Kernel {
        /// The layer, or "output" for the head.
        layer: String,
        /// What the kernel said.
        source: QuantError,
    },
    /// A KV cache in blocks that the model's heads do not divide into.
    #[error(
        "--kv {format} stores heads in blocks of {block}, into which this model's heads of {head_dim} do not divide; use --kv f16"
    )]
    KvFormat {
        /// The format asked for.
        format: &'static str,
        /// Elements of a head.
        head_dim: usize,
        /// Elements of a block.
        block: usize,
    },
    /// A value that no arithmetic can go on with.
    #[error("{what} are not finite at position {position}; the weights or the activations are damaged")]
    NonFinite {
        /// Which values.
        what: String,
        /// Position in the sequence, from 0.
        position: usize,
    },
    /// A token id outside of the vocabulary.
    #[error("token id {id} is outside of the vocabulary of {vocab_size}")]
    TokenId {
        /// The id.
        id: u32,
        /// Number of rows of the embedding table.
        vocab_size: usize,
    },
    /// More positions than the KV cache has room for.
    #[error("positions up to {needed} do not fit in a context of {context}")]
    ContextFull {
        /// Position after the last token.
        needed: usize,
        /// Capacity of the KV cache in positions.
        context: usize,
    },
    /// Memory for the KV cache or the scratch buffers could not be had.
    #[error("cannot allocate {bytes} bytes for {what}: {reason}")]
    Memory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: usize,
        /// What the system said.
        reason: String,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}
