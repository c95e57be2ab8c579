//! From a checkpoint to a vault, and back to certainty: planning, conversion, verification.
//!
//! A vault is written to `NAME.partial` beside it, with a journal of what is finished and synced, and gets its name when it
//! is complete. An interrupted run resumes from the journal.

mod convert;
mod disk;
mod error;
mod estimate;
mod journal;
mod pack;
mod plan;
mod verify;

pub use convert::ErrorSums;
pub use disk::free_bytes;
pub use error::PackError;
pub use estimate::{Estimate, estimate};
pub use pack::{PackProgress, PackReport, PackRun, pack};
pub use plan::{FormatUse, PackOptions, PackPlan};
pub use verify::{VerifyReport, verify};
