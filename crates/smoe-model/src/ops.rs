//! Element-wise arithmetic and the router.
//!
//! Everything here is plain `f32` code in a fixed order: additions and multiplications are never contracted, so the
//! result bits are the same on every instruction set.

use crate::config::{RouterConfig, RouterScore};

/// Independent partial sums; the compiler keeps them in vector registers.
const LANES: usize = 16;

/// Root-mean-square norm (Zhang and Sennrich 2019): `out = x / sqrt(mean(x²) + epsilon) * weight`.
///
/// All three slices have the same length.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let scale = rms_scale(x, epsilon);
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * scale);
    }
}

/// [`rms_norm`] in place.
pub(crate) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], epsilon: f32) {
    let scale = rms_scale(x, epsilon);
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = weight * (*x * scale);
    }
}

fn rms_scale(x: &[f32], epsilon: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += x * x;
    }
    let sum: f32 = lanes.iter().sum();
    1.0 / (sum / x.len() as f32 + epsilon).sqrt()
}

/// SwiGLU's activation: `out = silu(gate) * up`, with `silu(x) = x / (1 + exp(-x))`.
pub(crate) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + (-gate).exp()) * up;
    }
}

/// `x += y`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `x += y * scale`, multiplied first, then added.
pub(crate) fn add_scaled(x: &mut [f32], y: &[f32], scale: f32) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y * scale;
    }
}

/// Whether every value is finite.
pub(crate) fn all_finite(x: &[f32]) -> bool {
    // A sum of zeros that a single NaN or infinity spoils; no branch in the loop.
    x.iter().map(|&x| x * 0.0).sum::<f32>() == 0.0
}

/// Chooses the experts of one token.
///
/// `logits` (one per expert) become scores in place; `experts` and `weights` (`top_k` long) receive the choice by
/// descending score, the lower index first among equals. Logits must be finite.
pub(crate) fn route(config: &RouterConfig, logits: &mut [f32], experts: &mut [u32], weights: &mut [f32]) {
    match config.score {
        RouterScore::Softmax => softmax(logits),
    }
    // `top_k` passes over a few hundred scores; a chosen one is marked by a value below every score.
    for (expert, weight) in experts.iter_mut().zip(weights.iter_mut()) {
        let mut best = 0;
        for (index, &score) in logits.iter().enumerate() {
            if score > logits[best] {
                best = index;
            }
        }
        *expert = best as u32;
        *weight = logits[best];
        logits[best] = f32::NEG_INFINITY;
    }
    if config.renormalize {
        let sum: f32 = weights.iter().sum();
        for weight in weights {
            *weight /= sum;
        }
    }
}

/// Softmax in place, shifted by the maximum.
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    for x in x {
        *x /= sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(renormalize: bool, logits: &[f32], top_k: usize) -> (Vec<u32>, Vec<f32>) {
        let config = RouterConfig { score: RouterScore::Softmax, experts: logits.len(), top_k, renormalize };
        let (mut experts, mut weights) = (vec![0; top_k], vec![0.0; top_k]);
        route(&config, &mut logits.to_vec(), &mut experts, &mut weights);
        (experts, weights)
    }

    fn close(found: &[f32], expected: &[f32]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn softmax_comes_before_the_choice() {
        let (experts, weights) = routed(false, &[2.0, 1.0, 0.5, -1.0], 2);
        assert_eq!(experts, [0, 1]);
        close(&weights, &[0.609460, 0.224208]);
    }

    #[test]
    fn renormalized_weights_add_up_to_one() {
        let (experts, weights) = routed(true, &[2.0, 1.0, 0.5, -1.0], 2);
        assert_eq!(experts, [0, 1]);
        close(&weights, &[0.731059, 0.268941]);
    }

    #[test]
    fn equal_scores_go_to_the_lower_index() {
        assert_eq!(routed(true, &[1.0, 3.0, 3.0, 3.0], 3).0, [1, 2, 3]);
    }

    #[test]
    fn scores_that_vanish_still_choose_distinct_experts() {
        let (experts, _) = routed(false, &[-400.0, 0.0, -500.0, -600.0], 4);
        let mut sorted = experts.clone();
        sorted.sort_unstable();
        assert_eq!((experts[0], sorted), (1, vec![0, 1, 2, 3]));
    }

    #[test]
    fn one_bad_value_is_noticed() {
        let mut x = vec![1.0f32; 100];
        assert!(all_finite(&x));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[63] = bad;
            assert!(!all_finite(&x));
        }
    }

    #[test]
    fn norm_of_known_values() {
        let mut out = [0.0; 3];
        rms_norm(&[3.0, 4.0, 0.0], &[1.0, 2.0, 5.0], 0.0, &mut out);
        let root = (25.0f32 / 3.0).sqrt();
        close(&out, &[3.0 / root, 8.0 / root, 0.0]);
    }
}
