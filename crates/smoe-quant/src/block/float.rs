//! Float formats, little-endian.

use half::{bf16, f16};

pub(crate) fn f32_to_bytes(src: &[f32], dst: &mut [u8]) {
    for (dst, src) in dst.as_chunks_mut::<4>().0.iter_mut().zip(src) {
        *dst = src.to_le_bytes();
    }
}

pub(crate) fn f32_from_bytes(src: &[u8], dst: &mut [f32]) {
    for (dst, &src) in dst.iter_mut().zip(src.as_chunks::<4>().0) {
        *dst = f32::from_le_bytes(src);
    }
}

pub(crate) fn f16_to_bytes(src: &[f32], dst: &mut [u8]) {
    for (dst, &src) in dst.as_chunks_mut::<2>().0.iter_mut().zip(src) {
        *dst = f16::from_f32(src).to_le_bytes();
    }
}

pub(crate) fn f16_from_bytes(src: &[u8], dst: &mut [f32]) {
    for (dst, &src) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
        *dst = f16::from_le_bytes(src).to_f32();
    }
}

pub(crate) fn bf16_to_bytes(src: &[f32], dst: &mut [u8]) {
    for (dst, &src) in dst.as_chunks_mut::<2>().0.iter_mut().zip(src) {
        *dst = bf16::from_f32(src).to_le_bytes();
    }
}

pub(crate) fn bf16_from_bytes(src: &[u8], dst: &mut [f32]) {
    for (dst, &src) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
        *dst = f32::from_bits(u32::from(u16::from_le_bytes(src)) << 16);
    }
}
