//! All buffers of a forward pass, allocated once.

use smoe_stream::Pin;

use crate::config::{FeedForward, ModelConfig};
use crate::weights::{Q8_BLOCK, Q8Buffer};

/// Tokens whose router logits are computed together; reads for their experts start before the next group's router.
pub(crate) const ROUTER_GROUP: usize = 16;

/// Buffers for chunks of up to `tokens` positions.
pub(crate) struct Scratch {
    pub(crate) tokens: usize,
    pub(crate) logits_rows: usize,
    /// Residual stream, `tokens × hidden`.
    pub(crate) hidden: Vec<f32>,
    /// Normed input of a block, then its output, `tokens × hidden`.
    pub(crate) normed: Vec<f32>,
    pub(crate) queries: Vec<f32>,
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    /// Attention output, `tokens × heads × head_dim`.
    pub(crate) attended: Vec<f32>,
    /// Cosines and sines of each position.
    pub(crate) angles: Vec<f32>,
    /// The input of a block in 8 bits; wide enough for every matrix's columns.
    pub(crate) q8: Q8Buffer,
    pub(crate) ffn: FfnScratch,
    /// `logits_rows × vocabulary`.
    pub(crate) logits: Vec<f32>,
}

/// Buffers of feed-forward blocks, dense and sparse.
pub(crate) struct FfnScratch {
    /// Gate and up outputs, `tokens × 2 × intermediate`.
    pub(crate) gate_up: Vec<f32>,
    /// `silu(gate) * up`, `tokens × intermediate`.
    pub(crate) activated: Vec<f32>,
    pub(crate) activated_q8: Q8Buffer,
    /// Inputs of one expert's tokens, `tokens × hidden`.
    pub(crate) gathered: Vec<f32>,
    pub(crate) gathered_q8: Q8Buffer,
    /// Down outputs of one expert, `tokens × hidden`.
    pub(crate) down: Vec<f32>,
    /// Down outputs by token and router rank, `tokens × top_k × hidden`.
    pub(crate) by_rank: Vec<f32>,
    pub(crate) routing: Routing,
}

/// The choice of experts for a chunk.
pub(crate) struct Routing {
    /// `ROUTER_GROUP × experts`.
    pub(crate) logits: Vec<f32>,
    /// Chosen experts by token and rank, `tokens × top_k`.
    pub(crate) experts: Vec<u32>,
    /// Their weights.
    pub(crate) weights: Vec<f32>,
    /// Start of each expert's run in `pairs`; one more than there are experts.
    pub(crate) starts: Vec<u32>,
    /// Indices `token × top_k + rank`, grouped by expert.
    pub(crate) pairs: Vec<u32>,
    /// Which experts this chunk has chosen so far.
    pub(crate) seen: Vec<bool>,
    /// Experts that were not in the cache, in the order of their first choice.
    pub(crate) missing: Vec<u32>,
    /// Experts that were.
    pub(crate) hits: Vec<Pin>,
}

/// The lengths that decide how much memory a chunk takes.
#[derive(Clone, Copy)]
struct Widths {
    hidden: usize,
    q: usize,
    kv: usize,
    head_dim: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    vocabulary: usize,
    q8: usize,
}

impl Widths {
    fn of(config: &ModelConfig) -> Self {
        let attention = config.attention;
        let width = |layer: &FeedForward| match *layer {
            FeedForward::Dense { intermediate } | FeedForward::Sparse { intermediate } => intermediate,
        };
        let sparse = config.sparse_layers() > 0;
        let q = attention.heads * attention.head_dim;
        Self {
            hidden: config.hidden_size,
            q,
            kv: attention.kv_heads * attention.head_dim,
            head_dim: attention.head_dim,
            intermediate: config.layers.iter().map(width).max().unwrap_or(0),
            experts: if sparse { config.router.experts } else { 0 },
            top_k: if sparse { config.router.top_k } else { 0 },
            vocabulary: config.vocab_size,
            q8: config.hidden_size.max(q).next_multiple_of(Q8_BLOCK),
        }
    }
}

impl Scratch {
    /// Bytes that [`Scratch::new`] allocates.
    pub(crate) fn bytes_needed(config: &ModelConfig, tokens: usize, logits_rows: usize) -> u64 {
        let w = Widths::of(config);
        let floats_per_token = 4 * w.hidden
            + 2 * w.q
            + 2 * w.kv
            + w.head_dim
            + 3 * w.intermediate
            + w.top_k * w.hidden
            + 3 * w.top_k;
        let q8_per_token = Q8Buffer::bytes_needed(w.q8)
            + Q8Buffer::bytes_needed(w.intermediate.next_multiple_of(Q8_BLOCK))
            + Q8Buffer::bytes_needed(w.hidden.next_multiple_of(Q8_BLOCK));
        let fixed = ROUTER_GROUP * w.experts * 4 + w.experts * (4 + 1 + 4 + size_of::<Pin>());
        tokens as u64 * (4 * floats_per_token + q8_per_token) as u64
            + fixed as u64
            + logits_rows as u64 * w.vocabulary as u64 * 4
    }

    pub(crate) fn new(config: &ModelConfig, tokens: usize, logits_rows: usize) -> Self {
        let w = Widths::of(config);
        let floats = |columns: usize| vec![0.0f32; tokens * columns];
        let q8 = |columns: usize| Q8Buffer::with_capacity(tokens * columns.next_multiple_of(Q8_BLOCK));
        Self {
            tokens,
            logits_rows,
            hidden: floats(w.hidden),
            normed: floats(w.hidden),
            queries: floats(w.q),
            keys: floats(w.kv),
            values: floats(w.kv),
            attended: floats(w.q),
            angles: floats(w.head_dim),
            q8: q8(w.q8),
            ffn: FfnScratch {
                gate_up: floats(2 * w.intermediate),
                activated: floats(w.intermediate),
                activated_q8: q8(w.intermediate),
                gathered: floats(w.hidden),
                gathered_q8: q8(w.hidden),
                down: floats(w.hidden),
                by_rank: floats(w.top_k * w.hidden),
                routing: Routing {
                    logits: vec![0.0; ROUTER_GROUP * w.experts],
                    experts: vec![0; tokens * w.top_k],
                    weights: floats(w.top_k),
                    starts: vec![0; w.experts + 1],
                    pairs: vec![0; tokens * w.top_k],
                    seen: vec![false; w.experts],
                    missing: Vec::with_capacity(w.experts),
                    hits: Vec::with_capacity(w.experts),
                },
            },
            logits: vec![0.0; logits_rows * w.vocabulary],
        }
    }
}
