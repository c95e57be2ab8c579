//! Errors of opening a vault and of running requests on it.

use std::path::PathBuf;

use smoe_format::FormatError;
use smoe_model::{ConfigError, ModelError};
use smoe_stream::{StreamError, format_size};
use smoe_text::TextError;

/// What can go wrong between a vault's path and the last token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The vault is damaged or no vault.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The vault's configuration cannot be run.
    #[error("{}: {source}", path.display())]
    Config {
        /// The vault.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The tokenizer or the chat template cannot be used, or a text could not be encoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model could not go on.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Reads or the cache could not be set up.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The model cannot run within the budget.
    #[error("{0}")]
    Budget(BudgetError),
    /// A prompt that is longer than the context.
    #[error(
        "context_length_exceeded: the prompt has {prompt} tokens, the context holds {context}; shorten the prompt or raise --ctx (this model is made for up to {model})"
    )]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Capacity in tokens.
        context: usize,
        /// What the model is made for.
        model: usize,
    },
    /// A context that the model is not made for.
    #[error("--ctx {asked} is more than the {limit} tokens that this model is made for")]
    ContextTooLong {
        /// What was asked for.
        asked: usize,
        /// The model's own length.
        limit: usize,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty; at least one token is needed to begin with")]
    EmptyPrompt,
    /// A sampling option out of its range.
    #[error("{option} is {found}; expected {expected}")]
    Sampling {
        /// The option's name.
        option: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// A conversation for a model that has no chat template.
    #[error("{} has no chat template; use --raw for plain completion", path.display())]
    NoChatTemplate {
        /// The vault.
        path: PathBuf,
    },
    /// A file of the engine's own that could not be used.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What happened.
        reason: String,
    },
}

/// Why a model does not fit, and what would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetError {
    /// Bytes allowed.
    pub budget: u64,
    /// Where the number comes from.
    pub origin: String,
    /// Bytes that would do with the same options.
    pub needed: u64,
    /// What they are made of.
    pub parts: String,
    /// What else to try.
    pub advice: String,
}

impl std::fmt::Display for BudgetError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a memory budget of {} ({}) is too small; {} would do ({} bytes: {}); {}",
            format_size(self.budget),
            self.origin,
            format_size(self.needed),
            self.needed,
            self.parts,
            self.advice
        )
    }
}

impl From<BudgetError> for EngineError {
    fn from(error: BudgetError) -> Self {
        Self::Budget(error)
    }
}
