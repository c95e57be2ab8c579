//! How long packing will take, from a short trial.

use std::time::{Duration, Instant};

use crate::convert::Converter;
use crate::error::PackError;
use crate::plan::PackPlan;

/// Time that the trial may take.
const TRIAL: Duration = Duration::from_millis(300);

/// A guess from a trial on the first units.
#[derive(Debug, Clone, Copy)]
pub struct Estimate {
    /// Reading and converting everything on the given threads; writing is not in it.
    pub convert: Duration,
    /// Checkpoint bytes per second of all threads.
    pub bytes_per_s: f64,
}

/// Converts for a moment without writing.
///
/// # Errors
/// The checkpoint cannot be read, or a weight is no number.
pub fn estimate(plan: &PackPlan, threads: usize) -> Result<Estimate, PackError> {
    let mut converter = Converter::new(&plan.checkpoint, false);
    let started = Instant::now();
    let mut bytes = 0;
    for unit in &plan.units {
        converter.convert(unit, &mut |_, _| Ok(()))?;
        bytes += unit.source_bytes();
        if started.elapsed() >= TRIAL {
            break;
        }
    }
    let bytes_per_s = bytes as f64 / started.elapsed().as_secs_f64().max(1e-6) * threads as f64;
    let convert = Duration::from_secs_f64(plan.source_bytes() as f64 / bytes_per_s.max(1.0));
    Ok(Estimate { convert, bytes_per_s })
}
