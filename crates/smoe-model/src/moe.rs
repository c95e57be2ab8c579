//! A sparse layer: the router chooses, the cache is asked, reads and arithmetic overlap.

use smoe_quant::{BlockFormat, QuantError};
use smoe_stream::{ExpertId, ExpertStream, Pin, Request};

use crate::compute::Compute;
use crate::config::RouterConfig;
use crate::error::ModelError;
use crate::instruments::{Bucket, Instruments};
use crate::ops;
use crate::scratch::{FfnScratch, ROUTER_GROUP, Routing};
use crate::weights::{Matrix, Q8_BLOCK, Q8Buffer, RecordLayout, ResidentWeights};

/// One sparse layer's handles.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SparseLayer {
    /// Index of the layer in the model, for messages.
    pub(crate) layer: usize,
    /// Index of the layer among those whose experts are streamed.
    pub(crate) stream_layer: u32,
    pub(crate) router: Matrix,
    pub(crate) record: RecordLayout,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) top_k: usize,
}

/// What a sparse layer works with.
pub(crate) struct MoeContext<'a> {
    pub(crate) compute: &'a Compute,
    pub(crate) weights: &'a ResidentWeights,
    pub(crate) router: &'a RouterConfig,
    pub(crate) stream: &'a mut ExpertStream,
    pub(crate) instruments: &'a mut Instruments,
    /// Position of the chunk's first token, for messages.
    pub(crate) position: usize,
}

impl SparseLayer {
    /// Runs the layer for `tokens` positions: `normed` (`tokens × hidden`) is replaced by the weighted sum of the
    /// experts' outputs, in router-rank order whatever order they were computed in.
    ///
    /// `q8` holds nothing on entry; it has room for `normed` in 8 bits.
    pub(crate) fn forward(
        &self,
        context: &mut MoeContext<'_>,
        normed: &mut [f32],
        q8: &mut Q8Buffer,
        scratch: &mut FfnScratch,
    ) -> Result<(), ModelError> {
        let (hidden, top_k) = (self.hidden, context.router.top_k);
        let tokens = normed.len() / hidden;
        self.choose(context, normed, &mut scratch.routing, tokens)?;
        scratch.routing.group_by_expert(tokens * top_k);
        q8.fill(normed, &[self.record.gate.format, self.record.up.format]);
        context.instruments.lap(Bucket::Router);
        self.compute_chosen(context, normed, q8, scratch)?;
        let (by_rank, weights) = (&scratch.by_rank, &scratch.routing.weights);
        context.compute.pool.for_each_chunk(normed, hidden, |token, out| {
            out.fill(0.0);
            for pair in token * top_k..(token + 1) * top_k {
                ops::add_scaled(out, &by_rank[pair * hidden..(pair + 1) * hidden], weights[pair]);
            }
        });
        context.instruments.lap(Bucket::Experts);
        Ok(())
    }

    /// Routes all tokens, in groups, and asks the cache for each group's experts before the next group is routed.
    fn choose(
        &self,
        context: &mut MoeContext<'_>,
        normed: &[f32],
        routing: &mut Routing,
        tokens: usize,
    ) -> Result<(), ModelError> {
        let RouterConfig { experts, top_k, .. } = *context.router;
        let gate = context.weights.view(&self.router).map_err(|source| self.kernel(source))?;
        routing.seen.fill(false);
        routing.missing.clear();
        routing.hits.clear();
        let mut requested = 0;
        for first in (0..tokens).step_by(ROUTER_GROUP) {
            let group = first..tokens.min(first + ROUTER_GROUP);
            let input = smoe_quant::Input::F32(&normed[group.start * self.hidden..group.end * self.hidden]);
            let logits = &mut routing.logits[..group.len() * experts];
            context
                .compute
                .matmul(&gate, &input, group.len(), logits)
                .map_err(|source| self.kernel(source))?;
            for (token, logits) in group.clone().zip(logits.chunks_exact_mut(experts)) {
                if !ops::all_finite(logits) {
                    return Err(ModelError::NonFinite {
                        what: format!("router logits of layer {}", self.layer),
                        position: context.position + token,
                    });
                }
                let pairs = token * top_k..(token + 1) * top_k;
                let (chosen, weights) = (&mut routing.experts[pairs.clone()], &mut routing.weights[pairs]);
                ops::route(context.router, logits, chosen, weights);
            }
            // Hits are pinned before any read may evict them.
            for &expert in &routing.experts[group.start * top_k..group.end * top_k] {
                if !std::mem::replace(&mut routing.seen[expert as usize], true) {
                    match context.stream.lookup(self.id(expert)) {
                        Some(pin) => routing.hits.push(pin),
                        None => routing.missing.push(expert),
                    }
                }
            }
            requested += self.submit(context.stream, &routing.missing[requested..])?;
        }
        Ok(())
    }

    /// Submits reads until the cache has no free slot; returns how many were submitted.
    fn submit(&self, stream: &mut ExpertStream, missing: &[u32]) -> Result<usize, ModelError> {
        for (submitted, &expert) in missing.iter().enumerate() {
            if !matches!(stream.request(self.id(expert))?, Request::Pending) {
                return Ok(submitted);
            }
        }
        Ok(missing.len())
    }

    /// Computes every chosen expert over its tokens: first those that are there, then the others as they arrive.
    fn compute_chosen(
        &self,
        context: &mut MoeContext<'_>,
        normed: &[f32],
        q8: &Q8Buffer,
        scratch: &mut FfnScratch,
    ) -> Result<(), ModelError> {
        let mut arrived = 0;
        while let Some(pin) = scratch.routing.hits.pop() {
            self.compute_pinned(context, pin, normed, q8, scratch)?;
        }
        let missing = scratch.routing.missing.len();
        while arrived < missing {
            let in_flight = context.stream.in_flight();
            let requested = arrived + in_flight;
            self.submit(context.stream, &scratch.routing.missing[requested..])?;
            context.instruments.lap(Bucket::Router);
            let pin = context.stream.wait()?;
            context.instruments.lap(Bucket::Drive);
            arrived += 1;
            self.compute_pinned(context, pin, normed, q8, scratch)?;
        }
        Ok(())
    }

    fn compute_pinned(
        &self,
        context: &mut MoeContext<'_>,
        pin: Pin,
        normed: &[f32],
        q8: &Q8Buffer,
        scratch: &mut FfnScratch,
    ) -> Result<(), ModelError> {
        let record = context.stream.bytes(&pin);
        let computed = self.compute_expert(context.compute, pin.id().expert, record, normed, q8, scratch);
        context.stream.release(pin);
        context.instruments.lap(Bucket::Experts);
        computed.map_err(|source| self.kernel(source))
    }

    /// One expert over all the tokens that chose it; outputs go to their places by token and rank.
    fn compute_expert(
        &self,
        compute: &Compute,
        expert: u32,
        record: &[u8],
        normed: &[f32],
        q8: &Q8Buffer,
        scratch: &mut FfnScratch,
    ) -> Result<(), QuantError> {
        let FfnScratch { gate_up, activated, activated_q8, gathered, gathered_q8, down, by_rank, routing } =
            scratch;
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let pairs = routing.pairs_of(expert);
        let count = pairs.len();
        let RecordLayout { gate, up, down: down_part } = self.record;
        let gathered = &mut gathered[..count * hidden];
        gather(pairs, self.top_k, hidden, [gate.format, up.format], normed, q8, gathered, gathered_q8);

        let activated = &mut activated[..count * intermediate];
        if let Some(both) = self.record.gate_up() {
            let gate_up = &mut gate_up[..count * 2 * intermediate];
            compute.matmul(&both.view(record)?, &gathered_q8.input(both.format, gathered), count, gate_up)?;
            compute.pool.for_each_chunk(activated, intermediate, |token, out| {
                let row = &gate_up[token * 2 * intermediate..(token + 1) * 2 * intermediate];
                ops::silu_mul(&row[..intermediate], &row[intermediate..], out);
            });
        } else {
            let (gates, ups) = gate_up.split_at_mut(count * intermediate);
            let ups = &mut ups[..count * intermediate];
            compute.matmul(&gate.view(record)?, &gathered_q8.input(gate.format, gathered), count, gates)?;
            compute.matmul(&up.view(record)?, &gathered_q8.input(up.format, gathered), count, ups)?;
            ops::silu_mul(gates, ups, activated);
        }
        activated_q8.fill(activated, &[down_part.format]);
        let down = &mut down[..count * hidden];
        compute.matmul(
            &down_part.view(record)?,
            &activated_q8.input(down_part.format, activated),
            count,
            down,
        )?;
        for (&pair, row) in pairs.iter().zip(down.chunks_exact(hidden)) {
            by_rank[pair as usize * hidden..][..hidden].copy_from_slice(row);
        }
        Ok(())
    }

    fn id(&self, expert: u32) -> ExpertId {
        ExpertId { layer: self.stream_layer, expert }
    }

    fn kernel(&self, source: QuantError) -> ModelError {
        ModelError::Kernel { layer: self.layer.to_string(), source }
    }
}

/// Copies the inputs of the given pairs next to each other, in the forms that the formats ask for.
#[expect(clippy::too_many_arguments, reason = "three buffers in, two out, and their shape")]
fn gather(
    pairs: &[u32],
    top_k: usize,
    hidden: usize,
    formats: [BlockFormat; 2],
    normed: &[f32],
    q8: &Q8Buffer,
    gathered: &mut [f32],
    gathered_q8: &mut Q8Buffer,
) {
    let any_q8 = formats.iter().any(|format| format.uses_q8_activations());
    let any_f32 = formats.iter().any(|format| !format.uses_q8_activations());
    let blocks = hidden / Q8_BLOCK;
    for (row, &pair) in pairs.iter().enumerate() {
        let token = pair as usize / top_k;
        if any_f32 {
            gathered[row * hidden..][..hidden].copy_from_slice(&normed[token * hidden..][..hidden]);
        }
        if any_q8 {
            gathered_q8.quants[row * hidden..][..hidden]
                .copy_from_slice(&q8.quants[token * hidden..][..hidden]);
            gathered_q8.scales[row * blocks..][..blocks]
                .copy_from_slice(&q8.scales[token * blocks..][..blocks]);
        }
    }
}

impl Routing {
    /// Groups `pairs` (token × top_k + rank) by expert, each group in token order.
    fn group_by_expert(&mut self, pairs: usize) {
        self.starts.fill(0);
        for &expert in &self.experts[..pairs] {
            self.starts[expert as usize + 1] += 1;
        }
        for expert in 1..self.starts.len() {
            self.starts[expert] += self.starts[expert - 1];
        }
        // Each start moves to its group's end while the group is filled, which is the next group's start.
        for (pair, &expert) in self.experts[..pairs].iter().enumerate() {
            let next = &mut self.starts[expert as usize];
            self.pairs[*next as usize] = pair as u32;
            *next += 1;
        }
    }

    /// The pairs of one expert.
    fn pairs_of(&self, expert: u32) -> &[u32] {
        let expert = expert as usize;
        let start = if expert == 0 { 0 } else { self.starts[expert - 1] };
        &self.pairs[start as usize..self.starts[expert] as usize]
    }
}
