//! Keys and values of the positions seen so far.

use smoe_quant::{BlockFormat, QuantError, quantize_row};
use smoe_stream::AlignedBuffer;

use crate::config::ModelConfig;
use crate::error::ModelError;

/// Precision of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    /// 32-bit floats: exact.
    F32,
    /// 16-bit floats.
    F16,
    /// Blocks of 32 values in 8 bits with a shared scale.
    Q8,
}

impl KvFormat {
    /// The block format of a row.
    #[must_use]
    pub fn block_format(self) -> BlockFormat {
        match self {
            Self::F32 => BlockFormat::F32,
            Self::F16 => BlockFormat::F16,
            Self::Q8 => BlockFormat::Q8_0,
        }
    }

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8 => "q8",
        }
    }
}

/// Keys and values of all layers, one contiguous run of rows for each key/value head.
#[derive(Debug)]
pub struct KvCache {
    bytes: AlignedBuffer,
    format: BlockFormat,
    kv_heads: usize,
    head_dim: usize,
    row_bytes: usize,
    context: usize,
}

/// The rows of one head in one layer.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    pub(crate) keys: &'a [u8],
    pub(crate) values: &'a [u8],
    pub(crate) row_bytes: usize,
    pub(crate) format: BlockFormat,
}

/// Bytes of one head's key or value.
fn row_bytes(config: &ModelConfig, format: KvFormat) -> Result<usize, ModelError> {
    let head_dim = config.attention.head_dim;
    let block = format.block_format().block_len();
    format.block_format().row_bytes(head_dim).ok_or_else(|| ModelError::KvFormat {
        format: format.name(),
        head_dim,
        block,
    })
}

impl KvCache {
    /// Bytes that a cache of `context` positions takes.
    ///
    /// # Errors
    /// The head's width does not divide into the format's blocks.
    pub fn bytes_needed(config: &ModelConfig, format: KvFormat, context: usize) -> Result<u64, ModelError> {
        let rows = (config.layers.len() as u64 * 2 * config.attention.kv_heads as u64)
            .saturating_mul(context as u64);
        Ok(rows.saturating_mul(row_bytes(config, format)? as u64))
    }

    /// Room for `context` positions. Memory is taken from the system as positions are written.
    ///
    /// # Errors
    /// The head's width does not fit the format, or the system has no such memory.
    pub fn new(config: &ModelConfig, format: KvFormat, context: usize) -> Result<Self, ModelError> {
        let head_dim = config.attention.head_dim;
        let memory = |bytes, reason: String| ModelError::Memory { what: "the KV cache", bytes, reason };
        let row_bytes = row_bytes(config, format)?;
        let bytes = usize::try_from(Self::bytes_needed(config, format, context)?)
            .map_err(|_| memory(usize::MAX, "the size overflows".into()))?;
        let buffer = AlignedBuffer::new(bytes).map_err(|error| memory(bytes, error.to_string()))?;
        Ok(Self {
            bytes: buffer,
            format: format.block_format(),
            kv_heads: config.attention.kv_heads,
            head_dim,
            row_bytes,
            context,
        })
    }

    /// Capacity in positions.
    #[must_use]
    pub fn context(&self) -> usize {
        self.context
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn head_bytes(&self) -> usize {
        self.context * self.row_bytes
    }

    /// Start of a head's keys; its values follow.
    fn head_start(&self, layer: usize, kv_head: usize) -> usize {
        (layer * self.kv_heads + kv_head) * 2 * self.head_bytes()
    }

    /// Stores the keys and values (`kv_heads × head_dim` each) of one position.
    pub(crate) fn store(
        &mut self,
        layer: usize,
        position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), QuantError> {
        for kv_head in 0..self.kv_heads {
            let span = kv_head * self.head_dim..(kv_head + 1) * self.head_dim;
            let key_start = self.head_start(layer, kv_head) + position * self.row_bytes;
            let value_start = key_start + self.head_bytes();
            for (start, row) in [(key_start, &keys[span.clone()]), (value_start, &values[span])] {
                quantize_row(self.format, row, &mut self.bytes[start..start + self.row_bytes])?;
            }
        }
        Ok(())
    }

    pub(crate) fn head(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        let start = self.head_start(layer, kv_head);
        let (keys, values) = self.bytes[start..start + 2 * self.head_bytes()].split_at(self.head_bytes());
        HeadRows { keys, values, row_bytes: self.row_bytes, format: self.format }
    }
}
