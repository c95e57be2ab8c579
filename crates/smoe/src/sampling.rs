//! Sampling options: the command line's, else the model's own, else greedy.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use smoe_engine::{Engine, SamplingOptions};

use crate::cli::SamplingArgs;

/// The options in force for an engine, and whether any draw is random.
pub(crate) fn options(args: &SamplingArgs, engine: &Engine) -> Result<SamplingOptions> {
    let header = engine.vault().header();
    let own = match &header.generation_config {
        Some(text) => own_options(text)
            .with_context(|| format!("{}: generation_config.json", engine.path().display()))?,
        None => SamplingOptions::greedy(),
    };
    Ok(SamplingOptions {
        temperature: args.temperature.unwrap_or(own.temperature),
        top_k: args.top_k.unwrap_or(own.top_k),
        top_p: args.top_p.unwrap_or(own.top_p),
        min_p: args.min_p.unwrap_or(own.min_p),
        repetition_penalty: args.repetition_penalty.unwrap_or(own.repetition_penalty),
        seed: args.seed.unwrap_or_else(new_seed),
    })
}

/// Reads `generation_config.json` as `transformers` does: without `do_sample` the likeliest token is taken.
fn own_options(text: &str) -> Result<SamplingOptions> {
    let config: Value = serde_json::from_str(text).context("not JSON")?;
    let number = |key: &str, default: f32| -> Result<f32> {
        match config.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(number as f32),
                None => bail!("{key} is {value}; expected a number"),
            },
        }
    };
    let sampled = match config.get("do_sample") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(flag)) => *flag,
        Some(value) => bail!("do_sample is {value}; expected true or false"),
    };
    let top_k = match config.get("top_k") {
        None | Some(Value::Null) => 50, // the reference's default where a model samples without saying
        Some(value) => match value.as_u64() {
            Some(number) => number as usize,
            None => bail!("top_k is {value}; expected a whole number"),
        },
    };
    let options = SamplingOptions {
        temperature: if sampled { number("temperature", 1.0)? } else { 0.0 },
        top_k,
        top_p: number("top_p", 1.0)?,
        min_p: number("min_p", 0.0)?,
        repetition_penalty: number("repetition_penalty", 1.0)?,
        seed: 0,
    };
    options.check()?;
    Ok(options)
}

/// A seed nobody has chosen, short enough to type again.
fn new_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    random % 1_000_000_000
}
