//! The tokenizer against its reference, and decoding piece by piece.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use proptest::prelude::*;
use serde_json::Value;
use smoe_text::{IncrementalDecoder, TextError, TextFiles, Tokenizer};

const PEBBLE: &str = include_str!("../../../models/pebble-22m/tokenizer.json");

fn files<'a>(tokenizer: &'a str) -> TextFiles<'a> {
    TextFiles {
        tokenizer,
        tokenizer_config: None,
        generation_config: None,
        config: "{}",
        chat_template: None,
    }
}

fn pebble() -> Tokenizer {
    Tokenizer::from_files(&files(PEBBLE)).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = IncrementalDecoder::new(tokenizer);
    let mut text: String = ids.iter().map(|&id| decoder.push(id)).collect();
    text.push_str(&decoder.finish());
    text
}

#[test]
fn texts_are_encoded_as_the_reference_encodes_them() {
    let cases: Value = serde_json::from_str(include_str!("fixtures/encodings.json")).unwrap();
    let tokenizer = pebble();
    for case in cases["plain"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{text:?}");
    }
    // Added tokens with every flag.
    let mut json: Value = serde_json::from_str(PEBBLE).unwrap();
    json["added_tokens"] = serde_json::from_str(include_str!("fixtures/flagged-added-tokens.json")).unwrap();
    let json = json.to_string();
    let tokenizer = Tokenizer::from_files(&files(&json)).unwrap();
    for case in cases["flagged"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{text:?}");
    }
}

#[test]
fn every_byte_survives_and_no_letter_of_the_alphabet_is_seen() {
    let tokenizer = pebble();
    let text: String = (0..0x250_u32).filter_map(char::from_u32).collect();
    assert_eq!(decode(&tokenizer, &tokenizer.encode_plain(&text).unwrap()), text);
    let spaced = "a b\nc\td";
    let found = decode(&tokenizer, &tokenizer.encode_plain(spaced).unwrap());
    assert!(found == spaced && !found.contains(['Ġ', 'Ċ']));
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let mut json: Value = serde_json::from_str(PEBBLE).unwrap();
    json["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let json = json.to_string();
    let tokenizer = Tokenizer::from_files(&files(&json)).unwrap();
    let text = "a text of more than three tokens";
    assert_eq!(tokenizer.encode(text).unwrap(), pebble().encode(text).unwrap());
}

#[test]
fn end_of_turn_ids_come_from_three_files_as_numbers_or_lists() {
    let with = |generation: Option<&str>, config: &str, tokenizer_config: Option<&str>| {
        let files = TextFiles {
            tokenizer: PEBBLE,
            tokenizer_config,
            generation_config: generation,
            config,
            chat_template: None,
        };
        Tokenizer::from_files(&files)
            .map(|tokenizer| (tokenizer.stop_ids().to_vec(), tokenizer.end_of_turn_id()))
    };
    assert_eq!(with(None, "{}", None).unwrap(), (vec![], None));
    assert_eq!(with(Some(r#"{"eos_token_id": 5}"#), "{}", None).unwrap(), (vec![5], Some(5)));
    assert_eq!(
        with(
            Some(r#"{"eos_token_id": [9, 5]}"#),
            r#"{"eos_token_id": 7}"#,
            Some(r#"{"eos_token": {"content": "<|im_end|>"}}"#)
        )
        .unwrap(),
        (vec![5, 7, 9, 6143], Some(6143))
    );
    assert_eq!(with(None, "{}", Some(r#"{"eos_token": null}"#)).unwrap().0, Vec::<u32>::new());
    for (generation, key) in
        [(r#"{"eos_token_id": -1}"#, "eos_token_id"), (r#"{"eos_token_id": [1, "x"]}"#, "eos_token_id")]
    {
        let error = with(Some(generation), "{}", None).unwrap_err();
        assert!(matches!(&error, TextError::Invalid { key: found, .. } if found == key), "{error}");
    }
}

#[test]
fn malformed_tokenizers_are_errors() {
    for text in ["", "null", "[]", "{}", "{\"model\": 3}", &PEBBLE[..PEBBLE.len() / 2]] {
        let error = Tokenizer::from_files(&files(text)).unwrap_err();
        assert!(matches!(error, TextError::Tokenizer(_)), "{error}");
    }
}

#[test]
fn tokens_that_do_not_exist_and_broken_bytes_do_no_harm() {
    let tokenizer = pebble();
    let mut decoder = IncrementalDecoder::new(&tokenizer);
    assert_eq!(decoder.push(u32::MAX), "");
    // The bytes of one character, one token each.
    let smile = tokenizer.encode_plain("🙂").unwrap();
    let mut pieces: Vec<String> = smile.iter().map(|&id| decoder.push(id)).collect();
    assert_eq!(pieces.pop().as_deref(), Some("🙂"));
    assert!(pieces.iter().all(String::is_empty));
    // Cut off in the middle, it becomes a replacement character and is not lost.
    if smile.len() > 1 {
        let cut = decode(&tokenizer, &smile[..1]);
        assert_eq!(cut, "\u{FFFD}");
    }
}

/// A tokenizer whose spaces belong to words, so that pieces depend on their neighbours.
const METASPACE: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [
    {"id": 0, "content": "<unk>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
    "post_processor": null, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}]},
    "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
    "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
    "vocab": {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "<0xF0>": 5, "<0x9F>": 6, "<0x99>": 7, "<0x82>": 8},
    "merges": [["▁", "a"]]}}"#;

#[test]
fn other_tokenizers_are_decoded_with_their_neighbours() {
    let tokenizer = Tokenizer::from_files(&files(METASPACE)).unwrap();
    for text in ["ab a b", "a", "b🙂a", "🙂🙂", "a  b"] {
        let ids = tokenizer.encode_plain(text).unwrap();
        assert_eq!(decode(&tokenizer, &ids), text, "{ids:?}");
        let mut decoder = IncrementalDecoder::new(&tokenizer);
        for id in ids {
            assert!(!decoder.push(id).contains(char::REPLACEMENT_CHARACTER));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_text_survives(text in "\\PC{0,60}") {
        let tokenizer = pebble();
        prop_assert_eq!(decode(&tokenizer, &tokenizer.encode_plain(&text).unwrap()), text);
    }

    #[test]
    fn any_tokens_decode_to_the_same_text_in_pieces_and_at_once(ids in prop::collection::vec(0_u32..6144, 0..60)) {
        let tokenizer = pebble();
        let reference = tokenizers::Tokenizer::from_bytes(PEBBLE).unwrap().decode(&ids, true).unwrap();
        prop_assert_eq!(decode(&tokenizer, &ids), reference);
    }
}
