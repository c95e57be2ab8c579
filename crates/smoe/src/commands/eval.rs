//! `smoe eval`: how well a model predicts given answers.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use smoe_engine::{Divergence, Engine, EngineOptions};
use smoe_text::Message;

use crate::cli::EvalArgs;
use crate::{commands::run, open, output};

/// Longest line of the data, in bytes.
const LINE_LIMIT_BYTES: u64 = 16 << 20;

/// Positions whose logits are computed together.
const LOGITS_ROWS: usize = 16;

#[derive(Deserialize)]
struct Row {
    #[serde(default)]
    system: Option<String>,
    user: String,
    assistant: String,
}

/// What `--json` prints.
#[derive(Serialize)]
struct EvalReport {
    nll_per_token: f64,
    tokens: usize,
    perplexity: f64,
    rows: usize,
    /// Rows whose prompt alone fills the context, so that nothing of them was scored.
    rows_skipped: usize,
    /// Rows that were cut at the context length.
    rows_cut: usize,
    tokens_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    kl_mean: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kl_p99: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top1_agreement: Option<f64>,
}

pub(crate) fn run(args: &EvalArgs) -> Result<()> {
    let rows = read_rows(args)?;
    let options = EngineOptions { logits_rows: LOGITS_ROWS, ..open::engine_options(&args.engine) };
    let mut engine = open::open(&args.model, options.clone())?;
    output::note(&open::banner(&engine));
    let mut reference = match &args.against {
        Some(path) => {
            let reference = open::open(path, options)?;
            same_text_side(&engine, &reference)?;
            Some(reference)
        }
        None => None,
    };
    let bar = row_progress(rows.len());
    let started = Instant::now();
    let mut divergence = Divergence::default();
    let (mut nll, mut tokens, mut skipped, mut cut, mut computed) = (0.0, 0, 0, 0, 0);
    for row in &rows {
        let (mut ids, from) = encode_row(&engine, row)?;
        cut += usize::from(ids.len() > engine.context());
        ids.truncate(engine.context());
        if ids.len() <= from {
            skipped += 1;
            continue;
        }
        let score = match &mut reference {
            Some(reference) => engine.score_against(reference, &ids, from, &mut divergence)?,
            None => engine.score(&ids, from)?,
        };
        nll += score.nll;
        tokens += score.tokens;
        computed += ids.len();
        bar.set_message(format!("{:.4} nats/token", nll / tokens as f64));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if tokens == 0 {
        bail!("{}: no row has a token to score within {} tokens", args.data.display(), engine.context());
    }
    let nll_per_token = nll / tokens as f64;
    let compared = reference.is_some();
    let report = EvalReport {
        nll_per_token,
        tokens,
        perplexity: nll_per_token.exp(),
        rows: rows.len(),
        rows_skipped: skipped,
        rows_cut: cut,
        tokens_per_s: computed as f64 / started.elapsed().as_secs_f64(),
        kl_mean: compared.then(|| divergence.mean()),
        kl_p99: compared.then(|| divergence.p99()),
        top1_agreement: compared.then(|| divergence.same_top1 as f64 / tokens as f64),
    };
    if args.json {
        return output::json(&report);
    }
    output::line(&format!(
        "{nll_per_token:.5} nats/token, perplexity {:.4}, over {tokens} tokens of {} rows ({skipped} skipped, {cut} cut)",
        report.perplexity, report.rows
    ))?;
    if let (Some(mean), Some(p99), Some(top1)) = (report.kl_mean, report.kl_p99, report.top1_agreement) {
        output::line(&format!(
            "KL mean {mean:.6}, 99 % below {p99:.6} nats; same likeliest token {:.2} %",
            top1 * 100.0
        ))?;
    }
    Ok(())
}

/// The prompt as rendered, the answer and its end-of-turn token; and where the answer begins.
fn encode_row(engine: &Engine, row: &Row) -> Result<(Vec<u32>, usize)> {
    let mut messages = Vec::new();
    messages.extend(row.system.as_deref().map(|system| Message::new("system", system)));
    messages.push(Message::new("user", row.user.as_str()));
    let mut ids = run::encode(engine, &messages, None)?;
    let from = ids.len();
    ids.extend(engine.tokenizer().encode_plain(&row.assistant)?);
    let end = engine.tokenizer().end_of_turn_id().context("the tokenizer names no end-of-turn token")?;
    ids.push(end);
    Ok((ids, from))
}

fn read_rows(args: &EvalArgs) -> Result<Vec<Row>> {
    let name = args.data.display();
    let file = File::open(&args.data).with_context(|| name.to_string())?;
    let mut reader = BufReader::new(file);
    let mut rows = Vec::new();
    let mut number = 0;
    while args.limit.is_none_or(|limit| rows.len() < limit) {
        let mut line = String::new();
        number += 1;
        let length = reader
            .by_ref()
            .take(LINE_LIMIT_BYTES)
            .read_line(&mut line)
            .with_context(|| format!("{name}: line {number}"))?;
        if length == 0 {
            break;
        }
        if length as u64 == LINE_LIMIT_BYTES {
            bail!("{name}: line {number} is longer than {LINE_LIMIT_BYTES} bytes");
        }
        if line.trim().is_empty() {
            continue;
        }
        let row = serde_json::from_str(&line).with_context(|| {
            format!("{name}: line {number}: expected an object with the texts user and assistant")
        })?;
        rows.push(row);
    }
    if rows.is_empty() {
        bail!("{name}: holds no rows");
    }
    Ok(rows)
}

/// Distributions can only be compared over the same tokens.
fn same_text_side(engine: &Engine, reference: &Engine) -> Result<()> {
    let (ours, theirs) = (engine.vault().header(), reference.vault().header());
    if engine.config().vocab_size != reference.config().vocab_size || ours.tokenizer != theirs.tokenizer {
        bail!(
            "{} and {} have different tokenizers; their predictions cannot be compared",
            engine.path().display(),
            reference.path().display()
        );
    }
    Ok(())
}

fn row_progress(rows: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(rows as u64), ProgressDrawTarget::stderr());
    let style =
        ProgressStyle::with_template("scoring {wide_bar:.cyan/blue} {pos}/{len} rows, {msg}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
