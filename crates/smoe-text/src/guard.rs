//! Keeps what people and tools wrote from being read as special tokens.
//!
//! A template mixes its own text, in which special tokens mean something, with text from outside, in which they do not.
//! Before rendering, a marker character that occurs nowhere is put into every piece of outside text that is a special
//! token or could become part of one at the text's ends. After rendering, special tokens are recognized in the marked
//! text, where those from outside are interrupted; then the marker is taken out again.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::Value;
use tokenizers::AddedToken;

/// The special tokens of a tokenizer.
pub(crate) struct SpecialTokens {
    /// Longest first, so that the first match is the longest.
    tokens: Vec<(u32, AddedToken)>,
}

/// A special token found in a text.
pub(crate) struct Found {
    pub(crate) id: u32,
    /// Its range, with the white space that the token takes along.
    pub(crate) text: Range<usize>,
}

impl SpecialTokens {
    pub(crate) fn new(mut tokens: Vec<(u32, AddedToken)>) -> Self {
        tokens.retain(|(_, token)| !token.content.is_empty());
        tokens.sort_by(|(a_id, a), (b_id, b)| b.content.len().cmp(&a.content.len()).then(a_id.cmp(b_id)));
        Self { tokens }
    }

    /// The first special token in a text, the longest of those that begin there.
    pub(crate) fn next_in(&self, text: &str) -> Option<Found> {
        text.char_indices().find_map(|(start, _)| {
            let rest = &text[start..];
            let (id, token) = self.tokens.iter().find(|(_, token)| {
                rest.starts_with(&token.content)
                    && (!token.single_word || is_word(text, start, token.content.len()))
            })?;
            let mut range = start..start + token.content.len();
            if token.lstrip {
                range.start = text[..start].trim_end().len();
            }
            if token.rstrip {
                let after = &text[range.end..];
                range.end += after.len() - after.trim_start().len();
            }
            Some(Found { id: *id, text: range })
        })
    }

    /// Puts `marker` wherever the text is or may become a special token.
    fn interrupt<'t>(&self, text: &'t str, marker: char) -> Cow<'t, str> {
        let mut places = Vec::new();
        for (_, token) in &self.tokens {
            let token = token.content.as_str();
            let first = token.chars().next().map_or(0, char::len_utf8);
            places.extend(text.match_indices(token).map(|(start, _)| start + first));
            // The text's end may be the beginning of a token that the template completes, and the reverse.
            for (cut, _) in token.char_indices().skip(1) {
                if text.ends_with(&token[..cut]) {
                    places.push(text.len() - cut + first);
                }
                if text.starts_with(&token[cut..]) {
                    places.push(0);
                }
            }
        }
        if places.is_empty() {
            return Cow::Borrowed(text);
        }
        places.sort_unstable();
        places.dedup();
        let mut marked = String::with_capacity(text.len() + places.len() * marker.len_utf8());
        let mut start = 0;
        for place in places {
            marked.push_str(&text[start..place]);
            marked.push(marker);
            start = place;
        }
        marked.push_str(&text[start..]);
        Cow::Owned(marked)
    }

    /// Marks every string of a message or tool description, except those by which templates decide.
    pub(crate) fn interrupt_all(&self, value: &mut Value, marker: char) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(marked) = self.interrupt(text, marker) {
                    *text = marked;
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.interrupt_all(value, marker)),
            Value::Object(object) => {
                for (key, value) in object.iter_mut() {
                    if !matches!(key.as_str(), "role" | "type") {
                        self.interrupt_all(value, marker);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Whether a range stands between characters that belong to no word.
fn is_word(text: &str, start: usize, length: usize) -> bool {
    let belongs = |character: char| character.is_alphanumeric() || character == '_';
    let before = text[..start].chars().next_back().is_some_and(belongs);
    let after = text[start + length..].chars().next().is_some_and(belongs);
    !before && !after
}

/// A character of the private use planes that none of the texts contains.
pub(crate) fn unused_character<'t>(texts: impl Iterator<Item = &'t str> + Clone) -> Option<char> {
    ('\u{F0000}'..='\u{F0FFF}').rev().find(|&candidate| texts.clone().all(|text| !text.contains(candidate)))
}

/// All strings of a value.
pub(crate) fn strings<'v>(value: &'v Value, all: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => all.push(text),
        Value::Array(values) => values.iter().for_each(|value| strings(value, all)),
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            all.push(key);
            strings(value, all);
        }),
        _ => {}
    }
}
