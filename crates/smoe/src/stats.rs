//! Figures after an answer, and progress while a prompt is read.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use smoe_engine::{Engine, FinishReason, Generation, InstrumentReport};

use crate::output;

/// One line about an answer.
pub(crate) fn summary(engine: &Engine, generation: &Generation, prompt_tokens: usize) -> String {
    let timings = &generation.timings;
    let instrument = &generation.instrument;
    let new = prompt_tokens - generation.reused_tokens;
    let reused = match generation.reused_tokens {
        0 => String::new(),
        tokens => format!(" ({tokens} kept)"),
    };
    let ended = match generation.finish_reason {
        FinishReason::Stop => "",
        FinishReason::Length if prompt_tokens + generation.token_ids.len() >= engine.context() => {
            " · context full"
        }
        FinishReason::Length => " · token limit reached",
        FinishReason::Cancelled => " · stopped",
    };
    let hits = instrument.hit_rate.map_or(String::new(), |rate| format!(", {:.0} % hits", rate * 100.0));
    format!(
        "[prompt {}{reused}, {:.1} tok/s, {} read · answer {}, {:.1} tok/s, {}/token read{hits} · first token {:.2} s{ended}]",
        output::plural(new, "token"),
        timings.prefill_tokens_per_s,
        output::bytes(instrument.prefill_bytes_read),
        output::plural(generation.token_ids.len(), "token"),
        timings.decode_tokens_per_s,
        output::bytes(instrument.decode_bytes_per_token as u64),
        timings.time_to_first_token_ms / 1e3,
    )
}

/// The instrument panel, when it is on.
pub(crate) fn instruments(report: &InstrumentReport) -> Option<String> {
    let ms = report.ms_per_token?;
    let rate =
        |value: Option<f64>| value.map_or("-".into(), |bytes| format!("{}/s", output::bytes(bytes as u64)));
    let speed = |value: Option<f64>| value.map_or("-".into(), |tokens| format!("{tokens:.1} tok/s"));
    let percent = |value: Option<f64>| value.map_or("-".into(), |share| format!("{:.0} %", share * 100.0));
    let buckets = [
        ("attention and dense", ms.attention),
        ("router", ms.router),
        ("experts", ms.experts),
        ("waiting for the drive", ms.drive),
        ("LM head", ms.head),
        ("sampling", ms.sampling),
        ("other", ms.other),
    ];
    let total: f64 = buckets.iter().map(|(_, ms)| ms).sum();
    let mut rows: Vec<Vec<String>> = vec![vec!["per token".into(), format!("{total:.3} ms"), String::new()]];
    rows.extend(buckets.iter().map(|(name, ms)| {
        vec![
            (*name).to_owned(),
            format!("{ms:.3} ms"),
            format!("{:.0} %", ms * 100.0 / total.max(f64::MIN_POSITIVE)),
        ]
    }));
    rows.push(vec!["adjacent overlap".into(), percent(report.adjacent_overlap)]);
    rows.push(vec![
        "drive".into(),
        rate(report.drive_bandwidth_bytes_per_s),
        speed(report.drive_limit_tokens_per_s),
    ]);
    rows.push(vec![
        "memory".into(),
        rate(report.memory_bandwidth_bytes_per_s),
        speed(report.memory_limit_tokens_per_s),
    ]);
    rows.push(vec!["share of the physical limit".into(), percent(report.share_of_limit)]);
    Some(output::table(&rows))
}

/// A bar over prompt tokens, shown only for prompts that take a while.
#[derive(Default)]
pub(crate) struct PrefillProgress {
    started: Option<Instant>,
    bar: Option<ProgressBar>,
}

/// A prompt that is read within this time needs no bar.
const SHOW_AFTER_MS: u128 = 700;

impl PrefillProgress {
    pub(crate) fn update(&mut self, done: usize, total: usize) {
        let started = *self.started.get_or_insert_with(Instant::now);
        if done == total {
            if let Some(bar) = self.bar.take() {
                bar.finish_and_clear();
            }
        } else if self.bar.is_some() || started.elapsed().as_millis() > SHOW_AFTER_MS {
            let bar = self.bar.get_or_insert_with(|| {
                let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
                let style = ProgressStyle::with_template(
                    "reading the prompt {wide_bar:.cyan/blue} {pos}/{len} tokens, {per_sec}, {eta} left",
                );
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                bar
            });
            bar.set_position(done as u64);
        }
    }
}

/// Figures since the vault was opened.
pub(crate) fn session(engine: &Engine, answers: usize, tokens: usize) -> String {
    let counters = engine.counters();
    let asked = counters.hits + counters.misses;
    let memory = engine.memory_report();
    format!(
        "session: {}, {} · experts asked for {asked}, {:.0} % from the cache, {} read in {} reads, {} retried · \
         KV {} of {} tokens · peak memory {} of {}",
        output::plural(answers, "answer"),
        output::plural(tokens, "token"),
        if asked == 0 { 100.0 } else { counters.hits as f64 * 100.0 / asked as f64 },
        output::bytes(counters.bytes_read),
        counters.reads,
        counters.retries,
        engine.sequence().len(),
        engine.context(),
        output::bytes(memory.peak_rss_bytes),
        output::bytes(memory.budget_bytes),
    )
}
