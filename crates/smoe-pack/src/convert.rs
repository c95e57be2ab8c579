//! Weights from a checkpoint's types to a vault's formats, a few rows at a time.

use smoe_format::Checkpoint;
use smoe_quant::{BlockFormat, dequantize_row, quantize_row};
use xxhash_rust::xxh3::Xxh3;

use crate::error::PackError;
use crate::plan::{Part, Unit};

/// Source bytes that are converted at a time; whole rows, so a longer row is one step.
const STEP_BYTES: usize = 4 << 20;

/// What a format costs in precision, as sums over weights.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ErrorSums {
    /// Squared differences.
    pub error: f64,
    /// Squared weights.
    pub signal: f64,
    /// Weights.
    pub elements: u64,
}

impl ErrorSums {
    /// Adds another part's sums.
    pub fn add(&mut self, other: &Self) {
        self.error += other.error;
        self.signal += other.signal;
        self.elements += other.elements;
    }

    /// Root of the mean squared error.
    #[must_use]
    pub fn rmse(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { (self.error / self.elements as f64).sqrt() }
    }

    /// Signal-to-noise ratio in decibels; none where nothing was lost.
    #[must_use]
    pub fn snr_db(&self) -> Option<f64> {
        (self.error > 0.0).then(|| 10.0 * (self.signal / self.error).log10())
    }
}

/// Takes `(offset within the unit, bytes)`.
pub(crate) type Write<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), PackError>;

/// Converts units; holds the buffers that it needs for that.
pub(crate) struct Converter<'a> {
    checkpoint: &'a Checkpoint,
    measure: bool,
    source: Vec<u8>,
    values: Vec<f32>,
    converted: Vec<u8>,
    restored: Vec<f32>,
}

impl<'a> Converter<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, measure: bool) -> Self {
        let (source, converted) = (Vec::new(), Vec::new());
        Self { checkpoint, measure, source, values: Vec::new(), converted, restored: Vec::new() }
    }

    /// Converts a unit and hands its bytes out in order. Returns the checksum of all its bytes, padding included, and what
    /// each part lost.
    pub(crate) fn convert(
        &mut self,
        unit: &Unit,
        write: Write<'_>,
    ) -> Result<(u64, Vec<ErrorSums>), PackError> {
        let mut hash = Xxh3::new();
        let mut end = 0;
        let mut sums = Vec::with_capacity(unit.parts.len());
        for part in &unit.parts {
            pad(&mut hash, part.offset - end);
            end = part.offset + part.row_bytes() * part.rows;
            let mut sum = ErrorSums::default();
            let row_source_bytes = part.columns * part.source.block_bytes();
            let step_rows = (STEP_BYTES / row_source_bytes).max(1) as u64;
            let mut row = 0;
            while row < part.rows {
                let rows = step_rows.min(part.rows - row);
                self.step(part, row, rows as usize, &mut sum)?;
                hash.update(&self.converted);
                write(part.offset + row * part.row_bytes(), &self.converted)?;
                row += rows;
            }
            sums.push(sum);
        }
        pad(&mut hash, unit.bytes - end);
        Ok((hash.digest(), sums))
    }

    /// Converts some rows of a part into `converted`.
    fn step(&mut self, part: &Part, row: u64, rows: usize, sum: &mut ErrorSums) -> Result<(), PackError> {
        let elements = rows * part.columns;
        self.source.resize(elements * part.source.block_bytes(), 0);
        let first = (part.first_row + row) * part.columns as u64;
        self.checkpoint.read(&part.tensor, first * part.source.block_bytes() as u64, &mut self.source)?;
        self.values.resize(elements, 0.0);
        let convert_error = |source| PackError::Convert { tensor: part.tensor.clone(), source };
        dequantize_row(part.source, &self.source, &mut self.values).map_err(convert_error)?;
        check_values(self.checkpoint, part, first, &self.values)?;
        if part.format == part.source {
            self.converted.clone_from(&self.source);
        } else {
            let row_bytes = part.row_bytes() as usize;
            self.converted.resize(rows * row_bytes, 0);
            let values = self.values.chunks_exact(part.columns);
            for (values, converted) in values.zip(self.converted.chunks_exact_mut(row_bytes)) {
                quantize_row(part.format, values, converted).map_err(convert_error)?;
            }
        }
        if self.measure {
            self.restored.resize(elements, 0.0);
            // A format's rows are blocks only, so all rows together are one long row.
            dequantize_row(part.format, &self.converted, &mut self.restored).map_err(convert_error)?;
            for (value, restored) in self.values.iter().zip(&self.restored) {
                let error = f64::from(*value) - f64::from(*restored);
                sum.error += error * error;
                sum.signal += f64::from(*value) * f64::from(*value);
            }
            sum.elements += elements as u64;
        }
        Ok(())
    }
}

fn pad(hash: &mut Xxh3, mut bytes: u64) {
    const ZEROS: [u8; 4096] = [0; 4096];
    while bytes > 0 {
        let step = bytes.min(ZEROS.len() as u64);
        hash.update(&ZEROS[..step as usize]);
        bytes -= step;
    }
}

/// Largest magnitude that a format can hold.
fn largest(format: BlockFormat) -> f32 {
    /// Largest finite F16, which scales are stored in.
    const F16_MAX: f32 = 65_504.0;
    match format {
        BlockFormat::F16 => F16_MAX,
        BlockFormat::Q8_0 => F16_MAX * 127.0,
        BlockFormat::Q4_0 => F16_MAX * 8.0,
        _ => f32::MAX,
    }
}

fn check_values(checkpoint: &Checkpoint, part: &Part, first: u64, values: &[f32]) -> Result<(), PackError> {
    let limit = if part.format == part.source { f32::MAX } else { largest(part.format) };
    // NaN compares as false, so this finds it too.
    let within = |value: &f32| value.abs() <= limit;
    if values.iter().all(within) {
        return Ok(());
    }
    let index = values.iter().position(|value| !within(value)).unwrap_or(0);
    let (value, element) = (values[index], first + index as u64);
    let (path, tensor) = (checkpoint.shard_of(&part.tensor).to_owned(), part.tensor.clone());
    Err(match value.is_finite() {
        false => PackError::NonFinite { path, tensor, element, value },
        true => PackError::OutOfRange { path, tensor, element, value, format: part.format.name() },
    })
}
