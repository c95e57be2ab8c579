//! Q4_0: an F16 scale, then 16 bytes; byte `j` holds weight `j` in its low nibble and weight `j + 16` in its high one,
//! each plus 8.

use half::f16;

/// Weights of a block.
pub(crate) const WEIGHTS: usize = 32;
/// Bytes of a block.
pub(crate) const BYTES: usize = 2 + WEIGHTS / 2;

/// A block's scale.
pub(crate) fn scale(block: &[u8; BYTES]) -> f32 {
    f16::from_le_bytes([block[0], block[1]]).to_f32()
}

/// A block's weights without their scale.
pub(crate) fn unpack(block: &[u8; BYTES]) -> [i8; WEIGHTS] {
    let mut weights = [0; WEIGHTS];
    let (low, high) = weights.split_at_mut(WEIGHTS / 2);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (byte & 0x0f) as i8 - 8;
        *high = (byte >> 4) as i8 - 8;
    }
    weights
}

/// Scale: the value of largest magnitude, the first among equals, over -8; quants: rounded half up and cut at 15.
pub(crate) fn quantize(src: &[f32], dst: &mut [u8]) {
    for (block, src) in dst.as_chunks_mut::<BYTES>().0.iter_mut().zip(src.as_chunks::<WEIGHTS>().0) {
        let (mut magnitude, mut largest) = (0.0f32, 0.0f32);
        for &x in src {
            if x.abs() > magnitude {
                (magnitude, largest) = (x.abs(), x);
            }
        }
        let scale = largest / -8.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let (head, quants) = block.split_at_mut(2);
        head.copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        let nibble = |x: f32| ((x * inverse + 8.5) as i8).min(15) as u8;
        let (low, high) = src.split_at(WEIGHTS / 2);
        for ((quant, &low), &high) in quants.iter_mut().zip(low).zip(high) {
            *quant = nibble(low) | nibble(high) << 4;
        }
    }
}

pub(crate) fn dequantize(src: &[u8], dst: &mut [f32]) {
    for (block, dst) in src.as_chunks::<BYTES>().0.iter().zip(dst.as_chunks_mut::<WEIGHTS>().0) {
        let scale = scale(block);
        for (x, weight) in dst.iter_mut().zip(unpack(block)) {
            *x = f32::from(weight) * scale;
        }
    }
}
