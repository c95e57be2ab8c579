//! What people see: help, tables, conversations, exit codes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::io::Write;
use std::process::{Command, Output, Stdio};

use common::{fixture, packed, pebble, smoe, smoe_json, stderr, stdout};

fn with_input(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_smoe"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn help_lists_the_commands() {
    insta::assert_snapshot!(stdout(&smoe(["--help"])));
}

#[test]
fn every_command_has_help_with_examples() {
    for command in ["pack", "run", "chat", "inspect", "verify", "eval", "demo"] {
        let output = smoe([command, "--help"]);
        assert!(output.status.success());
        let text = stdout(&output);
        assert!(text.contains("Usage: smoe"), "{text}");
        assert!(command == "demo" || text.contains("Examples:\n  smoe"), "{command}: {text}");
    }
}

#[test]
fn bad_usage_has_its_own_exit_code() {
    for args in [
        &[][..],
        &["frob"],
        &["run"],
        &["run", "x.smoe"],
        &["pack", "x"],
        &["run", "x", "-p", "a", "--seed", "-1"],
    ] {
        let output = smoe(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn inspect_draws_a_table() {
    let folder = common::temp_dir("cli");
    let vault = folder.join("many.smoe");
    let from = fixture("many-experts");
    assert!(
        smoe(["pack", from.to_str().unwrap(), "-o", vault.to_str().unwrap(), "--force"]).status.success()
    );
    let text = stdout(&smoe(["inspect", vault.to_str().unwrap(), "--tensors"]));
    insta::assert_snapshot!(text.replace(folder.to_str().unwrap(), "FOLDER"));
}

#[test]
fn a_conversation_prefills_only_what_is_new() {
    let vault = packed(&pebble(), "BF16", "BF16");
    let args = ["chat", vault.to_str().unwrap(), "--temperature", "0", "-n", "40", "--kv", "f32"];
    let input = "What is the moon?\n/stats\n/nonsense\n/help\nTell me more.\\\nPlease.\n/reset\nWhat is the moon?\n/exit\nnot read\n";
    let output = with_input(&args, input);
    let (text, notes) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{notes}");
    // The first and the last answer are those of an empty conversation, and the reference's.
    let answer = "The moon is a celestial body that orbits our planet. It's also the light of the full moon, and it can be \
                  found anywhere on Earth.\n";
    assert_eq!(text.matches(answer).count(), 2, "{text}");
    assert!(notes.contains("unknown command /nonsense") && notes.contains("/reset"), "{notes}");
    let timings: Vec<_> = notes.lines().filter(|line| line.starts_with("[prompt ")).collect();
    // Three answers and the repetition of the first by /stats.
    assert_eq!(timings.len(), 4, "{notes}");
    assert!(timings[0].starts_with("[prompt 16 tokens,"), "{}", timings[0]);
    // Of the second prompt, the first one and its answer (31 tokens and the end of the turn) are there already.
    let kept: usize = timings[2].split_once('(').unwrap().1.split_once(" kept").unwrap().0.parse().unwrap();
    assert!(kept >= 16 + 31, "{}", timings[2]);
    assert!(timings[3].starts_with("[prompt 16 tokens,") || timings[3].contains("kept"), "{}", timings[3]);
    assert!(!text.contains("not read"));
}

#[test]
fn a_turn_that_does_not_fit_is_refused_and_the_conversation_goes_on() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let long = "word ".repeat(600);
    let input = format!("{long}\nHello!\n");
    let output = with_input(&["chat", vault.to_str().unwrap(), "--temperature", "0", "-n", "5"], &input);
    assert!(output.status.success());
    let notes = stderr(&output);
    assert!(notes.contains("context_length_exceeded") && notes.contains("512"), "{notes}");
    assert!(notes.contains("/reset begins a new conversation"), "{notes}");
    assert!(stdout(&output).starts_with("Hello"), "{}", stdout(&output));
}

#[test]
fn answers_can_be_piped_and_the_pipe_closed() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let output =
        with_input(&["run", vault.to_str().unwrap(), "-p", "-", "-n", "5", "--temperature", "0"], "Hello!\n");
    assert!(output.status.success() && !stdout(&output).trim().is_empty());
    let mut child = Command::new(env!("CARGO_BIN_EXE_smoe"))
        .args(["run", vault.to_str().unwrap(), "-p", "Tell me a story.", "-n", "300", "--ignore-eos"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked"));
}

#[test]
fn the_banner_tells_what_was_decided() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let run = |more: &[&str]| {
        let args = ["run", vault.to_str().unwrap(), "-p", "Hello!", "-n", "2", "--temperature", "0"];
        stderr(&smoe([&args[..], more].concat()))
    };
    let text = run(&["--memory", "64M", "--kv", "q8", "--threads", "1"]);
    for part in
        ["experts Q4_0, dense Q8_0, KV q8", "budget 64.0 MiB (--memory)", "expert cache", "on 1 thread"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(run(&["--cache", "1K"]).contains("the least that works, more than asked"));
    assert!(run(&["--cache", "2M"]).contains(", as asked)"));
    assert!(run(&["--io", "buffered"]).contains("buffered reads, 8 pread threads (asked for)"));
}

#[test]
fn sampling_options_come_from_the_model_unless_given() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let run = |more: &[&str]| {
        smoe_json([&["run", vault.to_str().unwrap(), "-p", "Hello!", "-n", "8", "--json"][..], more].concat())
    };
    let own = run(&["--seed", "3"]);
    let close = |value: &serde_json::Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-6;
    assert!(close(&own["sampling"]["temperature"], 0.7) && close(&own["sampling"]["top_p"], 0.95), "{own}");
    assert_eq!((&own["sampling"]["top_k"], &own["sampling"]["seed"]), (&40.into(), &3.into()));
    assert_eq!(run(&["--seed", "3"])["token_ids"], own["token_ids"]);
    let given =
        run(&["--seed", "3", "--temperature", "1.5", "--top-k", "0", "--top-p", "1", "--min-p", "0.1"]);
    assert!(close(&given["sampling"]["temperature"], 1.5) && close(&given["sampling"]["min_p"], 0.1));
}

#[test]
fn eval_compares_vaults() {
    let (small, exact) = (packed(&pebble(), "Q4_0", "Q8_0"), packed(&pebble(), "BF16", "BF16"));
    let data = pebble().join("heldout.jsonl");
    let args = ["eval", small.to_str().unwrap(), "--data", data.to_str().unwrap(), "--limit", "3", "--json"];
    let report = smoe_json([&args[..], &["--against", exact.to_str().unwrap()]].concat());
    let number = |name: &str| report[name].as_f64().unwrap();
    assert!(
        number("kl_mean") > 0.0 && number("kl_mean") < 0.1 && number("kl_p99") > number("kl_mean"),
        "{report}"
    );
    assert!((0.8..1.0).contains(&number("top1_agreement")), "{report}");
    assert!((number("perplexity").ln() - number("nll_per_token")).abs() < 1e-9);
    let same = smoe_json([&args[..], &["--against", small.to_str().unwrap()]].concat());
    assert_eq!((same["kl_mean"].as_f64(), same["top1_agreement"].as_f64()), (Some(0.0), Some(1.0)));
}
