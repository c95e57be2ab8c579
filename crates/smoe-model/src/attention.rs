//! Attention of one query position over the KV cache.

use smoe_quant::Kernels;

use crate::config::{AttentionConfig, limits};
use crate::kv_cache::HeadRows;

/// Positions that share one step of the running softmax. Blocks start at multiples of it from position 0, whatever
/// the prefill chunk, so that the same additions happen in the same order in prefill and decode.
const BLOCK: usize = 64;

/// All query heads that share one key/value head, at one position.
///
/// `queries` and `out` are `queries per head × head_dim`. Softmax runs over blocks of positions with a running
/// maximum and sum (Milakov and Gimelshein 2018, arXiv 1805.02867).
pub(crate) fn attend(
    kernels: Kernels,
    config: &AttentionConfig,
    rows: HeadRows<'_>,
    position: usize,
    queries: &[f32],
    out: &mut [f32],
) {
    let head_dim = config.head_dim;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let first = config.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let row = |position: usize| position * rows.row_bytes..(position + 1) * rows.row_bytes;
    let mut scores = [0.0f32; BLOCK];
    let mut maxima = [f32::NEG_INFINITY; limits::QUERIES_PER_KV_HEAD];
    let mut sums = [0.0f32; limits::QUERIES_PER_KV_HEAD];
    out.fill(0.0);
    let mut block = first / BLOCK * BLOCK;
    while block <= position {
        let positions = first.max(block)..(position + 1).min(block + BLOCK);
        let heads = queries.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim));
        for ((query, out), (max, sum)) in heads.zip(maxima.iter_mut().zip(&mut sums)) {
            let scores = &mut scores[..positions.len()];
            let mut block_max = *max;
            for (score, position) in scores.iter_mut().zip(positions.clone()) {
                let key = &rows.keys[row(position)];
                *score = kernels.dot(rows.format, key, query) * scale;
                block_max = block_max.max(*score);
            }
            let correction = (*max - block_max).exp();
            *max = block_max;
            *sum *= correction;
            for out in out.iter_mut() {
                *out *= correction;
            }
            for (&score, position) in scores.iter().zip(positions.clone()) {
                let weight = (score - block_max).exp();
                *sum += weight;
                let value = &rows.values[row(position)];
                kernels.axpy(rows.format, weight, value, out);
            }
        }
        block += BLOCK;
    }
    for (out, sum) in out.chunks_exact_mut(head_dim).zip(sums) {
        for out in out {
            *out /= sum;
        }
    }
}
