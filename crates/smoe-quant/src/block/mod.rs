//! From floats to blocks and back, one file for each kind of block.

pub(crate) mod float;
pub(crate) mod q4_0;
pub(crate) mod q8_0;

use crate::error::QuantError;
use crate::format::BlockFormat;

/// Converts a row of floats; `dst` is as long as [`BlockFormat::row_bytes`] says.
///
/// Q8_0 and Q4_0 are quantized as GGML's reference code does, bit for bit; F16 and BF16 round to the nearest, ties to even.
///
/// # Errors
/// The row does not divide into blocks or `dst` has another length.
pub fn quantize_row(format: BlockFormat, src: &[f32], dst: &mut [u8]) -> Result<(), QuantError> {
    check(format, src.len(), dst.len())?;
    match format {
        BlockFormat::F32 => float::f32_to_bytes(src, dst),
        BlockFormat::F16 => float::f16_to_bytes(src, dst),
        BlockFormat::BF16 => float::bf16_to_bytes(src, dst),
        BlockFormat::Q8_0 => q8_0::quantize(src, dst),
        BlockFormat::Q4_0 => q4_0::quantize(src, dst),
    }
    Ok(())
}

/// Converts a row back to floats.
///
/// # Errors
/// The row does not divide into blocks or `src` has another length than it.
pub fn dequantize_row(format: BlockFormat, src: &[u8], dst: &mut [f32]) -> Result<(), QuantError> {
    check(format, dst.len(), src.len())?;
    dequantize_unchecked(format, src, dst);
    Ok(())
}

/// [`dequantize_row`] for lengths that were checked before.
pub(crate) fn dequantize_unchecked(format: BlockFormat, src: &[u8], dst: &mut [f32]) {
    match format {
        BlockFormat::F32 => float::f32_from_bytes(src, dst),
        BlockFormat::F16 => float::f16_from_bytes(src, dst),
        BlockFormat::BF16 => float::bf16_from_bytes(src, dst),
        BlockFormat::Q8_0 => q8_0::dequantize(src, dst),
        BlockFormat::Q4_0 => q4_0::dequantize(src, dst),
    }
}

fn check(format: BlockFormat, columns: usize, bytes: usize) -> Result<(), QuantError> {
    let expected = format.row_bytes(columns).ok_or(QuantError::Columns {
        format,
        columns,
        block: format.block_len(),
    })?;
    if bytes == expected { Ok(()) } else { Err(QuantError::Length { what: "a row", expected, found: bytes }) }
}
