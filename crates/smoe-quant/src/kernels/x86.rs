//! What AVX2 and AVX-512 kernels share: 8 lanes at a time and how weights are loaded.
// Intrinsics; everything here is inlined into functions that have AVX2, FMA and F16C.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::LANES;
use crate::block::{q4_0, q8_0};

/// How far ahead of its use a row is asked for.
pub(super) const PREFETCH_BYTES: usize = 4096;

/// Asks for the cache line that lies [`PREFETCH_BYTES`] further on; never faults, wherever that is.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    // SAFETY: a prefetch of any address is allowed.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(PREFETCH_BYTES).cast()) };
}

/// Weights that can be read as floats, 32 at a time.
pub(super) trait Source {
    /// Bytes of 32 weights.
    const GROUP_BYTES: usize;
    /// Bytes of a weight where weights stand alone; only such formats have tails.
    const WEIGHT_BYTES: usize;

    /// 32 weights.
    ///
    /// # Safety
    /// `group` is valid for `GROUP_BYTES` bytes; the caller has AVX2 and F16C.
    unsafe fn load(group: *const u8) -> [__m256; 4];
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;
#[allow(non_camel_case_types, reason = "GGUF's own name")]
pub(super) struct Q8_0;
#[allow(non_camel_case_types, reason = "GGUF's own name")]
pub(super) struct Q4_0;

impl Source for F32 {
    const GROUP_BYTES: usize = 4 * LANES;
    const WEIGHT_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [__m256; 4] {
        // SAFETY: the caller's promise.
        unsafe { std::array::from_fn(|part| _mm256_loadu_ps(group.add(32 * part).cast())) }
    }
}

impl Source for F16 {
    const GROUP_BYTES: usize = 2 * LANES;
    const WEIGHT_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [__m256; 4] {
        // SAFETY: the caller's promise.
        unsafe { std::array::from_fn(|part| _mm256_cvtph_ps(_mm_loadu_si128(group.add(16 * part).cast()))) }
    }
}

impl Source for BF16 {
    const GROUP_BYTES: usize = 2 * LANES;
    const WEIGHT_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [__m256; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            std::array::from_fn(|part| {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(group.add(16 * part).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            })
        }
    }
}

impl Source for Q8_0 {
    const GROUP_BYTES: usize = q8_0::BYTES;
    const WEIGHT_BYTES: usize = 0;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [__m256; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            scaled(
                half_to_float(group),
                std::array::from_fn(|part| _mm_loadl_epi64(group.add(2 + 8 * part).cast())),
            )
        }
    }
}

impl Source for Q4_0 {
    const GROUP_BYTES: usize = q4_0::BYTES;
    const WEIGHT_BYTES: usize = 0;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [__m256; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let weights = _mm256_sub_epi8(nibbles(group.add(2)), _mm256_set1_epi8(8));
            let (low, high) = (_mm256_castsi256_si128(weights), _mm256_extracti128_si256::<1>(weights));
            let parts = [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)];
            scaled(half_to_float(group), parts)
        }
    }
}

/// Four groups of 8 bytes as floats times a scale; exact, as the scale has 11 significant bits and the bytes 8.
#[inline(always)]
unsafe fn scaled(scale: f32, parts: [__m128i; 4]) -> [__m256; 4] {
    // SAFETY: inlined into functions that have AVX2.
    unsafe {
        parts.map(|part| _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part)), _mm256_set1_ps(scale)))
    }
}

/// The 16-bit float at an address.
#[inline(always)]
pub(super) unsafe fn half_to_float(address: *const u8) -> f32 {
    // SAFETY: the caller has F16C and the address is valid for two bytes.
    unsafe {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(address.cast::<u16>().read_unaligned()))))
    }
}

/// 32 nibbles: low ones first.
#[inline(always)]
pub(super) unsafe fn nibbles(bytes: *const u8) -> __m256i {
    // SAFETY: the caller has AVX2 and 16 bytes there.
    unsafe {
        let low = _mm_loadu_si128(bytes.cast());
        let high = _mm_srli_epi16::<4>(low);
        _mm256_and_si256(_mm256_set_m128i(high, low), _mm256_set1_epi8(15))
    }
}

/// The sum of 8 lanes by halves: 4, 2, 1.
#[inline(always)]
pub(super) unsafe fn sum8(lanes: __m256) -> f32 {
    // SAFETY: the caller has AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// A tail of fewer than 32 weights and values, padded with zeros to a whole group.
pub(super) struct Tail {
    weights: [u8; 4 * LANES],
    values: [f32; LANES],
}

impl Tail {
    pub(super) fn new(weights: &[u8], values: &[f32]) -> Self {
        let mut tail = Self { weights: [0; 4 * LANES], values: [0.0; LANES] };
        tail.weights[..weights.len()].copy_from_slice(weights);
        tail.values[..values.len()].copy_from_slice(values);
        tail
    }

    pub(super) fn weights(&self) -> *const u8 {
        self.weights.as_ptr()
    }

    pub(super) fn values(&self) -> *const f32 {
        self.values.as_ptr()
    }
}

/// `acc += scale × row`, element by element.
///
/// Inlined into functions that have AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn axpy<S: Source>(scale: f32, row: &[u8], acc: &mut [f32]) {
    let groups = acc.len() / LANES;
    let whole = groups * LANES;
    let bytes = (acc.len() - whole) * S::WEIGHT_BYTES;
    assert!(row.len() >= groups * S::GROUP_BYTES + bytes);
    let scales = _mm256_set1_ps(scale);
    for group in 0..groups {
        // SAFETY: `group` is below the number of whole groups of both slices.
        unsafe {
            let weights = S::load(row.as_ptr().add(group * S::GROUP_BYTES));
            for (part, weights) in weights.into_iter().enumerate() {
                let address = acc.as_mut_ptr().add(group * LANES + 8 * part);
                _mm256_storeu_ps(address, _mm256_fmadd_ps(scales, weights, _mm256_loadu_ps(address)));
            }
        }
    }
    if whole < acc.len() {
        let start = groups * S::GROUP_BYTES;
        let tail = Tail::new(&row[start..start + bytes], &[]);
        let mut weights = [0.0f32; LANES];
        // SAFETY: a tail holds a whole group; the array holds 32 floats.
        unsafe {
            for (part, loaded) in S::load(tail.weights()).into_iter().enumerate() {
                _mm256_storeu_ps(weights.as_mut_ptr().add(8 * part), loaded);
            }
        }
        for (acc, weight) in acc[whole..].iter_mut().zip(weights) {
            *acc = scale.mul_add(weight, *acc);
        }
    }
}

/// The tile for 8-bit activations, compiled with an instruction set's features. The including module provides `QuantBlock`.
macro_rules! quant_tile {
    (#[$features:meta]) => {
        #[inline]
        #[$features]
        fn quant_tile<B: QuantBlock, const ROWS: usize, const TOKENS: usize>(
            rows: [&[u8]; ROWS],
            xs: [(&[i8], &[f32]); TOKENS],
        ) -> [[f32; TOKENS]; ROWS] {
            let blocks = xs[0].1.len();
            assert!(rows.iter().all(|row| row.len() >= blocks * B::BYTES));
            assert!(
                xs.iter().all(|(quants, scales)| scales.len() == blocks && quants.len() == blocks * Q8_BLOCK)
            );
            let mut sums = [[[_mm256_setzero_ps(); 2]; TOKENS]; ROWS];
            let mut step = |block: usize, group: usize| {
                for token in 0..TOKENS {
                    let (quants, scales) = xs[token];
                    // SAFETY: `block` is below the number of blocks that rows and vectors were checked to hold.
                    let (quants, scale) = unsafe {
                        (
                            _mm256_loadu_si256(quants.as_ptr().add(block * Q8_BLOCK).cast()),
                            *scales.get_unchecked(block),
                        )
                    };
                    for row in 0..ROWS {
                        // SAFETY: as above.
                        let (dots, weight_scale) = unsafe {
                            let address = rows[row].as_ptr().add(block * B::BYTES);
                            if token == 0 {
                                prefetch(address);
                            }
                            (B::dot(address, quants), half_to_float(address))
                        };
                        let scale = _mm256_set1_ps(weight_scale * scale);
                        let sum = &mut sums[row][token][group];
                        *sum = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots), *sum);
                    }
                }
            };
            let mut block = 0;
            while block + 2 <= blocks {
                step(block, 0);
                step(block + 1, 1);
                block += 2;
            }
            if block < blocks {
                step(block, 0);
            }
            // SAFETY: this function has AVX2.
            sums.map(|row| row.map(|[even, odd]| unsafe { sum8(_mm256_add_ps(even, odd)) }))
        }
    };
}

pub(super) use quant_tile;
