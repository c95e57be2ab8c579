//! Q8_0: an F16 scale, then 32 signed bytes.

use half::f16;

/// Weights of a block.
pub(crate) const WEIGHTS: usize = 32;
/// Bytes of a block.
pub(crate) const BYTES: usize = 2 + WEIGHTS;

/// A block's scale.
pub(crate) fn scale(block: &[u8; BYTES]) -> f32 {
    f16::from_le_bytes([block[0], block[1]]).to_f32()
}

/// Scale: the largest magnitude over 127; quants: rounded half away from zero.
pub(crate) fn quantize(src: &[f32], dst: &mut [u8]) {
    for (block, src) in dst.as_chunks_mut::<BYTES>().0.iter_mut().zip(src.as_chunks::<WEIGHTS>().0) {
        let largest = src.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let (head, quants) = block.split_at_mut(2);
        head.copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        for (quant, x) in quants.iter_mut().zip(src) {
            *quant = (x * inverse).round() as i8 as u8;
        }
    }
}

pub(crate) fn dequantize(src: &[u8], dst: &mut [f32]) {
    for (block, dst) in src.as_chunks::<BYTES>().0.iter().zip(dst.as_chunks_mut::<WEIGHTS>().0) {
        let scale = scale(block);
        for (x, &quant) in dst.iter_mut().zip(&block[2..]) {
            *x = f32::from(quant as i8) * scale;
        }
    }
}
