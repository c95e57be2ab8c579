//! Prefill and decode of one request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::Serialize;
use smoe_model::{Bucket, ModelError};
use smoe_stream::StreamCounters;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::report::{InstrumentReport, MillisecondsPerToken, Timings};
use crate::sampler::{Sampler, SamplingOptions};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Whether end-of-turn tokens are treated as any other.
    pub ignore_eos: bool,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-turn token.
    Stop,
    /// The number of tokens asked for, or the end of the context.
    Length,
    /// The caller asked to stop.
    Cancelled,
}

/// What happens while an answer is made.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// Prompt tokens computed so far.
    Prefill {
        /// So far.
        done: usize,
        /// To compute in all.
        total: usize,
        /// Found in the KV cache.
        reused: usize,
    },
    /// A token of the answer; the last one may be an end-of-turn token.
    Token(u32),
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Its tokens, with the end-of-turn token if one ended it.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Prompt tokens that the KV cache held already.
    pub reused_tokens: usize,
    /// Times.
    pub timings: Timings,
    /// Reads.
    pub instrument: InstrumentReport,
}

impl Engine {
    /// Answers a prompt.
    ///
    /// Positions that the sequence has in common with the prompt are not computed again.
    ///
    /// # Errors
    /// [`EngineError::ContextExceeded`] before anything is computed; a read or arithmetic that failed.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        cancel: Option<&AtomicBool>,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Generation, EngineError> {
        let started = Instant::now();
        let context = self.context();
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() > context {
            let model = self.config().context_length;
            return Err(EngineError::ContextExceeded { prompt: prompt.len(), context, model });
        }
        let vocab_size = self.config().vocab_size;
        if let Some(&id) = prompt.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(ModelError::TokenId { id, vocab_size }.into());
        }
        let mut sampler = Sampler::new(options.sampling, vocab_size)?;
        let room = options.max_tokens.min(context - prompt.len());
        let mut answer = Answer::new(prompt, room, self.tokenizer().stop_ids(), options.ignore_eos);
        self.routing.start();

        let before_prefill = self.counters();
        let prefill = self.prefill(prompt, &mut sampler, &mut answer, cancel, on_event)?;
        let prefill_ms = milliseconds(started);
        let before_decode = self.counters();
        let distinct = self.routing.distinct_bytes();

        let decode_started = Instant::now();
        self.state.instruments.enable(self.options().instrument);
        if !prefill.cancelled {
            self.decode(&mut sampler, &mut answer, cancel, on_event)?;
        }
        let decode_ms = milliseconds(decode_started);
        let decoded = answer.tokens.len() - prompt.len();
        let steps = decoded.saturating_sub(1);
        let timings = Timings {
            prefill_ms,
            decode_ms,
            prefill_tokens_per_s: rate(prompt.len() - prefill.reused, prefill_ms),
            decode_tokens_per_s: rate(steps, decode_ms),
            time_to_first_token_ms: prefill_ms,
        };
        let mut instrument = InstrumentReport {
            prefill_bytes_read: before_decode.bytes_read - before_prefill.bytes_read,
            prefill_distinct_expert_bytes: distinct,
            ..InstrumentReport::default()
        };
        self.decode_report(&mut instrument, &before_decode, steps, &timings);
        Ok(Generation {
            token_ids: answer.tokens.split_off(prompt.len()),
            finish_reason: answer.finish.unwrap_or(FinishReason::Length),
            reused_tokens: prefill.reused,
            timings,
            instrument,
        })
    }

    /// Computes what of the prompt is new and samples the first token.
    fn prefill(
        &mut self,
        prompt: &[u32],
        sampler: &mut Sampler,
        answer: &mut Answer,
        cancel: Option<&AtomicBool>,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Prefill, EngineError> {
        let common = self.sequence.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // The last position is always computed: its logits are wanted.
        let reused = common.min(prompt.len() - 1);
        self.rewind(reused);
        let new = &prompt[reused..];
        let (total, chunk) = (new.len(), self.plan().chunk);
        let mut done = 0;
        on_event(Event::Prefill { done, total, reused });
        for tokens in new.chunks(chunk) {
            let last = done + tokens.len() == total;
            let logits_from = if last && answer.has_room() { tokens.len() - 1 } else { tokens.len() };
            let result = self.advance(tokens, logits_from, cancel, &mut |_, logits| {
                answer.push(sampler.sample(logits, &answer.tokens));
                Ok(())
            });
            match result {
                Ok(()) => {}
                Err(EngineError::Model(ModelError::Cancelled)) => {
                    answer.finish = Some(FinishReason::Cancelled);
                    return Ok(Prefill { reused, cancelled: true });
                }
                Err(error) => return Err(error),
            }
            done += tokens.len();
            on_event(Event::Prefill { done, total, reused });
        }
        if let Some(token) = answer.first() {
            on_event(Event::Token(token));
        }
        Ok(Prefill { reused, cancelled: false })
    }

    /// Generates until the answer is finished.
    fn decode(
        &mut self,
        sampler: &mut Sampler,
        answer: &mut Answer,
        cancel: Option<&AtomicBool>,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<(), EngineError> {
        while answer.finish.is_none() {
            let Some(&last) = answer.tokens.last() else { break };
            let result = self.advance(&[last], 0, cancel, &mut |_, logits| {
                answer.push(sampler.sample(logits, &answer.tokens));
                Ok(())
            });
            self.state.instruments.lap(Bucket::Sampling);
            match result {
                Ok(()) => {}
                Err(EngineError::Model(ModelError::Cancelled)) => {
                    answer.finish = Some(FinishReason::Cancelled);
                    break;
                }
                Err(error) => return Err(error),
            }
            if let Some(&token) = answer.tokens.last() {
                on_event(Event::Token(token));
            }
            self.state.instruments.lap(Bucket::Other);
            if cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) && answer.finish.is_none() {
                answer.finish = Some(FinishReason::Cancelled);
            }
        }
        Ok(())
    }

    /// Fills in what is known about the decoded tokens.
    fn decode_report(
        &self,
        report: &mut InstrumentReport,
        before: &StreamCounters,
        steps: usize,
        timings: &Timings,
    ) {
        if steps == 0 {
            return;
        }
        let now = self.counters();
        let (hits, misses) = (now.hits - before.hits, now.misses - before.misses);
        report.decode_bytes_per_token = (now.bytes_read - before.bytes_read) as f64 / steps as f64;
        report.hit_rate = (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64);
        report.adjacent_overlap = self.routing.adjacent_overlap();
        if !self.options().instrument {
            return;
        }
        report.ms_per_token = Some(MillisecondsPerToken::new(&self.state.instruments, steps));
        let Some(limits) = self.limits else { return };
        report.drive_bandwidth_bytes_per_s = limits.drive_bytes_per_s;
        report.memory_bandwidth_bytes_per_s = Some(limits.memory_bytes_per_s);
        let memory_limit = limits.memory_bytes_per_s / self.bytes_touched_per_token() as f64;
        let drive_limit = limits
            .drive_bytes_per_s
            .filter(|_| report.decode_bytes_per_token > 0.0)
            .map(|bandwidth| bandwidth / report.decode_bytes_per_token);
        report.memory_limit_tokens_per_s = Some(memory_limit);
        report.drive_limit_tokens_per_s = drive_limit;
        let limit = drive_limit.map_or(memory_limit, |drive| drive.min(memory_limit));
        report.share_of_limit = Some(timings.decode_tokens_per_s / limit);
    }
}

struct Prefill {
    reused: usize,
    cancelled: bool,
}

/// An answer in the making: prompt and tokens, allocated whole.
struct Answer {
    tokens: Vec<u32>,
    prompt: usize,
    end: usize,
    stops: Vec<u32>,
    finish: Option<FinishReason>,
}

impl Answer {
    fn new(prompt: &[u32], room: usize, stops: &[u32], ignore_eos: bool) -> Self {
        let mut tokens = Vec::with_capacity(prompt.len() + room);
        tokens.extend_from_slice(prompt);
        let stops = if ignore_eos { Vec::new() } else { stops.to_vec() };
        let finish = (room == 0).then_some(FinishReason::Length);
        Self { tokens, prompt: prompt.len(), end: prompt.len() + room, stops, finish }
    }

    fn has_room(&self) -> bool {
        self.finish.is_none()
    }

    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if self.stops.contains(&token) {
            self.finish = Some(FinishReason::Stop);
        } else if self.tokens.len() == self.end {
            self.finish = Some(FinishReason::Length);
        }
    }

    fn first(&self) -> Option<u32> {
        self.tokens.get(self.prompt).copied()
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn rate(tokens: usize, ms: f64) -> f64 {
    if tokens == 0 || ms <= 0.0 { 0.0 } else { tokens as f64 * 1e3 / ms }
}
