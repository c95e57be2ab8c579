//! Dot products on the best instruction set of the processor, chosen at run time.
// Functions of an instruction set are called through pointers once its presence was seen.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;

use crate::format::BlockFormat;
use crate::matrix::{Input, MatrixView};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Where a span of products goes: `out[token × rows + row]`.
///
/// Spans of different rows never write the same element, so several threads can share one.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    start: *mut f32,
    rows: usize,
    tokens: usize,
}

// SAFETY: whoever shares an `Out` gives each thread rows of its own (see `matmul`), so no element has two writers.
unsafe impl Send for Out {}
// SAFETY: as above; nothing is read through it.
unsafe impl Sync for Out {}

impl Out {
    /// `out` holds `tokens` rows of `rows` elements each.
    pub(crate) fn new(out: &mut [f32], rows: usize, tokens: usize) -> Self {
        assert_eq!(out.len(), rows * tokens, "output of a matrix product");
        Self { start: out.as_mut_ptr(), rows, tokens }
    }

    /// Stores one element.
    ///
    /// # Safety
    /// The slice that this was made of is still borrowed, and no other thread writes this row.
    #[inline(always)]
    unsafe fn set(self, token: usize, row: usize, value: f32) {
        debug_assert!(token < self.tokens && row < self.rows);
        // SAFETY: token and row are below what `new` checked the slice against; the rest is the caller's promise.
        unsafe { *self.start.add(token * self.rows + row) = value };
    }
}

/// Products of some rows with some tokens, with float activations (`x`: all tokens).
type FloatSpan = unsafe fn(&MatrixView<'_>, Range<usize>, &[f32], Range<usize>, Out);
/// The same with 8-bit activations.
type QuantSpan = unsafe fn(&MatrixView<'_>, Range<usize>, &[i8], &[f32], Range<usize>, Out);
/// Dot product of a row and as many floats as it has weights.
type Dot = unsafe fn(&[u8], &[f32]) -> f32;
/// `acc += scale × row`, by fused multiply-add.
type Axpy = unsafe fn(f32, &[u8], &mut [f32]);

/// The functions of one instruction set.
pub(crate) struct Table {
    name: &'static str,
    /// In the order of `index`.
    float_spans: [FloatSpan; 5],
    dots: [Dot; 5],
    axpys: [Axpy; 5],
    q8_0_span: QuantSpan,
    q4_0_span: QuantSpan,
}

fn index(format: BlockFormat) -> usize {
    match format {
        BlockFormat::F32 => 0,
        BlockFormat::F16 => 1,
        BlockFormat::BF16 => 2,
        BlockFormat::Q8_0 => 3,
        BlockFormat::Q4_0 => 4,
    }
}

/// A handle to the kernels of one instruction set. All of them give the same bits.
#[derive(Clone, Copy)]
pub struct Kernels {
    table: &'static Table,
}

impl Kernels {
    /// The fastest that this processor has.
    #[must_use]
    pub fn detect() -> Self {
        Self::available().pop().unwrap_or(Self { table: &scalar::TABLE })
    }

    /// All that this processor has, the slowest (plain code) first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut tables = vec![&scalar::TABLE];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                tables.push(&avx2::TABLE);
            }
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 && avx512 {
                tables.push(&avx512::TABLE);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            tables.push(&neon::TABLE);
        }
        tables.into_iter().map(|table| Self { table }).collect()
    }

    /// The kernels of a name, if this processor has them.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::available().into_iter().find(|kernels| kernels.name() == name)
    }

    /// Name of the instruction set.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.table.name
    }

    /// Dot product of a row of weights with exact floats, also for quantized formats.
    ///
    /// # Panics
    /// The row's length is not that of `x` in this format.
    #[must_use]
    #[inline]
    pub fn dot(self, format: BlockFormat, row: &[u8], x: &[f32]) -> f32 {
        assert_eq!(Some(row.len()), format.row_bytes(x.len()), "bytes of a row");
        // SAFETY: a table is handed out only where its instruction set was detected; lengths were checked.
        unsafe { self.table.dots[index(format)](row, x) }
    }

    /// `acc[i] += scale × row[i]`, each by one fused multiply-add.
    ///
    /// # Panics
    /// The row's length is not that of `acc` in this format.
    #[inline]
    pub fn axpy(self, format: BlockFormat, scale: f32, row: &[u8], acc: &mut [f32]) {
        assert_eq!(Some(row.len()), format.row_bytes(acc.len()), "bytes of a row");
        // SAFETY: as in `dot`.
        unsafe { self.table.axpys[index(format)](scale, row, acc) }
    }

    /// Products of `rows` of the weights with `tokens` of the input.
    ///
    /// # Safety
    /// `out` is borrowed for as long as this runs and nobody else writes these rows; `rows` and `tokens` lie within the
    /// operands, whose lengths and kinds `matmul` has checked.
    pub(crate) unsafe fn span(
        self,
        weights: &MatrixView<'_>,
        rows: Range<usize>,
        input: &Input<'_>,
        tokens: Range<usize>,
        out: Out,
    ) {
        let table = self.table;
        match *input {
            // SAFETY: the instruction set was detected; the rest is the caller's promise.
            Input::F32(x) => unsafe {
                table.float_spans[index(weights.format())](weights, rows, x, tokens, out)
            },
            Input::Q8 { quants, scales } => {
                let span =
                    if weights.format() == BlockFormat::Q4_0 { table.q4_0_span } else { table.q8_0_span };
                // SAFETY: as above; `matmul` lets 8-bit activations meet Q8_0 and Q4_0 only.
                unsafe { span(weights, rows, quants, scales, tokens, out) }
            }
        }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({})", self.name())
    }
}

/// Elements that float kernels take at once, one for each lane.
const LANES: usize = 32;
/// Lanes that share a block's products in quantized kernels.
const QUANT_LANES: usize = 8;

/// The loops over rows and tokens around an instruction set's tiles, compiled with its features.
///
/// The including module provides `float_tile::<S, ROWS, TOKENS>`, `quant_tile::<B, ROWS, TOKENS>`, the sources `F32`,
/// `F16`, `BF16`, `Q8_0`, `Q4_0`, and the largest token tiles.
macro_rules! loops {
    ($(#[$features:meta])*; float_tokens: $float_tokens:literal, quant_tokens: $quant_tokens:literal) => {
        $(#[$features])*
        fn float_span<S: Source>(
            weights: &MatrixView<'_>,
            rows: Range<usize>,
            x: &[f32],
            tokens: Range<usize>,
            out: Out,
        ) {
            let columns = weights.columns();
            let vector = |token: usize| &x[token * columns..(token + 1) * columns];
            if tokens.len() == 1 {
                let token = tokens.start;
                let mut row = rows.start;
                while row + 2 <= rows.end {
                    let sums = float_tile::<S, 2, 1>([weights.row(row), weights.row(row + 1)], [vector(token)]);
                    for (offset, [sum]) in sums.into_iter().enumerate() {
                        // SAFETY: rows and tokens are the caller's own.
                        unsafe { out.set(token, row + offset, sum) };
                    }
                    row += 2;
                }
                if row < rows.end {
                    let [[sum]] = float_tile::<S, 1, 1>([weights.row(row)], [vector(token)]);
                    // SAFETY: as above.
                    unsafe { out.set(token, row, sum) };
                }
                return;
            }
            for row in rows {
                let mut token = tokens.start;
                while token + $float_tokens <= tokens.end {
                    let vectors: [&[f32]; $float_tokens] = std::array::from_fn(|offset| vector(token + offset));
                    let [sums] = float_tile::<S, 1, $float_tokens>([weights.row(row)], vectors);
                    for (offset, sum) in sums.into_iter().enumerate() {
                        // SAFETY: as above.
                        unsafe { out.set(token + offset, row, sum) };
                    }
                    token += $float_tokens;
                }
                for token in token..tokens.end {
                    let [[sum]] = float_tile::<S, 1, 1>([weights.row(row)], [vector(token)]);
                    // SAFETY: as above.
                    unsafe { out.set(token, row, sum) };
                }
            }
        }

        $(#[$features])*
        fn quant_span<B: QuantBlock>(
            weights: &MatrixView<'_>,
            rows: Range<usize>,
            quants: &[i8],
            scales: &[f32],
            tokens: Range<usize>,
            out: Out,
        ) {
            let columns = weights.columns();
            let blocks = columns / Q8_BLOCK;
            let vector = |token: usize| {
                (&quants[token * columns..(token + 1) * columns], &scales[token * blocks..(token + 1) * blocks])
            };
            if tokens.len() == 1 {
                let token = tokens.start;
                let mut row = rows.start;
                while row + 2 <= rows.end {
                    let sums = quant_tile::<B, 2, 1>([weights.row(row), weights.row(row + 1)], [vector(token)]);
                    for (offset, [sum]) in sums.into_iter().enumerate() {
                        // SAFETY: rows and tokens are the caller's own.
                        unsafe { out.set(token, row + offset, sum) };
                    }
                    row += 2;
                }
                if row < rows.end {
                    let [[sum]] = quant_tile::<B, 1, 1>([weights.row(row)], [vector(token)]);
                    // SAFETY: as above.
                    unsafe { out.set(token, row, sum) };
                }
                return;
            }
            for row in rows {
                let mut token = tokens.start;
                while token + $quant_tokens <= tokens.end {
                    let vectors: [(&[i8], &[f32]); $quant_tokens] =
                        std::array::from_fn(|offset| vector(token + offset));
                    let [sums] = quant_tile::<B, 1, $quant_tokens>([weights.row(row)], vectors);
                    for (offset, sum) in sums.into_iter().enumerate() {
                        // SAFETY: as above.
                        unsafe { out.set(token + offset, row, sum) };
                    }
                    token += $quant_tokens;
                }
                for token in token..tokens.end {
                    let [[sum]] = quant_tile::<B, 1, 1>([weights.row(row)], [vector(token)]);
                    // SAFETY: as above.
                    unsafe { out.set(token, row, sum) };
                }
            }
        }

        $(#[$features])*
        fn dot<S: Source>(row: &[u8], x: &[f32]) -> f32 {
            let [[sum]] = float_tile::<S, 1, 1>([row], [x]);
            sum
        }
    };
}

/// The table of an instruction set whose functions are named as `loops` names them.
macro_rules! table {
    ($name:literal) => {
        pub(super) static TABLE: crate::kernels::Table = crate::kernels::Table {
            name: $name,
            float_spans: [
                float_span::<F32>,
                float_span::<F16>,
                float_span::<BF16>,
                float_span::<Q8_0>,
                float_span::<Q4_0>,
            ],
            dots: [dot::<F32>, dot::<F16>, dot::<BF16>, dot::<Q8_0>, dot::<Q4_0>],
            axpys: [axpy::<F32>, axpy::<F16>, axpy::<BF16>, axpy::<Q8_0>, axpy::<Q4_0>],
            q8_0_span: quant_span::<Q8_0>,
            q4_0_span: quant_span::<Q4_0>,
        };
    };
}

use {loops, table};
