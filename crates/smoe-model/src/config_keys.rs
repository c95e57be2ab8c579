//! Reading `config.json` key by key, so that no key is skipped by accident.

use serde_json::{Map, Value};

use crate::error::ConfigError;

/// The largest configuration that is read, in bytes; real ones have a few thousand.
const CONFIG_BYTES_LIMIT: usize = 4 << 20;

/// A JSON object whose keys are taken one by one; what is left at the end is unknown.
pub(crate) struct Keys {
    /// Dotted path in front of each key in messages, empty at the top.
    prefix: String,
    map: Map<String, Value>,
}

impl Keys {
    /// Parses the text of a `config.json`.
    pub(crate) fn parse(text: &str) -> Result<Self, ConfigError> {
        if text.len() > CONFIG_BYTES_LIMIT {
            return Err(ConfigError::Json(format!(
                "has {} bytes; at most {CONFIG_BYTES_LIMIT} are read",
                text.len()
            )));
        }
        match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(map)) => Ok(Self { prefix: String::new(), map }),
            Ok(other) => Err(ConfigError::Json(format!("expected an object, found {}", kind(&other)))),
            Err(error) => Err(ConfigError::Json(format!("not JSON: {error}"))),
        }
    }

    fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Takes a value out; `null` counts as absent.
    pub(crate) fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key).filter(|value| !value.is_null())
    }

    /// Puts a value back, to be taken in another form.
    pub(crate) fn put(&mut self, key: &str, value: Value) {
        self.map.insert(key.to_owned(), value);
    }

    /// Whether the key is there with something other than `null`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|value| !value.is_null())
    }

    /// Takes a `null` out; whether there was one.
    pub(crate) fn remove_null(&mut self, key: &str) -> bool {
        self.map.remove(key).is_some_and(|value| value.is_null())
    }

    /// An error about a key of this object.
    pub(crate) fn invalid(&self, key: &str, expected: impl Into<String>, found: &Value) -> ConfigError {
        ConfigError::Invalid { key: self.path(key), expected: expected.into(), found: short(found) }
    }

    /// An error about a key that is not implemented.
    pub(crate) fn unsupported(&self, key: &str, found: &Value, reason: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported { key: self.path(key), found: short(found), reason: reason.into() }
    }

    /// A count in `low..=high`, under one of two spellings that must agree when both are given.
    pub(crate) fn count(
        &mut self,
        key: &str,
        alias: Option<&str>,
        low: usize,
        high: usize,
    ) -> Result<Option<usize>, ConfigError> {
        let first = self.one_count(key, low, high)?;
        let Some(alias) = alias else { return Ok(first) };
        let second = self.one_count(alias, low, high)?;
        if let (Some(a), Some(b)) = (first, second)
            && a != b
        {
            return Err(ConfigError::Contradiction(format!("{key} is {a} and {alias} is {b}")));
        }
        Ok(first.or(second))
    }

    fn one_count(&mut self, key: &str, low: usize, high: usize) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match number {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            _ => Err(self.invalid(key, format!("an integer from {low} to {high}"), &value)),
        }
    }

    /// Like [`Keys::count`], for a key that must be there.
    pub(crate) fn need_count(
        &mut self,
        key: &str,
        alias: Option<&str>,
        low: usize,
        high: usize,
    ) -> Result<usize, ConfigError> {
        let name = match alias {
            Some(alias) => format!("{} (or {alias})", self.path(key)),
            None => self.path(key),
        };
        self.count(key, alias, low, high)?.ok_or_else(|| ConfigError::Missing {
            key: name,
            expected: format!("an integer from {low} to {high}"),
        })
    }

    /// A flag.
    pub(crate) fn flag(&mut self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.invalid(key, "true or false", &other)),
        }
    }

    /// A finite number greater than zero.
    pub(crate) fn positive(&mut self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.invalid(key, "a number greater than 0", &value)),
        }
    }

    /// A finite number.
    pub(crate) fn number(&mut self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.invalid(key, "a number", &value)),
        }
    }

    /// A text.
    pub(crate) fn text(&mut self, key: &str) -> Result<Option<String>, ConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(self.invalid(key, "a text", &other)),
        }
    }

    /// A list of indices below `limit`.
    pub(crate) fn indices(&mut self, key: &str, limit: usize) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let wrong = |this: &Self| this.invalid(key, format!("a list of integers below {limit}"), &value);
        let Value::Array(items) = &value else { return Err(wrong(self)) };
        items
            .iter()
            .map(|item| {
                item.as_u64().and_then(|index| usize::try_from(index).ok()).filter(|&index| index < limit)
            })
            .collect::<Option<Vec<_>>>()
            .map(Some)
            .ok_or_else(|| wrong(self))
    }

    /// An object inside of this one.
    pub(crate) fn object(&mut self, key: &str) -> Result<Option<Keys>, ConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys { prefix: format!("{}.", self.path(key)), map })),
            Some(other) => Err(self.invalid(key, "an object", &other)),
        }
    }

    /// Ends the reading: every key that was not taken must be on a list of harmless ones.
    pub(crate) fn finish(mut self, harmless: &[&str], ignored: &[String]) -> Result<(), ConfigError> {
        for key in harmless {
            self.map.remove(*key);
        }
        let prefix = self.prefix;
        let unknown = self.map.iter().find(|(key, value)| {
            let path = format!("{prefix}{key}");
            !value.is_null() && !key.starts_with('_') && !ignored.contains(&path)
        });
        match unknown {
            None => Ok(()),
            Some((key, value)) => {
                Err(ConfigError::UnknownKey { key: format!("{prefix}{key}"), found: short(value) })
            }
        }
    }
}

/// What a value is, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value as JSON, cut so that a message stays one line.
fn short(value: &Value) -> String {
    const CHARACTERS: usize = 80;
    let text = value.to_string();
    if text.chars().count() <= CHARACTERS {
        return text;
    }
    let mut cut: String = text.chars().take(CHARACTERS).collect();
    cut.push('…');
    cut
}
