//! Every variation of the architecture against what `transformers` computes from the same weights.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::Path;

use common::{fixture, ids, packed, read_json, smoe_json};
use serde_json::Value;
use smoe_engine::{CacheSize, Engine, EngineOptions, GenerateOptions, SamplingOptions};
use smoe_model::KvFormat;

/// Largest difference of a logit: both sides compute in float32, in different orders.
const LOGIT_TOLERANCE: f32 = 2e-3;

fn exact_options() -> EngineOptions {
    EngineOptions { kv: KvFormat::F32, threads: Some(2), cache: CacheSize::All, ..EngineOptions::default() }
}

fn open(vault: &Path) -> Engine {
    Engine::open(vault, exact_options(), &mut |_| {}).unwrap()
}

fn logits_of(engine: &mut Engine, prompt: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    engine.reset();
    engine
        .advance(prompt, 0, None, &mut |_, logits| {
            rows.push(logits.to_vec());
            Ok(())
        })
        .unwrap();
    rows
}

fn greedy(engine: &mut Engine, prompt: &[u32], count: usize) -> Vec<u32> {
    let options =
        GenerateOptions { max_tokens: count, sampling: SamplingOptions::greedy(), ignore_eos: true };
    engine.reset();
    engine.generate(prompt, &options, None, &mut |_| {}).unwrap().token_ids
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn floats(base64: &str) -> Vec<f32> {
    let digit = |character: u8| match character {
        b'A'..=b'Z' => u32::from(character - b'A'),
        b'a'..=b'z' => u32::from(character - b'a') + 26,
        b'0'..=b'9' => u32::from(character - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let text = base64.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::new();
    for group in text.chunks(4) {
        let bits = group.iter().enumerate().fold(0, |bits, (at, &c)| bits | digit(c) << (18 - 6 * at));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Packs a fixture as it is and compares logits, routes and greedy tokens.
fn check(name: &str, format: &str) {
    let reference = read_json(&fixture(name).join("reference.json"));
    let vault = packed(&fixture(name), format, format);
    let mut engine = open(&vault);
    let prompt = ids(&reference["prompt_ids"]);
    let rows = logits_of(&mut engine, &prompt);

    let layers = reference["experts"].as_array().unwrap();
    assert_eq!(engine.config().sparse_layers(), layers.len());
    for (layer, tokens) in layers.iter().enumerate() {
        for (token, expected) in tokens.as_array().unwrap().iter().enumerate() {
            let sorted = |mut experts: Vec<u32>| {
                experts.sort_unstable();
                experts
            };
            let found = engine.chosen_experts(layer, token).to_vec();
            assert_eq!(sorted(found), sorted(ids(expected)), "{name}: layer {layer}, token {token}");
        }
    }
    let positions = reference["positions"].as_array().unwrap();
    for (position, expected) in positions.iter().zip(reference["logits"].as_array().unwrap()) {
        let position = position.as_u64().unwrap() as usize;
        let difference = largest_difference(&rows[position], &floats(expected.as_str().unwrap()));
        assert!(difference <= LOGIT_TOLERANCE, "{name}: position {position} differs by {difference}");
    }
    let expected = ids(&reference["greedy_ids"]);
    assert_eq!(greedy(&mut engine, &prompt, expected.len()), expected, "{name}");
}

macro_rules! variations {
    ($($test:ident: $name:literal, $format:literal;)*) => {
        $(
            #[test]
            fn $test() {
                check($name, $format);
            }
        )*

        /// A fixture without a test would be a claim without proof.
        #[test]
        fn every_fixture_is_checked() {
            let checked = [$($name),*];
            for entry in std::fs::read_dir(fixture("")).unwrap() {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                if entry.path().join("config.json").exists() && name != "qwen3moe-tiny" {
                    assert!(checked.contains(&name.as_str()), "{name} has no test");
                }
            }
        }
    };
}

variations! {
    plain: "plain", "BF16";
    yarn: "yarn", "BF16";
    linear_scaling_in_old_spelling_from_f16: "linear-old-keys-f16", "F16";
    attention_bias: "attention-bias", "BF16";
    dense_layers_in_between: "dense-between", "BF16";
    sparse_step_of_two: "sparse-step-2", "BF16";
    router_weights_that_are_not_normalized: "norm-topk-false", "BF16";
    tied_head: "tied", "BF16";
    three_shuffled_shards: "three-shards", "BF16";
    odd_expert_width: "odd-width", "BF16";
    more_than_ten_experts: "many-experts", "BF16";
    sliding_window: "sliding-window", "BF16";
    wide_heads_from_f32: "wide-heads-f32", "F32";
}

#[test]
fn the_tiny_checkpoint_gives_the_references_logits_and_tokens() {
    let folder = fixture("qwen3moe-tiny");
    let reference = read_json(&folder.join("reference.json"));
    let mut engine = open(&packed(&folder, "BF16", "BF16"));
    for (index, case) in reference["prompts"].as_array().unwrap().iter().enumerate() {
        let prompt = ids(&case["ids"]);
        assert_eq!(engine.tokenizer().encode(case["text"].as_str().unwrap()).unwrap(), prompt);
        let bytes = std::fs::read(folder.join(format!("logits-{index}.f32"))).unwrap();
        let expected: Vec<f32> =
            bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let rows = logits_of(&mut engine, &prompt);
        assert_eq!(rows.len() * rows[0].len(), expected.len());
        for (position, (found, expected)) in rows.iter().zip(expected.chunks(rows[0].len())).enumerate() {
            let difference = largest_difference(found, expected);
            assert!(difference <= LOGIT_TOLERANCE, "prompt {index}, position {position}: {difference}");
        }
        let expected = ids(&case["greedy_ids"]);
        assert_eq!(greedy(&mut engine, &prompt, expected.len()), expected);
    }
}

/// Formats of a class in a pack report.
fn formats_of<'a>(report: &'a Value, class: &str) -> Vec<&'a str> {
    let entries = report["formats"].as_array().unwrap();
    entries
        .iter()
        .filter(|entry| entry["class"] == class)
        .map(|entry| entry["format"].as_str().unwrap())
        .collect()
}

#[test]
fn rows_that_are_no_multiple_of_a_block_fall_back_and_say_so() {
    let vault = common::temp_dir("fallback").join("odd.smoe");
    let report = smoe_json([
        "pack",
        fixture("odd-width").to_str().unwrap(),
        "-o",
        vault.to_str().unwrap(),
        "--experts",
        "Q4_0",
        "--dense",
        "Q8_0",
        "--json",
    ]);
    let mut formats = formats_of(&report, "experts");
    formats.sort_unstable();
    assert_eq!(formats, ["BF16", "Q4_0"]);
    let fallbacks = report["fallbacks"].as_array().unwrap();
    let down = "down of the experts of layer 0: BF16 instead of Q4_0, as rows of 40 are no multiple of 32";
    assert!(fallbacks.iter().any(|line| line == down), "{fallbacks:?}");
    // The mixture runs, and inspect tells of it.
    let mut engine = open(&vault);
    assert_eq!(greedy(&mut engine, &[1, 2, 3], 8).len(), 8);
    let inspected = smoe_json(["inspect", vault.to_str().unwrap(), "--json"]);
    assert_eq!(inspected["provenance"]["fallbacks"], report["fallbacks"]);
}

#[test]
fn yarn_and_linear_scaling_tell_their_context() {
    for (name, context) in [("yarn", 256), ("linear-old-keys-f16", 256)] {
        let format = if name == "yarn" { "BF16" } else { "F16" };
        let vault = packed(&fixture(name), format, format);
        let inspected = smoe_json(["inspect", vault.to_str().unwrap(), "--json"]);
        assert_eq!(inspected["model"]["context"], context, "{name}");
    }
}
