//! The trained checkpoint against what `transformers` computes from it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{comma_separated, fixture, ids, packed, pebble, read_json, smoe_json};
use serde_json::Value;

fn cases() -> Vec<Value> {
    read_json(&pebble().join("reference.json"))["cases"].as_array().expect("cases").clone()
}

fn text(case: &Value) -> &str {
    case["messages"][0]["content"].as_str().expect("a message")
}

/// Conversations whose greedy tokens in `reference.json` are those of `transformers` (4.57 and 5.24, on this project's own
/// machines). The fourth ("Hello!") is not: both versions choose token 11 where the file has 0, with logits 13.958 against
/// 13.891, and 370 where it has 1399, with 17.030 against 16.211. It is checked against what they do choose.
const REPRODUCIBLE: usize = 3;

#[test]
fn greedy_tokens_equal_the_reference() {
    let vault = packed(&pebble(), "BF16", "BF16");
    let regenerated = read_json(&fixture("pebble-greedy.json"));
    for (index, case) in cases().into_iter().enumerate() {
        let again = &regenerated["cases"][index];
        assert_eq!(again["prompt_ids"], case["prompt_ids"]);
        if index < REPRODUCIBLE {
            assert_eq!(again["greedy_ids"], case["greedy_ids"]);
        }
        let expected = ids(&again["greedy_ids"]);
        let report = smoe_json([
            "run",
            vault.to_str().unwrap(),
            "-p",
            text(&case),
            "-n",
            "64",
            "--temperature",
            "0",
            "--kv",
            "f32",
            "--json",
        ]);
        assert_eq!(ids(&report["prompt_token_ids"]), ids(&case["prompt_ids"]));
        assert_eq!(ids(&report["token_ids"]), expected);
        let ended = if expected.len() == 64 { "length" } else { "stop" };
        assert_eq!(report["finish_reason"], ended);
        if index < REPRODUCIBLE {
            let expected_text = case["greedy_text"].as_str().unwrap().trim_end_matches("<|im_end|>");
            assert_eq!(report["text"], expected_text);
        }
    }
}

#[test]
fn token_ids_and_text_are_the_same_prompt() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let case = &cases()[1];
    let prompt = comma_separated(&ids(&case["prompt_ids"]));
    let run = |args: [&str; 2]| {
        let mut all = vec!["run", vault.to_str().unwrap(), "-n", "40", "--temperature", "0", "--json"];
        all.extend(args);
        smoe_json(all)["token_ids"].clone()
    };
    assert_eq!(run(["--prompt-ids", &prompt]), run(["-p", text(case)]));
}

/// Negative log-likelihood per token over the first 100 held-out rows; the reference in f32 gives 2.15015.
fn heldout(experts: &str, dense: &str) -> f64 {
    let vault = packed(&pebble(), experts, dense);
    let data = pebble().join("heldout.jsonl");
    let report = smoe_json([
        "eval",
        vault.to_str().unwrap(),
        "--data",
        data.to_str().unwrap(),
        "--limit",
        "100",
        "--kv",
        "f32",
        "--json",
    ]);
    assert_eq!(report["tokens"], 16_044);
    report["nll_per_token"].as_f64().unwrap()
}

#[test]
fn likelihood_in_bf16_is_that_of_the_reference() {
    let nll = heldout("BF16", "BF16");
    assert!((nll - 2.15015).abs() <= 0.0005, "{nll}");
}

#[test]
fn likelihood_in_q8_0_hardly_changes() {
    let nll = heldout("Q8_0", "Q8_0");
    assert!((2.1487..=2.1525).contains(&nll), "{nll}");
}

#[test]
fn likelihood_in_q4_0_stays_within_its_yardstick() {
    let nll = heldout("Q4_0", "Q8_0");
    assert!((2.16..=2.178).contains(&nll), "{nll}");
}
