//! Aligned buffers, read backends, memory budget and the expert cache.
//!
//! This crate knows byte ranges of one file and the memory they are read into; it knows no models. The layers, from
//! the bottom: [`AlignedBuffer`] is memory that direct reads accept; [`ReadAt`] is anything that can be read by offset
//! and [`FileReader`] the real one; a [`ReadBackend`] performs many reads at once ([`PreadPool`]: with threads);
//! [`ExpertStream`] is the expert cache over a backend. [`budget`] says what the machine can give and [`probe`]
//! how fast it is.

mod aligned;
mod arena;
mod backend;
mod cache;
#[cfg(feature = "chaos")]
#[doc(hidden)]
pub mod chaos;
mod counters;
mod direct;
mod error;
mod extent;
mod file_reader;
mod policy;
mod pread;
mod random;
mod read_at;
mod stream;
mod transfer;

pub mod budget;
pub mod probe;

pub use aligned::{AlignedBuffer, HUGE_PAGE_BYTES};
pub use arena::SlotLoan;
pub use backend::{Completion, IoChoice, IoMode, ReadBackend, ReadRequest};
pub use budget::{
    AvailableMemory, available_memory, format_size, parse_size, peak_rss_bytes, process_rss_bytes,
    usable_cpus,
};
pub use counters::StreamCounters;
pub use error::StreamError;
pub use extent::{ExpertId, LayerExtent, MAX_EXPERTS, MAX_LAYERS, MAX_STRIDE_BYTES, STRIDE_UNIT_BYTES};
pub use file_reader::{FileReader, read_exact};
pub use pread::{DEFAULT_PREAD_THREADS, DEFAULT_QUEUE_CAPACITY, MAX_PREAD_THREADS, PreadPool};
pub use probe::{DriveProbe, probe_drive, probe_memory};
pub use read_at::{AccessMode, ReadAt};
pub use stream::{ExpertStream, Pin, Request};
pub use transfer::{ReadFailure, ReadStats, read_full};
