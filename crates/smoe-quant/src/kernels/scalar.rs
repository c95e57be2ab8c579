//! The reference: plain code that defines the order of every sum.
// The rows and tokens of a span are its caller's own; see `Out::set`.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{LANES, Out, QUANT_LANES, loops, table};
use crate::block::{dequantize_unchecked, q4_0, q8_0};
use crate::format::{BlockFormat, Q8_BLOCK};
use crate::matrix::MatrixView;

/// Weights that can be read as floats.
trait Source {
    const FORMAT: BlockFormat;
}

/// Blocks of 32 weights that meet 8-bit activations.
trait QuantBlock {
    const BYTES: usize;
    /// Scale and weights.
    fn load(block: &[u8]) -> (f32, [i8; Q8_BLOCK]);
}

struct F32;
struct F16;
struct BF16;
#[allow(non_camel_case_types, reason = "GGUF's own name")]
struct Q8_0;
#[allow(non_camel_case_types, reason = "GGUF's own name")]
struct Q4_0;

impl Source for F32 {
    const FORMAT: BlockFormat = BlockFormat::F32;
}
impl Source for F16 {
    const FORMAT: BlockFormat = BlockFormat::F16;
}
impl Source for BF16 {
    const FORMAT: BlockFormat = BlockFormat::BF16;
}
impl Source for Q8_0 {
    const FORMAT: BlockFormat = BlockFormat::Q8_0;
}
impl Source for Q4_0 {
    const FORMAT: BlockFormat = BlockFormat::Q4_0;
}

impl QuantBlock for Q8_0 {
    const BYTES: usize = q8_0::BYTES;
    fn load(block: &[u8]) -> (f32, [i8; Q8_BLOCK]) {
        let (block, _) = block.as_chunks::<{ q8_0::BYTES }>();
        (q8_0::scale(&block[0]), std::array::from_fn(|index| block[0][2 + index] as i8))
    }
}
impl QuantBlock for Q4_0 {
    const BYTES: usize = q4_0::BYTES;
    fn load(block: &[u8]) -> (f32, [i8; Q8_BLOCK]) {
        let (block, _) = block.as_chunks::<{ q4_0::BYTES }>();
        (q4_0::scale(&block[0]), q4_0::unpack(&block[0]))
    }
}

/// Halves the lanes until one is left.
fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

fn float_tile<S: Source, const ROWS: usize, const TOKENS: usize>(
    rows: [&[u8]; ROWS],
    xs: [&[f32]; TOKENS],
) -> [[f32; TOKENS]; ROWS] {
    let format = S::FORMAT;
    rows.map(|row| {
        xs.map(|x| {
            let mut lanes = [0.0f32; LANES];
            for start in (0..x.len()).step_by(LANES) {
                let end = x.len().min(start + LANES);
                let (mut weights, mut values) = ([0.0f32; LANES], [0.0f32; LANES]);
                let bytes = |element: usize| element / format.block_len() * format.block_bytes();
                dequantize_unchecked(format, &row[bytes(start)..bytes(end)], &mut weights[..end - start]);
                values[..end - start].copy_from_slice(&x[start..end]);
                for ((lane, weight), value) in lanes.iter_mut().zip(weights).zip(values) {
                    *lane = weight.mul_add(value, *lane);
                }
            }
            reduce(lanes)
        })
    })
}

fn quant_tile<B: QuantBlock, const ROWS: usize, const TOKENS: usize>(
    rows: [&[u8]; ROWS],
    xs: [(&[i8], &[f32]); TOKENS],
) -> [[f32; TOKENS]; ROWS] {
    rows.map(|row| {
        xs.map(|(quants, scales)| {
            let mut groups = [[0.0f32; QUANT_LANES]; 2];
            let blocks = row.chunks_exact(B::BYTES).zip(quants.as_chunks::<Q8_BLOCK>().0).zip(scales);
            for (index, ((block, quants), scale)) in blocks.enumerate() {
                let (weight_scale, weights) = B::load(block);
                let scale = weight_scale * scale;
                for (lane, acc) in groups[index % 2].iter_mut().enumerate() {
                    let elements = 4 * lane..4 * lane + 4;
                    let products = weights[elements.clone()].iter().zip(&quants[elements]);
                    let sum: i32 = products.map(|(&w, &q)| i32::from(w) * i32::from(q)).sum();
                    *acc = scale.mul_add(sum as f32, *acc);
                }
            }
            let mut lanes: [f32; QUANT_LANES] = std::array::from_fn(|lane| groups[0][lane] + groups[1][lane]);
            for width in [4, 2, 1] {
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
            }
            lanes[0]
        })
    })
}

fn axpy<S: Source>(scale: f32, row: &[u8], acc: &mut [f32]) {
    let format = S::FORMAT;
    let block = format.block_len().max(LANES);
    let bytes = block / format.block_len() * format.block_bytes();
    let mut weights = [0.0f32; LANES];
    for (row, acc) in row.chunks(bytes).zip(acc.chunks_mut(block)) {
        let weights = &mut weights[..acc.len()];
        dequantize_unchecked(format, row, weights);
        for (acc, &weight) in acc.iter_mut().zip(weights.iter()) {
            *acc = scale.mul_add(weight, *acc);
        }
    }
}

loops!(; float_tokens: 2, quant_tokens: 2);
table!("scalar");
