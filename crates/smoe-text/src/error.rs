//! What can be wrong with a tokenizer, a template or a text.

/// Errors of the text side of a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer cannot be loaded.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    /// A file that holds something else than it should.
    #[error("{file}: {key} is {found}; expected {expected}")]
    Invalid {
        /// The file's name.
        file: &'static str,
        /// The key.
        key: String,
        /// What it should hold.
        expected: &'static str,
        /// What it holds.
        found: String,
    },
    /// A text could not be encoded.
    #[error("the text could not be encoded: {0}")]
    Encode(String),
    /// The template is not valid Jinja, or uses what is not there.
    #[error("chat template: {0}")]
    Template(String),
    /// The template refused the conversation, in its own words.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template took more work, memory or depth than a template may.
    #[error(
        "chat template: {0}; it was stopped at the limit for chat templates (it loops, recurses or grows without end)"
    )]
    TemplateLimit(String),
}
