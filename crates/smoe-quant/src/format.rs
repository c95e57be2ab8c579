//! Block formats, by GGUF's names and meaning.

use std::fmt;

use crate::block::{q4_0, q8_0};

/// Activations that share a scale when they are quantized to 8 bits.
pub const Q8_BLOCK: usize = 32;

/// How the weights of a row are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(non_camel_case_types, reason = "GGUF's own names")]
pub enum BlockFormat {
    /// 32-bit floats.
    F32,
    /// IEEE 754 16-bit floats.
    F16,
    /// The upper halves of 32-bit floats.
    BF16,
    /// 32 signed bytes and an F16 scale.
    Q8_0,
    /// 32 nibbles minus 8 and an F16 scale.
    Q4_0,
}

impl BlockFormat {
    /// All formats.
    pub const ALL: &'static [Self] = &[Self::F32, Self::F16, Self::BF16, Self::Q8_0, Self::Q4_0];

    /// GGUF's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
        }
    }

    /// The format of a name, in any case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name().eq_ignore_ascii_case(name))
    }

    /// GGML's number of the type.
    #[must_use]
    pub fn ggml_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::BF16 => 30,
        }
    }

    /// Weights of a block.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 => q8_0::WEIGHTS,
            Self::Q4_0 => q4_0::WEIGHTS,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => q8_0::BYTES,
            Self::Q4_0 => q4_0::BYTES,
        }
    }

    /// Bytes of a row; none if it does not divide into blocks, is empty, or the number overflows.
    #[must_use]
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let block = self.block_len();
        if columns == 0 || !columns.is_multiple_of(block) {
            return None;
        }
        (columns / block).checked_mul(self.block_bytes())
    }

    /// Bits that a weight takes, scales included.
    #[must_use]
    pub fn bits_per_weight(self) -> f32 {
        (self.block_bytes() * 8) as f32 / self.block_len() as f32
    }

    /// Whether kernels multiply it with activations in 8 bits.
    #[must_use]
    pub fn uses_q8_activations(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0)
    }
}

impl fmt::Display for BlockFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::BlockFormat;

    #[test]
    fn sizes_are_those_of_ggml() {
        let sizes =
            BlockFormat::ALL.iter().map(|f| (f.name(), f.ggml_type(), f.block_len(), f.block_bytes()));
        let expected = [
            ("F32", 0, 1, 4),
            ("F16", 1, 1, 2),
            ("BF16", 30, 1, 2),
            ("Q8_0", 8, 32, 34),
            ("Q4_0", 2, 32, 18),
        ];
        assert!(sizes.eq(expected));
        assert_eq!(BlockFormat::Q4_0.bits_per_weight(), 4.5);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(BlockFormat::Q4_0.row_bytes(64), Some(36));
        assert_eq!(BlockFormat::Q4_0.row_bytes(33), None);
        assert_eq!(BlockFormat::F32.row_bytes(0), None);
        assert_eq!(BlockFormat::F32.row_bytes(usize::MAX), None);
        assert_eq!(BlockFormat::BF16.row_bytes(33), Some(66));
    }

    #[test]
    fn names_are_found_in_any_case() {
        for &format in BlockFormat::ALL {
            assert_eq!(BlockFormat::from_name(&format.name().to_lowercase()), Some(format));
        }
        assert_eq!(BlockFormat::from_name("Q9"), None);
    }
}
