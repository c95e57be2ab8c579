//! Operands of a matrix product.

use crate::error::QuantError;
use crate::format::BlockFormat;

/// A matrix of weights: rows of blocks, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct MatrixView<'a> {
    format: BlockFormat,
    rows: usize,
    columns: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> MatrixView<'a> {
    /// Joins a shape and its bytes.
    ///
    /// # Errors
    /// Rows do not divide into blocks, or there are more or fewer bytes than the shape asks for.
    pub fn new(
        format: BlockFormat,
        rows: usize,
        columns: usize,
        bytes: &'a [u8],
    ) -> Result<Self, QuantError> {
        let row_bytes = format.row_bytes(columns).ok_or(QuantError::Columns {
            format,
            columns,
            block: format.block_len(),
        })?;
        match row_bytes.checked_mul(rows) {
            Some(expected) if expected == bytes.len() => Ok(Self { format, rows, columns, row_bytes, bytes }),
            expected => Err(QuantError::Length {
                what: "a matrix in bytes",
                expected: expected.unwrap_or(usize::MAX),
                found: bytes.len(),
            }),
        }
    }

    /// Block format.
    #[must_use]
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// One row.
    ///
    /// # Panics
    /// `row` is not below [`MatrixView::rows`].
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..(row + 1) * self.row_bytes]
    }
}

/// Vectors, one after the other, in the form that the weights' format takes.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// Floats.
    F32(&'a [f32]),
    /// What [`crate::quantize_activations`] makes of them.
    Q8 {
        /// One byte for each element.
        quants: &'a [i8],
        /// One scale for each block of 32.
        scales: &'a [f32],
    },
}
