//! From token ids to logits.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use smoe_quant::{QuantError, dequantize_row};
use smoe_stream::ExpertStream;

use crate::attention::attend;
use crate::compute::Compute;
use crate::config::{FeedForward, HeadTying, ModelConfig};
use crate::error::{ConfigError, ModelError};
use crate::instruments::{Bucket, Instruments};
use crate::kv_cache::{KvCache, KvFormat};
use crate::moe::{MoeContext, SparseLayer};
use crate::ops;
use crate::rope::{Rope, rotate};
use crate::scratch::{FfnScratch, Scratch};
use crate::weights::{Matrix, Q8Buffer, RecordLayout, ResidentWeights};

/// The experts of one sparse layer as a vault describes them.
#[derive(Debug, Clone, Copy)]
pub struct StreamedLayer {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Number of records.
    pub experts: usize,
    /// Bytes of a record.
    pub record_bytes: u64,
    /// What lies where in it.
    pub record: RecordLayout,
}

/// A model whose dense backbone is in memory and whose experts are streamed.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    weights: ResidentWeights,
    embedding: Matrix,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: Matrix,
    rope: Rope,
}

#[derive(Debug)]
struct Layer {
    input_norm: Vec<f32>,
    query: Projection,
    key: Projection,
    value: Projection,
    output: Projection,
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
    post_attention_norm: Vec<f32>,
    feed_forward: LayerFeedForward,
}

#[derive(Debug)]
struct Projection {
    matrix: Matrix,
    bias: Option<Vec<f32>>,
}

#[derive(Debug)]
enum LayerFeedForward {
    Dense { gate: Matrix, up: Matrix, down: Matrix },
    Sparse(SparseLayer),
}

/// How large a [`ModelState`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateOptions {
    /// Capacity of the KV cache in positions.
    pub context: usize,
    /// Its precision.
    pub kv: KvFormat,
    /// Largest number of tokens in one [`Model::forward`].
    pub chunk: usize,
    /// Positions whose logits are computed together; 1 unless logits of many positions are wanted.
    pub logits_rows: usize,
}

/// What changes while a model runs: KV cache and buffers, all allocated at the start.
pub struct ModelState {
    /// Keys and values.
    pub kv: KvCache,
    /// Where the time goes.
    pub instruments: Instruments,
    scratch: Scratch,
    routes: Routes,
}

/// The experts that the last chunk was sent to.
#[derive(Debug)]
struct Routes {
    /// By sparse layer, token and rank.
    experts: Vec<u32>,
    /// Tokens of the last chunk.
    tokens: usize,
    capacity: usize,
    top_k: usize,
}

/// The operands of one forward pass.
pub struct Run<'a> {
    /// Kernels and threads.
    pub compute: &'a Compute,
    /// Where experts come from.
    pub stream: &'a mut ExpertStream,
    /// Set by whoever wants the pass to end; looked at before each layer.
    pub cancel: Option<&'a AtomicBool>,
}

/// A function that receives `(index in the chunk, logits)`.
pub type OnLogits<'a> = &'a mut dyn FnMut(usize, &mut [f32]) -> Result<(), ModelError>;

impl Model {
    /// Joins a configuration, the resident weights and the description of the streamed layers.
    ///
    /// # Errors
    /// A tensor or a layer is missing or has another shape than the configuration says.
    pub fn new(
        config: ModelConfig,
        weights: ResidentWeights,
        streamed: &[StreamedLayer],
    ) -> Result<Self, ModelError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = weights.matrix("model.embed_tokens.weight", vocab, hidden)?;
        let tied = match config.head {
            HeadTying::Tied => true,
            HeadTying::Untied => false,
            HeadTying::ByTensors => !weights.has("lm_head.weight"),
        };
        let head = if tied { embedding } else { weights.matrix("lm_head.weight", vocab, hidden)? };
        let final_norm = weights.vector("model.norm.weight", hidden)?;
        let mut streamed = streamed.iter().enumerate();
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(layer, &kind)| Layer::new(&config, &weights, layer, kind, &mut streamed))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some((_, extra)) = streamed.next() {
            return Err(layer_mismatch(
                extra.layer,
                "the vault holds experts, the configuration asks for none",
            ));
        }
        let rope = Rope::new(&config.rope, config.attention.head_dim);
        Ok(Self { config, weights, embedding, layers, final_norm, head, rope })
    }

    /// The architecture.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the resident weights.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// Bytes of a state's buffers without its KV cache.
    #[must_use]
    pub fn scratch_bytes(config: &ModelConfig, options: &StateOptions) -> u64 {
        Scratch::bytes_needed(config, options.chunk, options.logits_rows)
            + (config.sparse_layers() * options.chunk * config.router.top_k * size_of::<u32>()) as u64
    }

    /// Allocates a state.
    ///
    /// # Errors
    /// The KV cache's memory could not be had or its format does not fit the heads.
    pub fn state(&self, options: &StateOptions) -> Result<ModelState, ModelError> {
        let top_k = self.config.router.top_k;
        Ok(ModelState {
            kv: KvCache::new(&self.config, options.kv, options.context)?,
            instruments: Instruments::default(),
            scratch: Scratch::new(&self.config, options.chunk, options.logits_rows),
            routes: Routes {
                experts: vec![0; self.config.sparse_layers() * options.chunk * top_k],
                tokens: 0,
                capacity: options.chunk,
                top_k,
            },
        })
    }

    /// Runs `tokens` at positions `position..`, layer by layer, all tokens together.
    ///
    /// Logits (one row of the vocabulary each) are computed for the chunk's tokens from index `logits_from` on and
    /// handed to `on_logits` in order; other positions skip the head. Afterwards the KV cache holds the new positions.
    /// The same tokens at the same positions give the same bits however they are cut into chunks.
    ///
    /// # Errors
    /// [`ModelError`]; the positions from `position` on must then be run again, and [`ExpertStream::abandon`] called.
    pub fn forward(
        &self,
        run: &mut Run<'_>,
        state: &mut ModelState,
        tokens: &[u32],
        position: usize,
        logits_from: usize,
        on_logits: OnLogits<'_>,
    ) -> Result<(), ModelError> {
        let end = position + tokens.len();
        if end > state.kv.context() || tokens.len() > state.scratch.tokens {
            return Err(ModelError::ContextFull { needed: end, context: state.kv.context() });
        }
        self.embed(state, tokens, position)?;
        state.routes.tokens = tokens.len();
        for (index, layer) in self.layers.iter().enumerate() {
            if run.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
                return Err(ModelError::Cancelled);
            }
            let positions = position..end;
            self.attention(run, state, layer, index, positions.clone())
                .map_err(|source| kernel_error(index, source))?;
            self.feed_forward(run, state, layer, index, positions)?;
        }
        self.logits(run, state, position, logits_from..tokens.len(), on_logits)
    }

    /// Embedding rows and rotary angles of all tokens.
    fn embed(&self, state: &mut ModelState, tokens: &[u32], position: usize) -> Result<(), ModelError> {
        let vocab_size = self.config.vocab_size;
        let table = self.weights.view(&self.embedding).map_err(|source| kernel_error("embedding", source))?;
        let scratch = &mut state.scratch;
        for (&id, row) in tokens.iter().zip(scratch.hidden.chunks_exact_mut(self.config.hidden_size)) {
            if id as usize >= vocab_size {
                return Err(ModelError::TokenId { id, vocab_size });
            }
            dequantize_row(self.embedding.format, table.row(id as usize), row)
                .map_err(|source| kernel_error("embedding", source))?;
        }
        let angles = scratch.angles.chunks_exact_mut(2 * self.rope.pairs());
        for (index, angles) in angles.take(tokens.len()).enumerate() {
            self.rope.angles(position + index, angles);
        }
        Ok(())
    }

    /// Attention with its norm and residual for all tokens.
    fn attention(
        &self,
        run: &Run<'_>,
        state: &mut ModelState,
        layer: &Layer,
        index: usize,
        positions: Range<usize>,
    ) -> Result<(), QuantError> {
        let ModelState { kv, instruments, scratch, .. } = state;
        let Scratch { hidden, normed, queries, keys, values, attended, angles, q8, .. } = scratch;
        let compute = run.compute;
        let tokens = positions.len();
        let config = &self.config.attention;
        let (width, head_dim) = (self.config.hidden_size, config.head_dim);
        let (q_width, kv_width) = (config.heads * head_dim, config.kv_heads * head_dim);
        let hidden = &mut hidden[..tokens * width];
        let normed = &mut normed[..tokens * width];
        let (queries, attended) = (&mut queries[..tokens * q_width], &mut attended[..tokens * q_width]);
        let (keys, values) = (&mut keys[..tokens * kv_width], &mut values[..tokens * kv_width]);
        let angles = &angles[..tokens * head_dim];

        self.norm(compute, hidden, &layer.input_norm, normed);
        q8.fill(normed, &[layer.query.matrix.format, layer.key.matrix.format, layer.value.matrix.format]);
        self.project(compute, &layer.query, normed, q8, tokens, queries)?;
        self.project(compute, &layer.key, normed, q8, tokens, keys)?;
        self.project(compute, &layer.value, normed, q8, tokens, values)?;
        for (rows, width, norm) in
            [(&mut *queries, q_width, &layer.query_norm), (&mut *keys, kv_width, &layer.key_norm)]
        {
            compute.pool.for_each_chunk(rows, width, |token, row| {
                for head in row.chunks_exact_mut(head_dim) {
                    ops::rms_norm_in_place(head, norm, self.config.rms_norm_eps);
                    rotate(head, &angles[token * head_dim..(token + 1) * head_dim]);
                }
            });
        }
        let rows = keys.chunks_exact(kv_width).zip(values.chunks_exact(kv_width));
        for (position, (keys, values)) in positions.clone().zip(rows) {
            kv.store(index, position, keys, values)?;
        }
        let group_width = config.heads / config.kv_heads * head_dim;
        compute.pool.for_each_chunk(attended, group_width, |group, out| {
            let (token, kv_head) = (group / config.kv_heads, group % config.kv_heads);
            let queries = &queries[group * group_width..(group + 1) * group_width];
            attend(compute.kernels, config, kv.head(index, kv_head), positions.start + token, queries, out);
        });
        q8.fill(attended, &[layer.output.matrix.format]);
        self.project(compute, &layer.output, attended, q8, tokens, normed)?;
        ops::add(hidden, normed);
        instruments.lap(Bucket::Attention);
        Ok(())
    }

    /// The feed-forward block with its norm and residual for all tokens.
    fn feed_forward(
        &self,
        run: &mut Run<'_>,
        state: &mut ModelState,
        layer: &Layer,
        index: usize,
        positions: Range<usize>,
    ) -> Result<(), ModelError> {
        let ModelState { instruments, scratch, routes, .. } = state;
        let Scratch { hidden, normed, q8, ffn, .. } = scratch;
        let width = self.config.hidden_size;
        let tokens = positions.len();
        let hidden = &mut hidden[..tokens * width];
        let normed = &mut normed[..tokens * width];
        self.norm(run.compute, hidden, &layer.post_attention_norm, normed);
        match &layer.feed_forward {
            LayerFeedForward::Dense { gate, up, down } => {
                self.dense(run.compute, [gate, up, down], normed, q8, ffn)
                    .map_err(|source| kernel_error(index, source))?;
                ops::add(hidden, normed);
                instruments.lap(Bucket::Attention);
            }
            LayerFeedForward::Sparse(sparse) => {
                instruments.lap(Bucket::Attention);
                let mut context = MoeContext {
                    compute: run.compute,
                    weights: &self.weights,
                    router: &self.config.router,
                    stream: run.stream,
                    instruments,
                    position: positions.start,
                };
                sparse.forward(&mut context, normed, q8, ffn)?;
                ops::add(hidden, normed);
                routes.record(sparse.stream_layer as usize, &ffn.routing.experts[..tokens * routes.top_k]);
            }
        }
        Ok(())
    }

    /// A dense SwiGLU block; `normed` is replaced by its output.
    fn dense(
        &self,
        compute: &Compute,
        [gate, up, down]: [&Matrix; 3],
        normed: &mut [f32],
        q8: &mut Q8Buffer,
        scratch: &mut FfnScratch,
    ) -> Result<(), QuantError> {
        let FfnScratch { gate_up, activated, activated_q8, .. } = scratch;
        let tokens = normed.len() / self.config.hidden_size;
        let length = tokens * gate.rows;
        let (gates, ups) = gate_up.split_at_mut(length);
        let (ups, activated) = (&mut ups[..length], &mut activated[..length]);
        q8.fill(normed, &[gate.format, up.format]);
        for (matrix, out) in [(gate, &mut *gates), (up, &mut *ups)] {
            compute.matmul(&self.weights.view(matrix)?, &q8.input(matrix.format, normed), tokens, out)?;
        }
        compute.pool.for_each_chunk(activated, gate.rows, |token, out| {
            let span = token * gate.rows..(token + 1) * gate.rows;
            ops::silu_mul(&gates[span.clone()], &ups[span], out);
        });
        activated_q8.fill(activated, &[down.format]);
        compute.matmul(&self.weights.view(down)?, &activated_q8.input(down.format, activated), tokens, normed)
    }

    /// Final norm and head for some of the chunk's tokens.
    fn logits(
        &self,
        run: &Run<'_>,
        state: &mut ModelState,
        position: usize,
        wanted: Range<usize>,
        on_logits: OnLogits<'_>,
    ) -> Result<(), ModelError> {
        let ModelState { instruments, scratch, .. } = state;
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let head = self.weights.view(&self.head).map_err(|source| kernel_error("output", source))?;
        for first in wanted.clone().step_by(scratch.logits_rows) {
            let tokens = first..wanted.end.min(first + scratch.logits_rows);
            let rows = &scratch.hidden[tokens.start * hidden..tokens.end * hidden];
            let normed = &mut scratch.normed[..rows.len()];
            self.norm(run.compute, rows, &self.final_norm, normed);
            scratch.q8.fill(normed, &[self.head.format]);
            let input = scratch.q8.input(self.head.format, normed);
            let logits = &mut scratch.logits[..tokens.len() * vocab];
            run.compute
                .matmul(&head, &input, tokens.len(), logits)
                .map_err(|source| kernel_error("output", source))?;
            instruments.lap(Bucket::Head);
            for (token, logits) in tokens.zip(logits.chunks_exact_mut(vocab)) {
                if !ops::all_finite(logits) {
                    return Err(ModelError::NonFinite { what: "logits".into(), position: position + token });
                }
                on_logits(token, logits)?;
            }
        }
        Ok(())
    }

    fn norm(&self, compute: &Compute, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let width = self.config.hidden_size;
        compute.pool.for_each_chunk(out, width, |token, out| {
            ops::rms_norm(&x[token * width..(token + 1) * width], weight, self.config.rms_norm_eps, out);
        });
    }

    fn project(
        &self,
        compute: &Compute,
        projection: &Projection,
        x: &[f32],
        q8: &Q8Buffer,
        tokens: usize,
        out: &mut [f32],
    ) -> Result<(), QuantError> {
        let matrix = &projection.matrix;
        compute.matmul(&self.weights.view(matrix)?, &q8.input(matrix.format, x), tokens, out)?;
        if let Some(bias) = &projection.bias {
            for row in out.chunks_exact_mut(matrix.rows) {
                ops::add(row, bias);
            }
        }
        Ok(())
    }
}

impl ModelState {
    /// Experts that a token of the last chunk was sent to in a sparse layer (counted among sparse layers), by rank.
    #[must_use]
    pub fn chosen_experts(&self, sparse_layer: usize, token: usize) -> &[u32] {
        let Routes { experts, tokens, capacity, top_k } = &self.routes;
        debug_assert!(token < *tokens);
        &experts[(sparse_layer * capacity + token) * top_k..][..*top_k]
    }
}

impl Routes {
    fn record(&mut self, sparse_layer: usize, experts: &[u32]) {
        self.experts[sparse_layer * self.capacity * self.top_k..][..experts.len()].copy_from_slice(experts);
    }
}

impl Layer {
    fn new<'a>(
        config: &ModelConfig,
        weights: &ResidentWeights,
        layer: usize,
        kind: FeedForward,
        streamed: &mut impl Iterator<Item = (usize, &'a StreamedLayer)>,
    ) -> Result<Self, ModelError> {
        let attention = &config.attention;
        let (hidden, head_dim) = (config.hidden_size, attention.head_dim);
        let (q_width, kv_width) = (attention.heads * head_dim, attention.kv_heads * head_dim);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let projection = |part: &str, rows, columns| -> Result<Projection, ModelError> {
            let matrix = weights.matrix(&name(&format!("self_attn.{part}.weight")), rows, columns)?;
            let bias = match attention.bias {
                true => Some(weights.vector(&name(&format!("self_attn.{part}.bias")), rows)?),
                false => None,
            };
            Ok(Projection { matrix, bias })
        };
        let feed_forward = match kind {
            FeedForward::Dense { intermediate } => {
                let matrix = |part: &str, rows, columns| {
                    weights.matrix(&name(&format!("mlp.{part}_proj.weight")), rows, columns)
                };
                LayerFeedForward::Dense {
                    gate: matrix("gate", intermediate, hidden)?,
                    up: matrix("up", intermediate, hidden)?,
                    down: matrix("down", hidden, intermediate)?,
                }
            }
            FeedForward::Sparse { intermediate } => {
                let router = weights.matrix(&name("mlp.gate.weight"), config.router.experts, hidden)?;
                if router.format.uses_q8_activations() {
                    return Err(layer_mismatch(
                        layer,
                        &format!("the router is in {}; it must be exact", router.format),
                    ));
                }
                let (stream_layer, found) = streamed
                    .next()
                    .filter(|(_, found)| found.layer == layer && found.experts == config.router.experts)
                    .ok_or_else(|| {
                        layer_mismatch(
                            layer,
                            &format!("the vault lacks its {} experts", config.router.experts),
                        )
                    })?;
                let record = found.record;
                record
                    .check(intermediate, hidden, found.record_bytes)
                    .map_err(|reason| layer_mismatch(layer, &format!("expert record: {reason}")))?;
                LayerFeedForward::Sparse(SparseLayer {
                    layer,
                    stream_layer: stream_layer as u32,
                    router,
                    record,
                    hidden,
                    intermediate,
                    top_k: config.router.top_k,
                })
            }
        };
        Ok(Self {
            input_norm: weights.vector(&name("input_layernorm.weight"), hidden)?,
            query: projection("q_proj", q_width, hidden)?,
            key: projection("k_proj", kv_width, hidden)?,
            value: projection("v_proj", kv_width, hidden)?,
            output: projection("o_proj", hidden, q_width)?,
            query_norm: weights.vector(&name("self_attn.q_norm.weight"), head_dim)?,
            key_norm: weights.vector(&name("self_attn.k_norm.weight"), head_dim)?,
            post_attention_norm: weights.vector(&name("post_attention_layernorm.weight"), hidden)?,
            feed_forward,
        })
    }
}

fn layer_mismatch(layer: usize, reason: &str) -> ModelError {
    ConfigError::Contradiction(format!("layer {layer}: {reason}")).into()
}

fn kernel_error(layer: impl ToString, source: QuantError) -> ModelError {
    ModelError::Kernel { layer: layer.to_string(), source }
}
