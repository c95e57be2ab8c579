//! Conversations to tokens.

use serde_json::{Map, Value, json};

use crate::error::TextError;
use crate::guard;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// What a template renders.
#[derive(Debug, Clone)]
pub struct ChatInput<'a> {
    /// The conversation.
    pub messages: &'a [Message],
    /// Descriptions of tools, as the model's template expects them.
    pub tools: Option<Value>,
    /// Whether the model thinks first; none: as the template does by itself.
    pub enable_thinking: Option<bool>,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
}

impl<'a> ChatInput<'a> {
    /// A conversation to which the assistant answers.
    #[must_use]
    pub fn new(messages: &'a [Message]) -> Self {
        Self { messages, tools: None, enable_thinking: None, add_generation_prompt: true }
    }
}

/// Renders and encodes a conversation. Special tokens are recognized in the template's own text only: what a message or a
/// tool's description says is text, whatever it looks like.
///
/// # Errors
/// The template refuses or fails, or the text cannot be encoded.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    input: &ChatInput<'_>,
) -> Result<Vec<u32>, TextError> {
    let messages: Vec<_> = input
        .messages
        .iter()
        .map(|message| json!({"role": message.role.as_str(), "content": message.content.as_str()}))
        .collect();
    let mut outside = vec![Value::Array(messages)];
    outside.extend(input.tools.clone());
    let marker = {
        let mut texts = vec![template.source()];
        outside.iter().for_each(|value| guard::strings(value, &mut texts));
        guard::unused_character(texts.iter().copied())
            .ok_or_else(|| TextError::Encode("it uses every character of a private plane".into()))?
    };
    for value in &mut outside {
        tokenizer.special_tokens().interrupt_all(value, marker);
    }
    let mut variables = Map::new();
    let mut outside = outside.into_iter();
    variables.insert("messages".into(), outside.next().unwrap_or_default());
    variables.extend(outside.next().map(|tools| ("tools".to_owned(), tools)));
    variables.insert("add_generation_prompt".into(), Value::Bool(input.add_generation_prompt));
    variables.extend(input.enable_thinking.map(|on| ("enable_thinking".to_owned(), Value::Bool(on))));
    let rendered = template.render(variables)?;
    tokenizer.encode_rendered(&rendered, marker)
}
