//! Tokens to text, piece by piece.

use crate::tokenizer::{TokenKind, Tokenizer};

/// Turns tokens into text as they come: never half a character, and at the end nothing is lost.
///
/// Special tokens have no text. The pieces together are what the tokenizer decodes from all tokens at once.
pub struct IncrementalDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes that do not make up a character yet; byte-level tokenizers only.
    bytes: Vec<u8>,
    /// Tokens that are decoded together, for the other tokenizers.
    ids: Vec<u32>,
    /// How many of `ids` the text has already been given out for.
    shown: usize,
}

impl<'a> IncrementalDecoder<'a> {
    /// Begins a text.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, bytes: Vec::new(), ids: Vec::new(), shown: 0 }
    }

    /// Takes a token in and gives out what has become certain.
    pub fn push(&mut self, id: u32) -> String {
        if !self.tokenizer.is_byte_level() {
            return self.push_whole(id);
        }
        match self.tokenizer.token(id) {
            None | Some((_, TokenKind::Special)) => {}
            Some((text, TokenKind::Added)) => self.bytes.extend_from_slice(text.as_bytes()),
            Some((text, TokenKind::Ordinary)) => push_bytes(&text, &mut self.bytes),
        }
        let certain = certain_bytes(&self.bytes);
        let text = String::from_utf8_lossy(&self.bytes[..certain]).into_owned();
        self.bytes.drain(..certain);
        text
    }

    /// Gives out what is left; an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        if !self.tokenizer.is_byte_level() {
            let rest = self.new_text().unwrap_or_default();
            self.ids.clear();
            self.shown = 0;
            return rest;
        }
        let text = String::from_utf8_lossy(&self.bytes).into_owned();
        self.bytes.clear();
        text
    }

    /// For tokenizers whose tokens depend on their neighbours: decodes a window and gives out what is new in it.
    fn push_whole(&mut self, id: u32) -> String {
        self.ids.push(id);
        match self.new_text() {
            Some(text) if !text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER) => {
                // The tokens before the last shown ones are no longer needed as context.
                self.ids.drain(..self.shown);
                self.shown = self.ids.len();
                text
            }
            _ => String::new(),
        }
    }

    /// Text of all tokens without that of those already shown.
    fn new_text(&self) -> Option<String> {
        let shown = self.tokenizer.decode(&self.ids[..self.shown]);
        let all = self.tokenizer.decode(&self.ids);
        all.strip_prefix(shown.as_str()).map(str::to_owned)
    }
}

/// Bytes up to an incomplete but possible character at the end.
fn certain_bytes(bytes: &[u8]) -> usize {
    let mut start = 0;
    while let Err(error) = std::str::from_utf8(&bytes[start..]) {
        start += error.valid_up_to();
        match error.error_len() {
            Some(length) => start += length,
            None => return start,
        }
    }
    bytes.len()
}

/// Bytes of a token in GPT-2's alphabet; a token that is not in it stands for itself.
fn push_bytes(token: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for character in token.chars() {
        match byte_of(character) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// The byte that a character of GPT-2's alphabet stands for: printable ones themselves, the others U+0100 and up in order.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut seen = [0; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of('ł')), (Some(b' '), Some(b'\n'), Some(0xA0)));
    }

    #[test]
    fn only_possible_characters_are_held_back() {
        assert_eq!(certain_bytes(b"abc"), 3);
        assert_eq!(certain_bytes("aé".as_bytes()), 3);
        assert_eq!(certain_bytes(b"a\xC3"), 1);
        assert_eq!(certain_bytes(b"a\xF0\x9F\x98"), 1);
        assert_eq!(certain_bytes(b"a\xFF"), 2);
        assert_eq!(certain_bytes(b"\xF0\x9Fabc\xE2\x82"), 5);
        assert_eq!(certain_bytes(b"\x80\xC3"), 1);
    }
}
