//! Placement decides speed, never values: the same tokens whatever the cache, the threads, the chunks and the drive do.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{ids, packed, pebble, read_json};
use smoe_engine::{
    CacheSize, Engine, EngineError, EngineOptions, GenerateOptions, Generation, SamplingOptions,
};
use smoe_format::Vault;
use smoe_model::{KvFormat, ModelError};
use smoe_stream::chaos::{ChaosOptions, ChaosReader};
use smoe_stream::{FileReader, IoChoice, StreamError};

const TOKENS: usize = 24;

fn vault() -> PathBuf {
    packed(&pebble(), "Q4_0", "Q8_0")
}

fn prompt() -> Vec<u32> {
    ids(&read_json(&pebble().join("reference.json"))["cases"][0]["prompt_ids"])
}

/// A prompt that needs several chunks.
fn long_prompt() -> Vec<u32> {
    prompt().iter().copied().cycle().take(300).collect()
}

fn options() -> EngineOptions {
    EngineOptions { threads: Some(2), ..EngineOptions::default() }
}

fn generate(engine: &mut Engine, prompt: &[u32]) -> Result<Generation, EngineError> {
    let options =
        GenerateOptions { max_tokens: TOKENS, sampling: SamplingOptions::greedy(), ignore_eos: true };
    engine.generate(prompt, &options, None, &mut |_| {})
}

fn tokens(options: EngineOptions, prompt: &[u32]) -> Vec<u32> {
    let mut engine = Engine::open(&vault(), options, &mut |_| {}).unwrap();
    generate(&mut engine, prompt).unwrap().token_ids
}

/// Tokens and the bits of the last position's logits.
fn bits(options: EngineOptions, prompt: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let mut engine = Engine::open(&vault(), options, &mut |_| {}).unwrap();
    let tokens = generate(&mut engine, prompt).unwrap().token_ids;
    let mut bits = Vec::new();
    engine
        .advance(&[tokens[TOKENS - 1]], 0, None, &mut |_, logits| {
            bits.extend(logits.iter().map(|logit| logit.to_bits()));
            Ok(())
        })
        .unwrap();
    (tokens, bits)
}

fn stride() -> u64 {
    Vault::open(&vault()).unwrap().header().expert_layers[0].stride
}

#[test]
fn cache_sizes_from_the_least_to_everything() {
    let prompt = long_prompt();
    let expected = bits(EngineOptions { cache: CacheSize::All, ..options() }, &prompt);
    for slots in [4, 5, 7, 32, 33, 100, 191, 192] {
        let cache = CacheSize::Bytes(slots * stride());
        assert_eq!(bits(EngineOptions { cache, ..options() }, &prompt), expected, "{slots} slots");
    }
    // Less than the least is raised to it.
    assert_eq!(bits(EngineOptions { cache: CacheSize::Bytes(1), ..options() }, &prompt), expected);
}

#[test]
fn threads() {
    let prompt = long_prompt();
    let expected = bits(EngineOptions { threads: Some(1), ..options() }, &prompt);
    for threads in [2, 3, 4, 9] {
        assert_eq!(
            bits(EngineOptions { threads: Some(threads), ..options() }, &prompt),
            expected,
            "{threads}"
        );
    }
}

#[test]
fn prefill_chunks() {
    let prompt = long_prompt();
    for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
        let expected = bits(EngineOptions { chunk: Some(512), kv, ..options() }, &prompt);
        for chunk in [1, 7, 64, 100] {
            let cache = CacheSize::Bytes(20 * stride());
            let options = EngineOptions { chunk: Some(chunk), kv, cache, ..options() };
            assert_eq!(bits(options, &prompt), expected, "chunks of {chunk}, {kv:?}");
        }
    }
}

#[test]
fn ways_of_reading() {
    let cache = CacheSize::Bytes(20 * stride());
    let expected = tokens(EngineOptions { cache, ..options() }, &prompt());
    for io in [IoChoice::Pread, IoChoice::Buffered] {
        assert_eq!(tokens(EngineOptions { cache, io, ..options() }, &prompt()), expected, "{io:?}");
    }
}

fn open_with_chaos(cache: CacheSize, chaos: ChaosOptions) -> Result<Engine, EngineError> {
    Engine::open_with(&vault(), EngineOptions { cache, ..options() }, &mut |_| {}, |vault| {
        Ok(ChaosReader::new(FileReader::open(vault.path(), IoChoice::Auto)?, chaos))
    })
}

#[test]
fn reads_that_are_late_short_interrupted_and_failing() {
    let cache = CacheSize::Bytes(20 * stride());
    let expected = tokens(EngineOptions { cache, ..options() }, &prompt());
    for seed in 0..4 {
        let mut engine = open_with_chaos(cache, ChaosOptions::survivable(seed)).unwrap();
        assert_eq!(generate(&mut engine, &prompt()).unwrap().token_ids, expected, "seed {seed}");
        let counters = engine.counters();
        assert!(counters.retries > 0 && counters.short_reads > 0 && counters.interrupted > 0, "{counters:?}");
    }
}

#[test]
fn every_expert_in_a_shuffled_order_of_arrival() {
    let expected = tokens(EngineOptions { cache: CacheSize::All, ..options() }, &long_prompt());
    for seed in 0..3 {
        let delay = Duration::from_millis(3);
        let chaos = ChaosOptions { seed, delay, ..ChaosOptions::default() };
        let mut engine = open_with_chaos(CacheSize::All, chaos).unwrap();
        assert_eq!(generate(&mut engine, &long_prompt()).unwrap().token_ids, expected, "seed {seed}");
    }
}

#[test]
fn flipped_bits_are_read_again() {
    let expected = tokens(options(), &prompt());
    let chaos = ChaosOptions { seed: 5, flipped: 20, ..ChaosOptions::default() };
    let mut engine = open_with_chaos(CacheSize::Bytes(20 * stride()), chaos).unwrap();
    assert_eq!(generate(&mut engine, &prompt()).unwrap().token_ids, expected);
    assert!(engine.counters().rereads > 0);
}

fn is_read_error(error: &EngineError) -> bool {
    matches!(error, EngineError::Model(ModelError::Stream(StreamError::Read { .. })))
}

#[test]
fn a_dead_spot_ends_the_request_and_not_the_engine() {
    let (start, length) = Vault::open(&vault()).unwrap().expert_section();
    let expected = tokens(options(), &prompt());
    // The whole expert section is dead: the first miss fails for good.
    let dead = ChaosOptions { dead: Some(start..start + length), ..ChaosOptions::default() };
    let mut engine = open_with_chaos(CacheSize::All, dead).unwrap();
    for _ in 0..2 {
        let error = generate(&mut engine, &prompt()).unwrap_err();
        assert!(is_read_error(&error), "{error}");
        let message = error.to_string();
        assert!(message.contains("offset") && message.contains("pebble"), "{message}");
    }
    // A few records are dead: requests that need them fail, and what was computed before stays right.
    let stride = stride();
    let dead =
        ChaosOptions { dead: Some(start + 40 * stride..start + 41 * stride), ..ChaosOptions::default() };
    let mut engine = open_with_chaos(CacheSize::All, dead).unwrap();
    let mut failed = 0;
    for count in 1..=prompt().len() {
        match generate(&mut engine, &prompt()[..count]) {
            Ok(_) => {}
            Err(error) if is_read_error(&error) => failed += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed > 0);
    match generate(&mut engine, &prompt()) {
        Ok(generation) => assert_eq!(generation.token_ids, expected),
        Err(error) => assert!(is_read_error(&error), "{error}"),
    }
}

#[test]
fn a_conversation_gives_what_a_cold_start_gives() {
    let mut engine = Engine::open(&vault(), options(), &mut |_| {}).unwrap();
    let first = generate(&mut engine, &prompt()).unwrap();
    let mut second: Vec<u32> = prompt();
    second.extend(&first.token_ids);
    second.extend(prompt());
    let warm = generate(&mut engine, &second).unwrap();
    assert!(warm.reused_tokens >= prompt().len() + TOKENS - 1, "{} tokens reused", warm.reused_tokens);
    let mut cold = Engine::open(&vault(), options(), &mut |_| {}).unwrap();
    assert_eq!(generate(&mut cold, &second).unwrap().token_ids, warm.token_ids);
    // Going back to an earlier point of the conversation.
    assert_eq!(generate(&mut engine, &prompt()).unwrap().token_ids, first.token_ids);
}

#[test]
fn instruments_change_nothing() {
    let expected = tokens(options(), &prompt());
    assert_eq!(tokens(EngineOptions { instrument: true, ..options() }, &prompt()), expected);
}

#[test]
fn a_seed_gives_one_text() {
    let sampling = SamplingOptions { temperature: 1.0, seed: 7, ..SamplingOptions::greedy() };
    let options = GenerateOptions { max_tokens: 20, sampling, ignore_eos: true };
    let run = |path: &Path, threads: usize| {
        let engine_options = EngineOptions { threads: Some(threads), ..self::options() };
        let mut engine = Engine::open(path, engine_options, &mut |_| {}).unwrap();
        engine.generate(&prompt(), &options, None, &mut |_| {}).unwrap().token_ids
    };
    let expected = run(&vault(), 1);
    for threads in [1, 2, 1, 4] {
        assert_eq!(run(&vault(), threads), expected);
    }
}
