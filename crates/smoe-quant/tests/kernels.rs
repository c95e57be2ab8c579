//! Every instruction set, any number of vectors and of threads: the same bits as the plain code.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use proptest::prelude::*;
use smoe_quant::{
    BlockFormat, Input, Kernels, MatrixView, Q8_BLOCK, QuantError, ThreadPool, dequantize_row, matmul,
    quantize_activations, quantize_row,
};

/// What the values of a test are like.
#[derive(Debug, Clone, Copy)]
enum Values {
    Random,
    Zero,
    Large,
    Tiny,
    Mixed,
}

const VALUES: [Values; 5] = [Values::Random, Values::Zero, Values::Large, Values::Tiny, Values::Mixed];

/// A reproducible sequence in the chosen style.
fn floats(seed: u64, count: usize, values: Values) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|index| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
            match values {
                Values::Random => unit,
                Values::Zero => 0.0,
                Values::Large => unit * 60_000.0,
                Values::Tiny => unit * 1e-6,
                Values::Mixed if index % 31 == 0 => unit * 1_000.0,
                Values::Mixed => unit * 1e-3,
            }
        })
        .collect()
}

struct Case {
    format: BlockFormat,
    rows: usize,
    columns: usize,
    weights: Vec<u8>,
    x: Vec<f32>,
    quants: Vec<i8>,
    scales: Vec<f32>,
    tokens: usize,
}

impl Case {
    fn new(
        seed: u64,
        format: BlockFormat,
        rows: usize,
        columns: usize,
        tokens: usize,
        values: Values,
    ) -> Self {
        let row_bytes = format.row_bytes(columns).unwrap();
        let mut weights = vec![0; rows * row_bytes];
        let source = floats(seed, rows * columns, values);
        for (row, bytes) in source.chunks(columns).zip(weights.chunks_mut(row_bytes)) {
            quantize_row(format, row, bytes).unwrap();
        }
        let x = floats(seed ^ 77, tokens * columns, values);
        let (mut quants, mut scales) = (Vec::new(), Vec::new());
        if columns.is_multiple_of(Q8_BLOCK) {
            quants = vec![0; x.len()];
            scales = vec![0.0; x.len() / Q8_BLOCK];
            quantize_activations(&x, &mut quants, &mut scales);
        }
        Self { format, rows, columns, weights, x, quants, scales, tokens }
    }

    fn input(&self, tokens: std::ops::Range<usize>, q8: bool) -> Input<'_> {
        let elements = tokens.start * self.columns..tokens.end * self.columns;
        if q8 {
            let blocks = elements.start / Q8_BLOCK..elements.end / Q8_BLOCK;
            Input::Q8 { quants: &self.quants[elements], scales: &self.scales[blocks] }
        } else {
            Input::F32(&self.x[elements])
        }
    }

    fn product(
        &self,
        pool: &ThreadPool,
        kernels: Kernels,
        q8: bool,
        tokens: std::ops::Range<usize>,
    ) -> Vec<u32> {
        let view = MatrixView::new(self.format, self.rows, self.columns, &self.weights).unwrap();
        let mut out = vec![f32::NAN; tokens.len() * self.rows];
        matmul(pool, kernels, &view, &self.input(tokens.clone(), q8), tokens.len(), &mut out).unwrap();
        out.into_iter().map(f32::to_bits).collect()
    }

    /// Compares every instruction set, thread count and cut of the tokens with the plain code, one token at a time.
    fn check(&self, pools: &[ThreadPool]) {
        let scalar = Kernels::by_name("scalar").unwrap();
        for q8 in [false, true] {
            if q8 && !self.format.uses_q8_activations() {
                continue;
            }
            let expected: Vec<u32> = (0..self.tokens)
                .flat_map(|token| self.product(&pools[0], scalar, q8, token..token + 1))
                .collect();
            for kernels in Kernels::available() {
                for pool in pools {
                    let found = self.product(pool, kernels, q8, 0..self.tokens);
                    assert_eq!(
                        found, expected,
                        "{kernels:?} {} {}x{} {} tokens q8 {q8} {pool:?}",
                        self.format, self.rows, self.columns, self.tokens
                    );
                    let single: Vec<u32> =
                        (0..self.tokens).flat_map(|t| self.product(pool, kernels, q8, t..t + 1)).collect();
                    assert_eq!(single, expected);
                }
            }
        }
    }
}

fn pools() -> Vec<ThreadPool> {
    [1, 2, 4].map(ThreadPool::new).into()
}

#[test]
fn products_have_the_same_bits_everywhere() {
    let pools = pools();
    for &format in BlockFormat::ALL {
        let block = format.block_len();
        for (rows, columns) in [(1, 1), (3, 2), (5, 4), (2, 1001), (17, 3), (67, 8), (128, 4)] {
            for (tokens, values) in [1, 2, 3, 5, 33].into_iter().zip(VALUES) {
                Case::new(columns as u64, format, rows, columns * block.max(1), tokens, values).check(&pools);
            }
        }
        for values in VALUES {
            Case::new(9, format, 96, 256, 7, values).check(&pools);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_shapes_have_the_same_bits_everywhere(
        seed: u64,
        format in prop::sample::select(BlockFormat::ALL),
        rows in 1_usize..40,
        units in 1_usize..80,
        tokens in 1_usize..40,
        values in prop::sample::select(VALUES.to_vec()),
    ) {
        let pools = [ThreadPool::new(1), ThreadPool::new(3)];
        Case::new(seed, format, rows, units * format.block_len(), tokens, values).check(&pools);
    }

    #[test]
    fn every_byte_pattern_gives_the_same_bits(
        format in prop::sample::select(vec![BlockFormat::Q8_0, BlockFormat::Q4_0]),
        bytes in prop::collection::vec(any::<u8>(), 34 * 6),
        x in prop::collection::vec(-8.0_f32..8.0, 32 * 6),
    ) {
        // Any bytes may stand in a vault, -128 among them; scales are kept finite.
        let mut weights = bytes[..6 * format.block_bytes()].to_vec();
        for block in weights.chunks_mut(format.block_bytes()) {
            block[1] &= 0xbf;
        }
        let (mut quants, mut scales) = (vec![0; x.len()], vec![0.0; 6]);
        quantize_activations(&x, &mut quants, &mut scales);
        let case = Case { format, rows: 1, columns: x.len(), weights, x, quants, scales, tokens: 1 };
        case.check(&[ThreadPool::new(1)]);
    }

    #[test]
    fn dot_and_axpy_have_the_same_bits_everywhere(
        seed: u64,
        format in prop::sample::select(BlockFormat::ALL),
        units in 1_usize..200,
        values in prop::sample::select(VALUES.to_vec()),
        scale in -4.0_f32..4.0,
    ) {
        let case = Case::new(seed, format, 1, units * format.block_len(), 1, values);
        let scalar = Kernels::by_name("scalar").unwrap();
        let expected = scalar.dot(format, &case.weights, &case.x).to_bits();
        let mut expected_sum = floats(seed ^ 3, case.x.len(), values);
        let start = expected_sum.clone();
        scalar.axpy(format, scale, &case.weights, &mut expected_sum);
        for kernels in Kernels::available() {
            prop_assert_eq!(kernels.dot(format, &case.weights, &case.x).to_bits(), expected, "{:?}", kernels);
            let mut sum = start.clone();
            kernels.axpy(format, scale, &case.weights, &mut sum);
            prop_assert!(sum.iter().zip(&expected_sum).all(|(a, b)| a.to_bits() == b.to_bits()), "{:?}", kernels);
        }
    }
}

#[test]
fn all_halves_are_read_alike() {
    // Every F16 and BF16 bit pattern but NaNs, whose payloads are nobody's concern, times one.
    for format in [BlockFormat::F16, BlockFormat::BF16] {
        let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for bytes in patterns.chunks(64) {
            let mut expected = [0.0; 32];
            dequantize_row(format, bytes, &mut expected).unwrap();
            for kernels in Kernels::available() {
                let mut found = [-0.0; 32];
                kernels.axpy(format, 1.0, bytes, &mut found);
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        found == &expected || (found.is_nan() && expected.is_nan()),
                        "{kernels:?} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_are_right_and_not_only_alike() {
    let pool = ThreadPool::new(2);
    for &format in BlockFormat::ALL {
        let case = Case::new(5, format, 13, 160, 3, Values::Random);
        let row_bytes = format.row_bytes(160).unwrap();
        for q8 in [false, true] {
            if q8 && !format.uses_q8_activations() {
                continue;
            }
            let found = case.product(&pool, Kernels::detect(), q8, 0..3);
            for token in 0..3 {
                for row in 0..13 {
                    let mut weights = vec![0.0; 160];
                    dequantize_row(format, &case.weights[row * row_bytes..][..row_bytes], &mut weights)
                        .unwrap();
                    let x = &case.x[token * 160..][..160];
                    let exact: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let found = f32::from_bits(found[token * 13 + row]);
                    let tolerance = if q8 { 0.15 } else { 1e-4 };
                    assert!(
                        (f64::from(found) - exact).abs() < tolerance,
                        "{format} q8 {q8}: {found} is not {exact}"
                    );
                }
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let pool = ThreadPool::new(1);
    let kernels = Kernels::detect();
    let bytes = vec![0; 2 * 34];
    let view = MatrixView::new(BlockFormat::Q8_0, 2, 32, &bytes).unwrap();
    let refused = |input: &Input<'_>, tokens: usize, out: usize| {
        matmul(&pool, kernels, &view, input, tokens, &mut vec![0.0; out]).unwrap_err()
    };
    assert!(matches!(
        refused(&Input::F32(&[0.0; 31]), 1, 2),
        QuantError::Length { expected: 32, found: 31, .. }
    ));
    assert!(matches!(
        refused(&Input::F32(&[0.0; 32]), 1, 3),
        QuantError::Length { expected: 2, found: 3, .. }
    ));
    assert!(matches!(refused(&Input::F32(&[0.0; 32]), usize::MAX, 2), QuantError::Length { .. }));
    let q8 = Input::Q8 { quants: &[0; 32], scales: &[] };
    assert!(matches!(refused(&q8, 1, 2), QuantError::Length { expected: 1, found: 0, .. }));
    let floats = vec![0; 4 * 32];
    let view = MatrixView::new(BlockFormat::F32, 1, 32, &floats).unwrap();
    let q8 = Input::Q8 { quants: &[0; 32], scales: &[0.0] };
    let error = matmul(&pool, kernels, &view, &q8, 1, &mut [0.0]).unwrap_err();
    assert!(matches!(error, QuantError::Activations { .. }));
    assert!(MatrixView::new(BlockFormat::Q4_0, 1, 33, &[0; 18]).is_err());
    assert!(MatrixView::new(BlockFormat::F32, usize::MAX, 4, &[0; 16]).is_err());
    assert!(quantize_row(BlockFormat::Q4_0, &[0.0; 32], &mut [0; 17]).is_err());
    assert!(dequantize_row(BlockFormat::Q4_0, &[0; 18], &mut [0.0; 31]).is_err());
}
