//! Sessions on a vault: prefill, decode, sampling, scoring, and what they cost.

mod budget;
mod engine;
mod error;
mod generate;
mod options;
mod report;
mod routing;
mod sampler;
mod score;

pub use budget::{DEFAULT_CONTEXT, MemoryPlan};
pub use engine::{Engine, OpenProgress};
pub use error::{BudgetError, EngineError};
pub use generate::{Event, FinishReason, GenerateOptions, Generation};
pub use options::{CacheSize, EngineOptions};
pub use report::{InstrumentReport, IoReport, MemoryReport, MillisecondsPerToken, Timings};
pub use sampler::{Sampler, SamplingOptions};
pub use score::{Divergence, Score};
