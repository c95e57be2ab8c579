//! Activations in 8 bits.

use crate::format::Q8_BLOCK;

/// Adding and subtracting it rounds a float below 2²² to the nearest integer, ties to even, on every processor.
const ROUNDER: f32 = 12_582_912.0;

/// Quantizes activations in blocks of 32: scale = largest magnitude / 127, quant = x / scale, ties to even.
///
/// `x` and `quants` have the same length, a multiple of 32; `scales` has one entry for each block. The scale of a block
/// that holds a NaN or an infinity is NaN, so that whatever is computed from it shows.
pub fn quantize_activations(x: &[f32], quants: &mut [i8], scales: &mut [f32]) {
    debug_assert!(x.len() == quants.len() && x.len() == scales.len() * Q8_BLOCK);
    let blocks = x.as_chunks::<Q8_BLOCK>().0.iter().zip(quants.as_chunks_mut::<Q8_BLOCK>().0);
    for ((x, quants), scale) in blocks.zip(scales) {
        let mut largest = 0.0f32;
        let mut spoiled = 0.0f32;
        for &x in x {
            largest = largest.max(x.abs());
            spoiled += x * 0.0;
        }
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        // Zero, unless a value was not finite.
        *scale = largest / 127.0 + spoiled;
        for (quant, &x) in quants.iter_mut().zip(x) {
            // Largest magnitudes that are subnormal make the inverse infinite; such blocks quantize to their sign.
            let scaled = (x * inverse).clamp(-127.0, 127.0);
            *quant = ((scaled + ROUNDER) - ROUNDER) as i8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(x: &[f32; 32]) -> ([i8; 32], f32) {
        let (mut quants, mut scale) = ([0; 32], [0.0]);
        quantize_activations(x, &mut quants, &mut scale);
        (quants, scale[0])
    }

    #[test]
    fn the_largest_value_is_127() {
        let mut x = [0.0; 32];
        (x[3], x[4], x[5]) = (-254.0, 3.0, 5.0);
        let (quants, scale) = quantized(&x);
        assert_eq!(scale, 2.0);
        assert_eq!((quants[3], quants[4], quants[5]), (-127, 2, 2)); // 1.5 and 2.5 go to the even neighbour
    }

    #[test]
    fn zeros_stay_zeros() {
        assert_eq!(quantized(&[0.0; 32]), ([0; 32], 0.0));
    }

    #[test]
    fn what_is_not_finite_shows() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 32];
            x[17] = bad;
            assert!(quantized(&x).1.is_nan());
        }
    }

    #[test]
    fn subnormal_values_do_no_harm() {
        let mut x = [0.0; 32];
        x[0] = f32::from_bits(1);
        let (quants, scale) = quantized(&x);
        assert!(scale.is_finite() && (-127..=127).contains(&quants[0]));
    }
}
