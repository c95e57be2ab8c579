//! Resident weights in memory and handles to them.

use std::collections::HashMap;

use smoe_quant::{BlockFormat, Input, MatrixView, QuantError, dequantize_row, quantize_activations};
use smoe_stream::AlignedBuffer;

use crate::error::{ConfigError, ModelError};

/// A resident tensor's place in the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightEntry {
    /// Block format of its rows.
    pub format: BlockFormat,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// First byte in the buffer.
    pub offset: usize,
}

/// The dense backbone, in anonymous memory so that nothing pages it out behind the engine's back.
#[derive(Debug)]
pub struct ResidentWeights {
    bytes: AlignedBuffer,
    entries: HashMap<String, WeightEntry>,
}

impl ResidentWeights {
    /// Joins a filled buffer and the places of the tensors in it. Places are checked when a model is built on them.
    #[must_use]
    pub fn new(bytes: AlignedBuffer, entries: HashMap<String, WeightEntry>) -> Self {
        Self { bytes, entries }
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether a tensor is there.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// A handle to a matrix of the given shape.
    pub(crate) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix, ModelError> {
        let entry = self.entries.get(name).ok_or_else(|| ConfigError::MissingTensor {
            name: name.into(),
            why: "the vault does not hold it".into(),
            expected: format!("[{rows}, {columns}]"),
        })?;
        if (entry.rows, entry.columns) != (rows, columns) {
            return Err(ConfigError::Shape {
                name: name.into(),
                expected: format!("[{rows}, {columns}]"),
                found: format!("[{}, {}]", entry.rows, entry.columns),
            }
            .into());
        }
        let end = entry
            .format
            .row_bytes(columns)
            .and_then(|bytes| bytes.checked_mul(rows))
            .and_then(|bytes| entry.offset.checked_add(bytes))
            .filter(|&end| end <= self.bytes.len());
        match end {
            Some(end) => Ok(Matrix { format: entry.format, rows, columns, start: entry.offset, end }),
            None => Err(ConfigError::Shape {
                name: name.into(),
                expected: format!("[{rows}, {columns}] in {} within the resident section", entry.format),
                found: format!("offset {} of {} bytes", entry.offset, self.bytes.len()),
            }
            .into()),
        }
    }

    /// A vector as floats.
    pub(crate) fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        let matrix = self.matrix(name, 1, length)?;
        let mut values = vec![0.0; length];
        dequantize_row(matrix.format, &self.bytes[matrix.start..matrix.end], &mut values)
            .map_err(|source| ModelError::Kernel { layer: name.into(), source })?;
        Ok(values)
    }

    pub(crate) fn view(&self, matrix: &Matrix) -> Result<MatrixView<'_>, QuantError> {
        MatrixView::new(matrix.format, matrix.rows, matrix.columns, &self.bytes[matrix.start..matrix.end])
    }
}

/// A checked handle to a resident matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) format: BlockFormat,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    start: usize,
    end: usize,
}

/// A part of an expert record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPart {
    /// Block format of its rows.
    pub format: BlockFormat,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// First byte in the record.
    pub offset: usize,
    /// Bytes of all rows.
    pub bytes: usize,
}

impl RecordPart {
    fn end(&self) -> usize {
        self.offset.saturating_add(self.bytes)
    }

    pub(crate) fn view<'a>(&self, record: &'a [u8]) -> Result<MatrixView<'a>, QuantError> {
        MatrixView::new(self.format, self.rows, self.columns, &record[self.offset..self.end()])
    }
}

/// How the three projections of an expert lie in its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordLayout {
    /// Gate projection.
    pub gate: RecordPart,
    /// Up projection.
    pub up: RecordPart,
    /// Down projection.
    pub down: RecordPart,
}

impl RecordLayout {
    /// Checks the parts against the shapes that the configuration asks for and the record's length.
    pub(crate) fn check(&self, intermediate: usize, hidden: usize, record_bytes: u64) -> Result<(), String> {
        let parts = [
            ("gate", self.gate, intermediate, hidden),
            ("up", self.up, intermediate, hidden),
            ("down", self.down, hidden, intermediate),
        ];
        for (name, part, rows, columns) in parts {
            if (part.rows, part.columns) != (rows, columns) {
                return Err(format!("{name} is [{}, {}], not [{rows}, {columns}]", part.rows, part.columns));
            }
            let expected = part.format.row_bytes(columns).and_then(|bytes| bytes.checked_mul(rows));
            if expected != Some(part.bytes) || part.end() as u64 > record_bytes {
                return Err(format!(
                    "{name} takes {} bytes at {} of a record of {record_bytes}, not {expected:?}",
                    part.bytes, part.offset
                ));
            }
        }
        Ok(())
    }

    /// Gate and up as one matrix of twice the rows, when they lie next to each other in one format.
    pub(crate) fn gate_up(&self) -> Option<RecordPart> {
        let joined = self.gate.format == self.up.format && self.gate.end() == self.up.offset;
        joined.then(|| RecordPart {
            rows: self.gate.rows + self.up.rows,
            bytes: self.gate.bytes + self.up.bytes,
            ..self.gate
        })
    }
}

/// Vectors quantized to 8 bits for the formats whose kernels ask for it.
#[derive(Debug, Default)]
pub(crate) struct Q8Buffer {
    pub(crate) quants: Vec<i8>,
    pub(crate) scales: Vec<f32>,
}

/// Activations that share a scale.
pub(crate) const Q8_BLOCK: usize = 32;

impl Q8Buffer {
    pub(crate) fn with_capacity(elements: usize) -> Self {
        Self { quants: vec![0; elements], scales: vec![0.0; elements.div_ceil(Q8_BLOCK)] }
    }

    pub(crate) fn bytes_needed(elements: usize) -> usize {
        elements + elements.div_ceil(Q8_BLOCK) * size_of::<f32>()
    }

    /// Quantizes whole vectors if any of the formats asks for it.
    pub(crate) fn fill(&mut self, x: &[f32], formats: &[BlockFormat]) {
        if formats.iter().any(|format| format.uses_q8_activations()) {
            quantize_activations(x, &mut self.quants[..x.len()], &mut self.scales[..x.len() / Q8_BLOCK]);
        }
    }

    /// The operand for weights of a format: the floats themselves or what [`Q8Buffer::fill`] made of them.
    pub(crate) fn input<'a>(&'a self, format: BlockFormat, x: &'a [f32]) -> Input<'a> {
        if format.uses_q8_activations() {
            Input::Q8 { quants: &self.quants[..x.len()], scales: &self.scales[..x.len() / Q8_BLOCK] }
        } else {
            Input::F32(x)
        }
    }
}
