//! What a run reports about itself. Field names are stable.

use serde::Serialize;
use smoe_model::{Bucket, Instruments};

/// Times of one answer.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Timings {
    /// Reading the prompt, until the first logits.
    pub prefill_ms: f64,
    /// All tokens after the first.
    pub decode_ms: f64,
    /// Prompt tokens that were computed, per second.
    pub prefill_tokens_per_s: f64,
    /// Tokens after the first, per second.
    pub decode_tokens_per_s: f64,
    /// From the request to the first token.
    pub time_to_first_token_ms: f64,
}

/// Memory of a run in bytes.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MemoryReport {
    /// The ceiling.
    pub budget_bytes: u64,
    /// Allowance for the program itself.
    pub program_bytes: u64,
    /// Resident weights.
    pub resident_bytes: u64,
    /// KV cache.
    pub kv_bytes: u64,
    /// Buffers of the forward pass.
    pub scratch_bytes: u64,
    /// Expert cache.
    pub cache_bytes: u64,
    /// Largest resident set of the process so far.
    pub peak_rss_bytes: u64,
}

/// How experts are read.
#[derive(Debug, Clone, Default, Serialize)]
pub struct IoReport {
    /// The mode that is really in use.
    pub mode: String,
    /// Alignment of reads.
    pub alignment_bytes: u64,
    /// Reads in flight at most.
    pub depth: usize,
    /// Why it is not the first choice, where it is not.
    pub reason: Option<String>,
}

/// What was read and how close the run came to the machine's limits.
///
/// Figures that need a probe or a clock in the token loop are there only when instruments are on.
#[derive(Debug, Clone, Default, Serialize)]
pub struct InstrumentReport {
    /// Bytes read during prefill.
    pub prefill_bytes_read: u64,
    /// Bytes of the distinct experts that the prompt was sent to.
    pub prefill_distinct_expert_bytes: u64,
    /// Bytes read for each token after the prompt.
    pub decode_bytes_per_token: f64,
    /// Experts found in the cache during decode, as a share of those asked for.
    pub hit_rate: Option<f64>,
    /// Experts that two adjacent decoded tokens share, as a share of those of one.
    pub adjacent_overlap: Option<f64>,
    /// What the drive delivers through the same reads.
    pub drive_bandwidth_bytes_per_s: Option<f64>,
    /// What memory delivers to all threads together.
    pub memory_bandwidth_bytes_per_s: Option<f64>,
    /// Drive bandwidth over the bytes that a token misses.
    pub drive_limit_tokens_per_s: Option<f64>,
    /// Memory bandwidth over the weight bytes that a token touches.
    pub memory_limit_tokens_per_s: Option<f64>,
    /// Decode speed as a share of the smaller limit.
    pub share_of_limit: Option<f64>,
    /// Milliseconds of each decoded token by what they were spent on.
    pub ms_per_token: Option<MillisecondsPerToken>,
}

/// A decoded token's time by bucket.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct MillisecondsPerToken {
    /// Attention and other dense layers.
    pub attention: f64,
    /// Router and cache look-up.
    pub router: f64,
    /// Arithmetic of routed experts.
    pub experts: f64,
    /// Waiting for the drive.
    pub drive: f64,
    /// Final norm and LM head.
    pub head: f64,
    /// Sampling.
    pub sampling: f64,
    /// Anything else.
    pub other: f64,
}

impl MillisecondsPerToken {
    pub(crate) fn new(instruments: &Instruments, tokens: usize) -> Self {
        let each = |bucket| instruments.milliseconds(bucket) / tokens as f64;
        Self {
            attention: each(Bucket::Attention),
            router: each(Bucket::Router),
            experts: each(Bucket::Experts),
            drive: each(Bucket::Drive),
            head: each(Bucket::Head),
            sampling: each(Bucket::Sampling),
            other: each(Bucket::Other),
        }
    }
}
