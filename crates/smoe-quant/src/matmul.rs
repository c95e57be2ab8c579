//! Matrix products, split over threads by rows.
// Threads write disjoint rows of one output.
#![allow(unsafe_code)]

use crate::error::QuantError;
use crate::format::Q8_BLOCK;
use crate::kernels::{Kernels, Out};
use crate::matrix::{Input, MatrixView};
use crate::pool::ThreadPool;

/// Tokens that pass over a row while it is in the processor's nearest cache.
const TOKEN_BLOCK: usize = 32;
/// Products of weights and values under which waking threads costs more than it saves.
const INLINE_PRODUCTS: usize = 16 * 1024;
/// Parts for each thread, so that one that was held up leaves its share to the others.
const PARTS_PER_THREAD: usize = 4;
/// Fewest rows of a part.
const PART_ROWS: usize = 8;

/// `out[token × rows + row] = weights[row] · input[token]`.
///
/// The result bits depend on the operands only: not on the number of threads, of tokens, or on the instruction set.
///
/// # Errors
/// The input is in a form that the weights' format does not take, or a length does not fit.
pub fn matmul(
    pool: &ThreadPool,
    kernels: Kernels,
    weights: &MatrixView<'_>,
    input: &Input<'_>,
    tokens: usize,
    out: &mut [f32],
) -> Result<(), QuantError> {
    check(weights, input, tokens, out.len())?;
    let rows = weights.rows();
    let out = Out::new(out, rows, tokens);
    let products = rows.saturating_mul(weights.columns()).saturating_mul(tokens);
    let most = (rows / PART_ROWS).clamp(1, pool.threads() * PARTS_PER_THREAD);
    let parts = if products < INLINE_PRODUCTS || pool.threads() == 1 { 1 } else { most };
    // An even number of rows, as they are taken in pairs.
    let part_rows = rows.div_ceil(parts).next_multiple_of(2);
    pool.run(parts, &|part| {
        let start = rows.min(part * part_rows);
        let span = start..rows.min(start + part_rows);
        for first in (0..tokens).step_by(TOKEN_BLOCK) {
            let block = first..tokens.min(first + TOKEN_BLOCK);
            // SAFETY: parts are disjoint ranges of rows, all lengths were checked, and `out` is borrowed until `run`
            // returns, which it does when all parts are done.
            unsafe { kernels.span(weights, span.clone(), input, block, out) };
        }
    });
    Ok(())
}

fn check(weights: &MatrixView<'_>, input: &Input<'_>, tokens: usize, out: usize) -> Result<(), QuantError> {
    let (rows, columns, format) = (weights.rows(), weights.columns(), weights.format());
    let length = |what, expected: Option<usize>, found: usize| match expected {
        Some(expected) if expected == found => Ok(()),
        expected => Err(QuantError::Length { what, expected: expected.unwrap_or(usize::MAX), found }),
    };
    match *input {
        Input::F32(x) => length("the input", columns.checked_mul(tokens), x.len())?,
        Input::Q8 { quants, scales } => {
            if !format.uses_q8_activations() {
                return Err(QuantError::Activations { format, expected: "float" });
            }
            length("the input in 8 bits", columns.checked_mul(tokens), quants.len())?;
            length("the input's scales", (columns / Q8_BLOCK).checked_mul(tokens), scales.len())?;
        }
    }
    length("the output", rows.checked_mul(tokens), out)
}
