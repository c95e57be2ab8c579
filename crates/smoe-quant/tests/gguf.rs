//! Blocks are those of GGML, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use serde_json::Value;
use smoe_quant::{BlockFormat, dequantize_row, quantize_row};

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|bits| f32::from_bits(bits.as_u64().unwrap() as u32)).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn rows_quantize_and_dequantize_as_ggml_does() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("fixtures/gguf.json")).unwrap();
    assert!(cases.len() >= 10);
    for case in &cases {
        let values = floats(&case["values"]);
        for format in [BlockFormat::Q8_0, BlockFormat::Q4_0, BlockFormat::BF16, BlockFormat::F16] {
            let expected = bytes(case[format.name()].as_str().unwrap());
            let mut quantized = vec![0; format.row_bytes(values.len()).unwrap()];
            quantize_row(format, &values, &mut quantized).unwrap();
            assert!(quantized == expected, "{format} of {}", case["name"]);
            let mut back = vec![0.0; values.len()];
            dequantize_row(format, &quantized, &mut back).unwrap();
            let expected = floats(&case[format!("{format} back")]);
            let same = back
                .iter()
                .zip(&expected)
                .all(|(a, b)| a.to_bits() == b.to_bits() || (*a == 0.0 && *b == 0.0));
            assert!(same, "{format} of {} back", case["name"]);
        }
    }
}

#[test]
fn nibbles_lie_as_ggml_has_them() {
    // Scale 0.5, byte 0 = 0xA3: element 0 is 3 - 8, element 16 is 10 - 8.
    let mut block = [0x88; 18];
    block[..3].copy_from_slice(&[0x00, 0x38, 0xA3]);
    let mut values = [0.0; 32];
    dequantize_row(BlockFormat::Q4_0, &block, &mut values).unwrap();
    assert_eq!((values[0], values[1], values[16], values[17]), (-2.5, 0.0, 1.0, 0.0));
}
