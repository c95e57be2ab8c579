//! AVX2 with FMA and F16C.
// Intrinsics on pointers into slices whose lengths are checked before the loops.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::x86::{
    BF16, F16, F32, Q4_0, Q8_0, Source, Tail, half_to_float, nibbles, prefetch, quant_tile, sum8,
};
use super::{LANES, Out, loops, table};
use crate::block::{q4_0, q8_0};
use crate::format::Q8_BLOCK;
use crate::matrix::MatrixView;

/// Blocks of 32 weights that meet 8-bit activations.
pub(super) trait QuantBlock {
    const BYTES: usize;

    /// In lane `j` the exact dot product of elements `4j..4j + 4`.
    ///
    /// # Safety
    /// `block` is valid for `BYTES` bytes; the caller has AVX2. Activations are above -128.
    unsafe fn dot(block: *const u8, quants: __m256i) -> __m256i;
}

impl QuantBlock for Q8_0 {
    const BYTES: usize = q8_0::BYTES;

    #[inline(always)]
    unsafe fn dot(block: *const u8, quants: __m256i) -> __m256i {
        // SAFETY: the caller's promise. Pairs are at most 2 × 128 × 127, which 16 bits hold.
        unsafe {
            let weights = _mm256_loadu_si256(block.add(2).cast());
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(quants, weights));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }
}

impl QuantBlock for Q4_0 {
    const BYTES: usize = q4_0::BYTES;

    #[inline(always)]
    unsafe fn dot(block: *const u8, quants: __m256i) -> __m256i {
        // SAFETY: the caller's promise. The nibbles' offset of 8 is taken off the sums, which all rows share.
        unsafe {
            let pairs = _mm256_maddubs_epi16(nibbles(block.add(2)), quants);
            let offset = _mm256_maddubs_epi16(_mm256_set1_epi8(8), quants);
            _mm256_madd_epi16(_mm256_sub_epi16(pairs, offset), _mm256_set1_epi16(1))
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn float_tile<S: Source, const ROWS: usize, const TOKENS: usize>(
    rows: [&[u8]; ROWS],
    xs: [&[f32]; TOKENS],
) -> [[f32; TOKENS]; ROWS] {
    let columns = xs[0].len();
    let groups = columns / LANES;
    let whole = groups * LANES;
    assert!(
        rows.iter().all(|row| row.len() >= groups * S::GROUP_BYTES + (columns - whole) * S::WEIGHT_BYTES)
    );
    assert!(xs.iter().all(|x| x.len() == columns));
    let mut sums = [[[_mm256_setzero_ps(); 4]; TOKENS]; ROWS];
    for group in 0..groups {
        for row in 0..ROWS {
            // SAFETY: `group` is below the number of whole groups that every row was checked to hold.
            let weights = unsafe {
                let address = rows[row].as_ptr().add(group * S::GROUP_BYTES);
                prefetch(address);
                if S::GROUP_BYTES > 64 {
                    prefetch(address.wrapping_add(64));
                }
                S::load(address)
            };
            for token in 0..TOKENS {
                for part in 0..4 {
                    // SAFETY: as above, for the vectors.
                    let x = unsafe { _mm256_loadu_ps(xs[token].as_ptr().add(group * LANES + 8 * part)) };
                    sums[row][token][part] = _mm256_fmadd_ps(weights[part], x, sums[row][token][part]);
                }
            }
        }
    }
    if whole < columns {
        for row in 0..ROWS {
            for token in 0..TOKENS {
                let start = groups * S::GROUP_BYTES;
                let bytes = (columns - whole) * S::WEIGHT_BYTES;
                let tail = Tail::new(&rows[row][start..start + bytes], &xs[token][whole..]);
                // SAFETY: a tail holds a whole group of weights of at most 4 bytes, and as many values.
                unsafe {
                    let weights = S::load(tail.weights());
                    for part in 0..4 {
                        let x = _mm256_loadu_ps(tail.values().add(8 * part));
                        sums[row][token][part] = _mm256_fmadd_ps(weights[part], x, sums[row][token][part]);
                    }
                }
            }
        }
    }
    sums.map(|row| {
        row.map(|[a, b, c, d]| {
            let eight = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
            // SAFETY: this function has AVX2.
            unsafe { sum8(eight) }
        })
    })
}

quant_tile!(#[target_feature(enable = "avx2,fma,f16c")]);

#[target_feature(enable = "avx2,fma,f16c")]
fn axpy<S: Source>(scale: f32, row: &[u8], acc: &mut [f32]) {
    super::x86::axpy::<S>(scale, row, acc);
}

loops!(#[target_feature(enable = "avx2,fma,f16c")]; float_tokens: 3, quant_tokens: 4);
table!("avx2");
