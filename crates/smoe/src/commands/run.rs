//! `smoe run`: one answer.

use std::io::Read;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use smoe_engine::{
    Engine, Event, FinishReason, GenerateOptions, Generation, InstrumentReport, IoReport, MemoryReport,
    SamplingOptions, Timings,
};
use smoe_text::{ChatInput, IncrementalDecoder, Message, encode_chat};

use crate::cli::{RunArgs, Switch};
use crate::{open, output, sampling, stats};

/// Largest prompt read from standard input, in bytes: far beyond any context.
const STDIN_LIMIT_BYTES: u64 = 16 << 20;

/// What `--json` prints.
#[derive(Serialize)]
struct RunReport<'a> {
    text: &'a str,
    token_ids: &'a [u32],
    prompt_token_ids: &'a [u32],
    finish_reason: FinishReason,
    sampling: SamplingOptions,
    timings: Timings,
    memory: MemoryReport,
    io: IoReport,
    instrument: &'a InstrumentReport,
}

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let prompt_text = args.prompt.as_deref().map(read_prompt).transpose()?;
    let mut engine = open::open(&args.model, open::engine_options(&args.engine))?;
    output::note(&open::banner(&engine));
    let sampling = sampling::options(&args.sampling, &engine)?;
    if sampling.temperature > 0.0 {
        output::note(&format!("seed {}", sampling.seed));
    }
    let prompt = match (&args.prompt_ids, prompt_text) {
        (Some(ids), _) => ids.clone(),
        (None, Some(text)) if args.raw => engine.tokenizer().encode(&text)?,
        (None, Some(text)) => {
            let mut messages = Vec::new();
            messages.extend(args.system.as_deref().map(|system| Message::new("system", system)));
            messages.push(Message::new("user", text));
            encode(&engine, &messages, args.thinking)?
        }
        (None, None) => bail!("no prompt"),
    };
    let options = GenerateOptions { max_tokens: args.max_tokens, sampling, ignore_eos: args.ignore_eos };
    let (generation, text) = answer(&mut engine, &prompt, &options, None, !args.json)?;
    if args.json {
        return output::json(&RunReport {
            text: &text,
            token_ids: &generation.token_ids,
            prompt_token_ids: &prompt,
            finish_reason: generation.finish_reason,
            sampling,
            timings: generation.timings,
            memory: engine.memory_report(),
            io: engine.io_report(),
            instrument: &generation.instrument,
        });
    }
    output::line("")?;
    output::note(&stats::summary(&engine, &generation, prompt.len()));
    if let Some(report) = stats::instruments(&generation.instrument) {
        output::note(&report);
    }
    Ok(())
}

fn read_prompt(argument: &str) -> Result<String> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .take(STDIN_LIMIT_BYTES + 1)
        .read_to_string(&mut text)
        .context("standard input")?;
    if text.len() as u64 > STDIN_LIMIT_BYTES {
        bail!("standard input: more than the {STDIN_LIMIT_BYTES} bytes that a prompt may have");
    }
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Renders and encodes a conversation up to the point where the assistant begins.
pub(crate) fn encode(engine: &Engine, messages: &[Message], thinking: Option<Switch>) -> Result<Vec<u32>> {
    let mut input = ChatInput::new(messages);
    input.enable_thinking = thinking.map(|switch| switch == Switch::On);
    Ok(encode_chat(engine.tokenizer(), engine.template()?, &input)?)
}

/// Generates, streaming the text to stdout if asked to; returns the whole text too.
pub(crate) fn answer(
    engine: &mut Engine,
    prompt: &[u32],
    options: &GenerateOptions,
    cancel: Option<&AtomicBool>,
    stream: bool,
) -> Result<(Generation, String)> {
    let tokenizer = engine.tokenizer_handle();
    let mut decoder = IncrementalDecoder::new(&tokenizer);
    let mut text = String::new();
    let mut written = Ok(());
    let mut progress = stats::PrefillProgress::default();
    let generation = engine.generate(prompt, options, cancel, &mut |event| match event {
        Event::Prefill { done, total, .. } => progress.update(done, total),
        Event::Token(token) => {
            let piece = decoder.push(token);
            if stream && !piece.is_empty() && written.is_ok() {
                written = output::piece(&piece);
            }
            text.push_str(&piece);
        }
    })?;
    let tail = decoder.finish();
    if stream && written.is_ok() && !tail.is_empty() {
        written = output::piece(&tail);
    }
    text.push_str(&tail);
    written?;
    Ok((generation, text))
}
