//! NEON, which every 64-bit ARM processor has.
// Intrinsics on pointers into slices whose lengths are checked before the loops.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::ops::Range;

use super::{LANES, Out, loops, table};
use crate::block::{dequantize_unchecked, q4_0, q8_0};
use crate::format::{BlockFormat, Q8_BLOCK};
use crate::matrix::MatrixView;

/// Registers of four lanes.
const PARTS: usize = LANES / 4;

/// Weights that can be read as floats, 32 at a time.
trait Source {
    const FORMAT: BlockFormat;
    /// Bytes of 32 weights.
    const GROUP_BYTES: usize;
    /// Bytes of a weight where weights stand alone; only such formats have tails.
    const WEIGHT_BYTES: usize;

    /// 32 weights.
    ///
    /// # Safety
    /// `group` is valid for `GROUP_BYTES` bytes; the caller has NEON.
    unsafe fn load(group: *const u8) -> [float32x4_t; PARTS];
}

/// Blocks of 32 weights that meet 8-bit activations.
trait QuantBlock {
    const BYTES: usize;

    /// Weights without their scale.
    ///
    /// # Safety
    /// `block` is valid for `BYTES` bytes; the caller has NEON.
    unsafe fn load(block: *const u8) -> [int8x16_t; 2];
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
    const GROUP_BYTES: usize = 4 * LANES;
    const WEIGHT_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [float32x4_t; PARTS] {
        // SAFETY: the caller's promise.
        unsafe { std::array::from_fn(|part| vreinterpretq_f32_u8(vld1q_u8(group.add(16 * part)))) }
    }
}

impl Source for F16 {
    const FORMAT: BlockFormat = BlockFormat::F16;
    const GROUP_BYTES: usize = 2 * LANES;
    const WEIGHT_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [float32x4_t; PARTS] {
        // The conversion instruction is not stable yet: the bits are moved to their places by integer arithmetic.
        // Halves are shifted into a float's fields and multiplied by 2^112, which is exact, subnormals included;
        // infinities and NaNs get the float's exponent afterwards.
        // SAFETY: the caller's promise.
        unsafe {
            std::array::from_fn(|part| {
                let halves = vmovl_u16(vreinterpret_u16_u8(vld1_u8(group.add(8 * part))));
                let sign = vshlq_n_u32::<16>(vandq_u32(halves, vdupq_n_u32(0x8000)));
                let magnitude = vshlq_n_u32::<13>(vandq_u32(halves, vdupq_n_u32(0x7fff)));
                let scaled = vmulq_n_f32(vreinterpretq_f32_u32(magnitude), f32::from_bits(239 << 23));
                let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00 << 13));
                let exponent = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
                let bits = vorrq_u32(vreinterpretq_u32_f32(scaled), exponent);
                vreinterpretq_f32_u32(vorrq_u32(bits, sign))
            })
        }
    }
}

impl Source for BF16 {
    const FORMAT: BlockFormat = BlockFormat::BF16;
    const GROUP_BYTES: usize = 2 * LANES;
    const WEIGHT_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [float32x4_t; PARTS] {
        // SAFETY: the caller's promise.
        unsafe {
            std::array::from_fn(|part| {
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(group.add(8 * part)))))
            })
        }
    }
}

impl Source for Q8_0 {
    const FORMAT: BlockFormat = BlockFormat::Q8_0;
    const GROUP_BYTES: usize = q8_0::BYTES;
    const WEIGHT_BYTES: usize = 0;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [float32x4_t; PARTS] {
        // SAFETY: the caller's promise.
        unsafe { scaled(scale(group), <Self as QuantBlock>::load(group)) }
    }
}

impl Source for Q4_0 {
    const FORMAT: BlockFormat = BlockFormat::Q4_0;
    const GROUP_BYTES: usize = q4_0::BYTES;
    const WEIGHT_BYTES: usize = 0;

    #[inline(always)]
    unsafe fn load(group: *const u8) -> [float32x4_t; PARTS] {
        // SAFETY: the caller's promise.
        unsafe { scaled(scale(group), <Self as QuantBlock>::load(group)) }
    }
}

impl QuantBlock for Q8_0 {
    const BYTES: usize = q8_0::BYTES;

    #[inline(always)]
    unsafe fn load(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { [vld1q_s8(block.add(2).cast()), vld1q_s8(block.add(18).cast())] }
    }
}

impl QuantBlock for Q4_0 {
    const BYTES: usize = q4_0::BYTES;

    #[inline(always)]
    unsafe fn load(block: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = vld1q_u8(block.add(2));
            let low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
            let eight = vdupq_n_s8(8);
            [vsubq_s8(low, eight), vsubq_s8(high, eight)]
        }
    }
}

/// A block's scale.
#[inline(always)]
unsafe fn scale(block: *const u8) -> f32 {
    // SAFETY: the caller has two bytes there.
    half::f16::from_bits(u16::from_le(unsafe { block.cast::<u16>().read_unaligned() })).to_f32()
}

/// 32 bytes as floats times a scale; exact, as the scale has 11 significant bits and the bytes 8.
#[inline(always)]
unsafe fn scaled(scale: f32, [first, second]: [int8x16_t; 2]) -> [float32x4_t; PARTS] {
    // SAFETY: inlined into functions that have NEON.
    unsafe {
        let eights = [vget_low_s8(first), vget_high_s8(first), vget_low_s8(second), vget_high_s8(second)]
            .map(|x| vmovl_s8(x));
        std::array::from_fn(|part| {
            let eight = eights[part / 2];
            let four = if part % 2 == 0 { vget_low_s16(eight) } else { vget_high_s16(eight) };
            vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(four)), scale)
        })
    }
}

/// Four lanes by halves: 2, 1.
#[inline(always)]
unsafe fn sum4(lanes: float32x4_t) -> f32 {
    // SAFETY: inlined into functions that have NEON.
    unsafe {
        let two = vadd_f32(vget_low_f32(lanes), vget_high_f32(lanes));
        vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
    }
}

#[inline]
#[target_feature(enable = "neon")]
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
    let mut sums = [[[vdupq_n_f32(0.0); PARTS]; TOKENS]; ROWS];
    for group in 0..groups {
        for row in 0..ROWS {
            // SAFETY: `group` is below the number of whole groups that every row was checked to hold.
            let weights = unsafe { S::load(rows[row].as_ptr().add(group * S::GROUP_BYTES)) };
            for token in 0..TOKENS {
                for part in 0..PARTS {
                    // SAFETY: as above, for the vectors.
                    let x = unsafe { vld1q_f32(xs[token].as_ptr().add(group * LANES + 4 * part)) };
                    sums[row][token][part] = vfmaq_f32(sums[row][token][part], weights[part], x);
                }
            }
        }
    }
    if whole < columns {
        for row in 0..ROWS {
            let start = groups * S::GROUP_BYTES;
            let bytes = (columns - whole) * S::WEIGHT_BYTES;
            let mut tail = [0_u8; 4 * LANES];
            tail[..bytes].copy_from_slice(&rows[row][start..start + bytes]);
            // SAFETY: the array holds a whole group of weights of at most 4 bytes.
            let weights = unsafe { S::load(tail.as_ptr()) };
            for token in 0..TOKENS {
                let mut values = [0.0f32; LANES];
                values[..columns - whole].copy_from_slice(&xs[token][whole..]);
                for part in 0..PARTS {
                    // SAFETY: the array holds 32 values.
                    let x = unsafe { vld1q_f32(values.as_ptr().add(4 * part)) };
                    sums[row][token][part] = vfmaq_f32(sums[row][token][part], weights[part], x);
                }
            }
        }
    }
    sums.map(|row| {
        row.map(|lanes| {
            // Lane j + (j + 16), then 8, then 4: the same pairs as the reference's, register by register.
            let sixteen: [float32x4_t; 4] =
                std::array::from_fn(|part| vaddq_f32(lanes[part], lanes[part + 4]));
            let eight = [vaddq_f32(sixteen[0], sixteen[2]), vaddq_f32(sixteen[1], sixteen[3])];
            // SAFETY: this function has NEON.
            unsafe { sum4(vaddq_f32(eight[0], eight[1])) }
        })
    })
}

/// In lane `j` of eight the exact dot product of elements `4j..4j + 4`.
#[inline(always)]
unsafe fn dot_block(weights: [int8x16_t; 2], quants: [int8x16_t; 2]) -> [int32x4_t; 2] {
    // SAFETY: inlined into functions that have NEON. Products are at most 128 × 127, which 16 bits hold.
    unsafe {
        std::array::from_fn(|half| {
            let low = vmull_s8(vget_low_s8(weights[half]), vget_low_s8(quants[half]));
            let high = vmull_s8(vget_high_s8(weights[half]), vget_high_s8(quants[half]));
            vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))
        })
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn quant_tile<B: QuantBlock, const ROWS: usize, const TOKENS: usize>(
    rows: [&[u8]; ROWS],
    xs: [(&[i8], &[f32]); TOKENS],
) -> [[f32; TOKENS]; ROWS] {
    let blocks = xs[0].1.len();
    assert!(rows.iter().all(|row| row.len() >= blocks * B::BYTES));
    assert!(xs.iter().all(|(quants, scales)| scales.len() == blocks && quants.len() == blocks * Q8_BLOCK));
    let mut sums = [[[[vdupq_n_f32(0.0); 2]; 2]; TOKENS]; ROWS];
    let mut step = |block: usize, group: usize| {
        for row in 0..ROWS {
            // SAFETY: `block` is below the number of blocks that rows and vectors were checked to hold.
            let (weights, weight_scale) = unsafe {
                let address = rows[row].as_ptr().add(block * B::BYTES);
                (B::load(address), scale(address))
            };
            for token in 0..TOKENS {
                let (quants, scales) = xs[token];
                // SAFETY: as above.
                let dots = unsafe {
                    let address = quants.as_ptr().add(block * Q8_BLOCK);
                    dot_block(weights, [vld1q_s8(address), vld1q_s8(address.add(16))])
                };
                let scale = vdupq_n_f32(weight_scale * scales[block]);
                for half in 0..2 {
                    let sum = &mut sums[row][token][group][half];
                    *sum = vfmaq_f32(*sum, scale, vcvtq_f32_s32(dots[half]));
                }
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
    sums.map(|row| {
        row.map(|[even, odd]| {
            let halves = [vaddq_f32(even[0], odd[0]), vaddq_f32(even[1], odd[1])];
            // SAFETY: this function has NEON.
            unsafe { sum4(vaddq_f32(halves[0], halves[1])) }
        })
    })
}

#[target_feature(enable = "neon")]
fn axpy<S: Source>(scale: f32, row: &[u8], acc: &mut [f32]) {
    let groups = acc.len() / LANES;
    let whole = groups * LANES;
    let bytes = (acc.len() - whole) * S::WEIGHT_BYTES;
    assert!(row.len() >= groups * S::GROUP_BYTES + bytes);
    let scales = vdupq_n_f32(scale);
    for group in 0..groups {
        // SAFETY: `group` is below the number of whole groups of both slices.
        unsafe {
            let weights = S::load(row.as_ptr().add(group * S::GROUP_BYTES));
            for (part, weights) in weights.into_iter().enumerate() {
                let address = acc.as_mut_ptr().add(group * LANES + 4 * part);
                vst1q_f32(address, vfmaq_f32(vld1q_f32(address), scales, weights));
            }
        }
    }
    let start = groups * S::GROUP_BYTES;
    let mut weights = [0.0f32; LANES];
    let rest = acc.len() - whole;
    dequantize_unchecked(S::FORMAT, &row[start..start + bytes], &mut weights[..rest]);
    for (acc, weight) in acc[whole..].iter_mut().zip(weights) {
        *acc = scale.mul_add(weight, *acc);
    }
}

loops!(#[target_feature(enable = "neon")]; float_tokens: 2, quant_tokens: 4);
table!("neon");
