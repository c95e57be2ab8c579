//! AVX-512 (F, BW, VL, VNNI): 512-bit floats, 256-bit integer dot products.
// Intrinsics on pointers into slices whose lengths are checked before the loops.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::x86::{BF16, F16, F32, Q4_0, Q8_0, Tail, half_to_float, nibbles, prefetch, quant_tile, sum8};
use super::{LANES, Out, loops, table};
use crate::block::{q4_0, q8_0};
use crate::format::Q8_BLOCK;
use crate::matrix::MatrixView;

use super::x86::Source as NarrowSource;

/// Weights as floats in two registers.
trait Source: NarrowSource {
    /// 32 weights.
    ///
    /// # Safety
    /// `group` is valid for `GROUP_BYTES` bytes; the caller has AVX-512.
    #[inline(always)]
    unsafe fn load_wide(group: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b, c, d] = Self::load(group);
            [join(a, b), join(c, d)]
        }
    }
}

impl Source for F32 {
    #[inline(always)]
    unsafe fn load_wide(group: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { std::array::from_fn(|part| _mm512_loadu_ps(group.add(64 * part).cast())) }
    }
}

impl Source for F16 {
    #[inline(always)]
    unsafe fn load_wide(group: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            std::array::from_fn(|part| _mm512_cvtph_ps(_mm256_loadu_si256(group.add(32 * part).cast())))
        }
    }
}

impl Source for BF16 {
    #[inline(always)]
    unsafe fn load_wide(group: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            std::array::from_fn(|part| {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(group.add(32 * part).cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
            })
        }
    }
}

impl Source for Q8_0 {}
impl Source for Q4_0 {}

#[inline(always)]
unsafe fn join(low: __m256, high: __m256) -> __m512 {
    // SAFETY: the caller has AVX-512F.
    unsafe {
        let low = _mm512_castpd256_pd512(_mm256_castps_pd(low));
        _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_castps_pd(high)))
    }
}

/// Blocks of 32 weights that meet 8-bit activations.
trait QuantBlock {
    const BYTES: usize;

    /// In lane `j` the exact dot product of elements `4j..4j + 4`.
    ///
    /// # Safety
    /// `block` is valid for `BYTES` bytes; the caller has AVX-512 VNNI and VL. Activations are above -128.
    unsafe fn dot(block: *const u8, quants: __m256i) -> __m256i;
}

impl QuantBlock for Q8_0 {
    const BYTES: usize = q8_0::BYTES;

    #[inline(always)]
    unsafe fn dot(block: *const u8, quants: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let weights = _mm256_loadu_si256(block.add(2).cast());
            let signed = _mm256_sign_epi8(quants, weights);
            _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_abs_epi8(weights), signed)
        }
    }
}

impl QuantBlock for Q4_0 {
    const BYTES: usize = q4_0::BYTES;

    #[inline(always)]
    unsafe fn dot(block: *const u8, quants: __m256i) -> __m256i {
        // SAFETY: the caller's promise. The nibbles' offset of 8 is taken off the sums, which all rows share.
        unsafe {
            let zero = _mm256_setzero_si256();
            let dots = _mm256_dpbusd_epi32(zero, nibbles(block.add(2)), quants);
            _mm256_sub_epi32(dots, _mm256_dpbusd_epi32(zero, _mm256_set1_epi8(8), quants))
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
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
    let mut sums = [[[_mm512_setzero_ps(); 2]; TOKENS]; ROWS];
    for group in 0..groups {
        for row in 0..ROWS {
            // SAFETY: `group` is below the number of whole groups that every row was checked to hold.
            let weights = unsafe {
                let address = rows[row].as_ptr().add(group * S::GROUP_BYTES);
                prefetch(address);
                if S::GROUP_BYTES > 64 {
                    prefetch(address.wrapping_add(64));
                }
                S::load_wide(address)
            };
            for token in 0..TOKENS {
                for part in 0..2 {
                    // SAFETY: as above, for the vectors.
                    let x = unsafe { _mm512_loadu_ps(xs[token].as_ptr().add(group * LANES + 16 * part)) };
                    sums[row][token][part] = _mm512_fmadd_ps(weights[part], x, sums[row][token][part]);
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
                    let weights = S::load_wide(tail.weights());
                    for part in 0..2 {
                        let x = _mm512_loadu_ps(tail.values().add(16 * part));
                        sums[row][token][part] = _mm512_fmadd_ps(weights[part], x, sums[row][token][part]);
                    }
                }
            }
        }
    }
    sums.map(|row| {
        row.map(|[a, b]| {
            let sixteen = _mm512_add_ps(a, b);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sixteen)));
            let eight = _mm256_add_ps(_mm512_castps512_ps256(sixteen), high);
            // SAFETY: this function has AVX.
            unsafe { sum8(eight) }
        })
    })
}

quant_tile!(#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]);

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn axpy<S: Source>(scale: f32, row: &[u8], acc: &mut [f32]) {
    super::x86::axpy::<S>(scale, row, acc);
}

loops!(#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]; float_tokens: 4, quant_tokens: 4);
table!("avx512");
