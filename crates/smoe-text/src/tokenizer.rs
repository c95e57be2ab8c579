//! The checkpoint's own tokenizer.

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::error::TextError;
use crate::files::{TOKEN_ROLES, TextFiles, object, token_ids, token_text};
use crate::guard::SpecialTokens;

/// A Hugging Face tokenizer and the ids that end a turn.
pub struct Tokenizer {
    /// Recognizes every added token.
    full: tokenizers::Tokenizer,
    /// The same, but special tokens are text like any other.
    plain: tokenizers::Tokenizer,
    special: SpecialTokens,
    stop_ids: Vec<u32>,
    end_of_turn_id: Option<u32>,
    byte_level: bool,
}

impl Tokenizer {
    /// Loads the tokenizer and collects the end-of-turn ids that `generation_config.json`, `config.json` and
    /// `tokenizer_config.json` name.
    ///
    /// # Errors
    /// A file is malformed.
    pub fn from_files(files: &TextFiles<'_>) -> Result<Self, TextError> {
        let tokenizer_error = |error: tokenizers::Error| TextError::Tokenizer(error.to_string());
        let json: Value = serde_json::from_str(files.tokenizer)
            .map_err(|error| TextError::Tokenizer(format!("is not valid JSON: {error}")))?;
        let Value::Object(json) = json else {
            return Err(TextError::Tokenizer("is no JSON object".into()));
        };
        check_ids(&json)?;
        let mut full = tokenizers::Tokenizer::from_bytes(files.tokenizer).map_err(tokenizer_error)?;
        // What the tokenizer was saved with for training would cut or pad prompts silently.
        full.with_truncation(None).map_err(tokenizer_error)?;
        full.with_padding(None);
        let mut plain = full.clone();
        plain.set_encode_special_tokens(true);
        let special = SpecialTokens::new(special_tokens(&full));
        let byte_level = json.get("decoder").is_some_and(is_byte_level);

        let config = object("tokenizer_config.json", files.tokenizer_config)?;
        let generation = object("generation_config.json", files.generation_config)?;
        let model = object("config.json", Some(files.config))?;
        let eos = token_text(&config, "eos_token")?.and_then(|text| full.token_to_id(&text));
        let mut stop_ids = Vec::new();
        stop_ids.extend(eos);
        stop_ids.extend(token_ids("generation_config.json", &generation, "eos_token_id")?);
        stop_ids.extend(token_ids("config.json", &model, "eos_token_id")?);
        let end_of_turn_id = stop_ids.first().copied();
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(Self { full, plain, special, stop_ids, end_of_turn_id, byte_level })
    }

    /// Encodes a text as it stands: special tokens are recognized, and the tokenizer adds those that it begins and ends
    /// texts with.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        ids(self.full.encode_fast(text, true))
    }

    /// Encodes a text in which nothing is special, such as what a person wrote.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        ids(self.plain.encode_fast(text, false))
    }

    /// Encodes what a template rendered; special tokens that `marker` interrupts are text.
    pub(crate) fn encode_rendered(&self, text: &str, marker: char) -> Result<Vec<u32>, TextError> {
        if !text.contains(marker) {
            return ids(self.full.encode_fast(text, false));
        }
        let mut all = Vec::new();
        let encode_piece = |all: &mut Vec<u32>, piece: &str| {
            let piece: String = piece.chars().filter(|&character| character != marker).collect();
            all.extend(self.encode_plain(&piece)?);
            Ok(())
        };
        let mut rest = text;
        while let Some(found) = self.special.next_in(rest) {
            encode_piece(&mut all, &rest[..found.text.start])?;
            all.push(found.id);
            rest = &rest[found.text.end..];
        }
        encode_piece(&mut all, rest)?;
        Ok(all)
    }

    /// Every id that ends a turn, sorted.
    #[must_use]
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The id that ends the assistant's turn in a conversation.
    #[must_use]
    pub fn end_of_turn_id(&self) -> Option<u32> {
        self.end_of_turn_id
    }

    /// Text of a token as the tokenizer's file has it, and whether it is special. None for an id that does not exist.
    pub(crate) fn token(&self, id: u32) -> Option<(String, TokenKind)> {
        let text = self.full.id_to_token(id)?;
        let kind = match self.full.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            Some(token) if token.special => TokenKind::Special,
            Some(_) => TokenKind::Added,
            None => TokenKind::Ordinary,
        };
        Some((text, kind))
    }

    /// Whether token texts are bytes in GPT-2's alphabet.
    pub(crate) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// Decodes several tokens together, without special ones.
    pub(crate) fn decode(&self, ids: &[u32]) -> String {
        self.full.decode(ids, true).unwrap_or_default()
    }

    pub(crate) fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.full.get_vocab_size(true))
    }
}

/// What kind of vocabulary entry a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Ordinary,
    Added,
    Special,
}

/// Special tokens' texts as templates know them, by role.
pub(crate) fn token_roles(config: &Map<String, Value>) -> Result<Vec<(&'static str, String)>, TextError> {
    let mut roles = Vec::new();
    for role in TOKEN_ROLES {
        if let Some(text) = token_text(config, role)? {
            roles.push((role, text));
        }
    }
    Ok(roles)
}

fn ids(encoding: tokenizers::Result<tokenizers::Encoding>) -> Result<Vec<u32>, TextError> {
    let encoding = encoding.map_err(|error| TextError::Encode(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

fn special_tokens(tokenizer: &tokenizers::Tokenizer) -> Vec<(u32, AddedToken)> {
    let decoder = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    decoder.iter().filter(|(_, token)| token.special).map(|(&id, token)| (id, token.clone())).collect()
}

fn is_byte_level(decoder: &Value) -> bool {
    match decoder.get("type").and_then(Value::as_str) {
        Some("ByteLevel") => true,
        Some("Sequence") => {
            decoder.get("decoders").and_then(Value::as_array).is_some_and(|all| all.iter().any(is_byte_level))
        }
        _ => false,
    }
}

/// Largest token id; vocabularies have some hundred thousand. A list with a larger one would ask for memory by it.
const TOKEN_ID_LIMIT: u64 = 1 << 26;

/// Ids of the file are checked before anything is allocated by them.
fn check_ids(json: &Map<String, Value>) -> Result<(), TextError> {
    let too_large = |what: String| TextError::Tokenizer(format!("{what}; expected at most {TOKEN_ID_LIMIT}"));
    if let Some(Value::Object(vocabulary)) = json.get("model").and_then(|model| model.get("vocab")) {
        for (token, id) in vocabulary {
            if id.as_u64().is_none_or(|id| id > TOKEN_ID_LIMIT) {
                return Err(too_large(format!("model.vocab: the id of {token:?} is {id}")));
            }
        }
    }
    for token in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        if let Some(id) = token.get("id")
            && id.as_u64().is_none_or(|id| id > TOKEN_ID_LIMIT)
        {
            return Err(too_large(format!("added_tokens: an id is {id}")));
        }
    }
    Ok(())
}
