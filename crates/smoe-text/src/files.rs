//! What the text side needs of a checkpoint's files.

use serde_json::{Map, Value};

use crate::error::TextError;

/// Contents of a checkpoint's text files.
#[derive(Debug, Clone, Copy)]
pub struct TextFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a str,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<&'a str>,
    /// `generation_config.json`.
    pub generation_config: Option<&'a str>,
    /// `config.json`.
    pub config: &'a str,
    /// `chat_template.jinja`.
    pub chat_template: Option<&'a str>,
}

/// Names under which `tokenizer_config.json` lists special tokens and templates know them.
pub(crate) const TOKEN_ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Parses an optional file into an object; an absent file is an empty one.
pub(crate) fn object(file: &'static str, text: Option<&str>) -> Result<Map<String, Value>, TextError> {
    let Some(text) = text else { return Ok(Map::new()) };
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(invalid(file, "the file", "a JSON object", &other)),
        Err(error) => Err(TextError::Invalid {
            file,
            key: "the file".into(),
            expected: "a JSON object",
            found: error.to_string(),
        }),
    }
}

pub(crate) fn invalid(file: &'static str, key: &str, expected: &'static str, found: &Value) -> TextError {
    /// Longest excerpt of a value in a message, in characters.
    const EXCERPT: usize = 80;
    let found: String = found.to_string().chars().take(EXCERPT).collect();
    TextError::Invalid { file, key: key.to_owned(), expected, found }
}

/// A special token's text: a string, or an object with `content`.
pub(crate) fn token_text(config: &Map<String, Value>, role: &str) -> Result<Option<String>, TextError> {
    let text = match config.get(role) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => Some(text),
        Some(Value::Object(object)) => match object.get("content") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        },
        Some(_) => None,
    };
    match (text, config.get(role)) {
        (Some(text), _) => Ok(Some(text.clone())),
        (None, found) => Err(invalid(
            "tokenizer_config.json",
            role,
            "a token's text or an object with its content",
            found.unwrap_or(&Value::Null),
        )),
    }
}

/// Token ids under a key: a number or a list of numbers.
pub(crate) fn token_ids(
    file: &'static str,
    object: &Map<String, Value>,
    key: &str,
) -> Result<Vec<u32>, TextError> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match object.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(values)) => values.iter().map(id).collect(),
        Some(value) => id(value).map(|id| vec![id]),
    };
    let found = object.get(key).unwrap_or(&Value::Null);
    ids.ok_or_else(|| invalid(file, key, "a token id or a list of token ids", found))
}
