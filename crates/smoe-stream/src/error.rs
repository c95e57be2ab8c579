//! Everything that can go wrong between a file and a slot.

use std::io;

/// Errors of reading, caching and budgeting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The file could not be opened.
    #[error("cannot open {file}: {source}")]
    Open {
        /// Path as the user gave it.
        file: String,
        /// What the system said.
        source: io::Error,
    },
    /// The path names a directory, a pipe or a device.
    #[error("{file} is not a regular file")]
    NotAFile {
        /// Path as the user gave it.
        file: String,
    },
    /// A read failed and kept failing.
    #[error("cannot read {bytes} bytes at offset {offset} of {file}: {source}")]
    Read {
        /// Path as the user gave it.
        file: String,
        /// First byte of the read.
        offset: u64,
        /// Length of the read.
        bytes: u64,
        /// What the system said last.
        source: io::Error,
    },
    /// The file ended before its length at open time.
    #[error(
        "{file} is shorter than when it was opened: reading {bytes} bytes at offset {offset} ended after {found}; \
         was it overwritten or cut? copy or pack it again"
    )]
    Truncated {
        /// Path as the user gave it.
        file: String,
        /// First byte of the read.
        offset: u64,
        /// Length of the read.
        bytes: u64,
        /// Bytes that were there.
        found: u64,
    },
    /// An expert's bytes are not the bytes that were packed, twice in a row.
    #[error(
        "checksum of layer {layer}, expert {expert} at offset {offset} of {file} is {found:016x}, expected \
         {expected:016x}, also after reading again; the file is damaged: run `smoe verify`, then pack or copy it again"
    )]
    Checksum {
        /// Path as the user gave it.
        file: String,
        /// Index into the expert layers.
        layer: u32,
        /// Expert within the layer.
        expert: u32,
        /// First byte of the record.
        offset: u64,
        /// Checksum in the file's table.
        expected: u64,
        /// Checksum of what was read.
        found: u64,
    },
    /// The system refused memory.
    #[error("cannot allocate {bytes} bytes of memory: {source}; lower the cache size or the memory budget")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A size beyond this machine's address space.
    #[error("{bytes} bytes are more than this machine can address")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The cache holds fewer expert records than one token needs at once.
    #[error(
        "an expert cache of {cache_bytes} bytes holds {slots} records of {slot_bytes} bytes, at least {min_slots} are \
         needed: give it {needed_bytes} bytes or more"
    )]
    CacheTooSmall {
        /// Bytes offered.
        cache_bytes: u64,
        /// Bytes of one slot.
        slot_bytes: u64,
        /// Slots that fit.
        slots: u64,
        /// Slots needed.
        min_slots: u64,
        /// Smallest size that works.
        needed_bytes: u64,
    },
    /// A layer's place in the file makes no sense.
    #[error("expert layer {layer}: {reason}")]
    Layout {
        /// Index into the expert layers.
        layer: u32,
        /// Field, expected and found.
        reason: String,
    },
    /// An expert that the file does not hold was asked for.
    #[error(
        "layer {layer}, expert {expert} does not exist: {layers} expert layers, {experts} experts in that layer"
    )]
    UnknownExpert {
        /// Layer asked for.
        layer: u32,
        /// Expert asked for.
        expert: u32,
        /// Layers there are.
        layers: u32,
        /// Experts in the layer; 0 where the layer does not exist.
        experts: u32,
    },
    /// `wait` was called with no read in flight; waiting would never end.
    #[error("no expert read is in flight: every pending request has been answered already")]
    NothingPending,
    /// The read backend ended while reads were in flight.
    #[error("the read backend of {file} stopped with {in_flight} reads in flight")]
    BackendStopped {
        /// Path as the user gave it.
        file: String,
        /// Reads without an answer.
        in_flight: u64,
    },
    /// A thread count outside the supported range.
    #[error("{threads} I/O threads asked for, expected 1 to {limit}")]
    ThreadCount {
        /// Threads asked for.
        threads: usize,
        /// Largest number supported.
        limit: usize,
    },
    /// A thread could not be started.
    #[error("cannot start an I/O thread: {source}")]
    Thread {
        /// What the system said.
        source: io::Error,
    },
    /// A probe was asked to read a region in which no request fits.
    #[error("cannot probe {region_bytes} bytes with requests of {request_bytes} bytes")]
    Probe {
        /// Bytes of the region.
        region_bytes: u64,
        /// Bytes of a request.
        request_bytes: u64,
    },
    /// A size such as `8G` could not be read.
    #[error("`{text}` is not a size: {reason}; write for example 512M, 8G or 1.5GiB")]
    Size {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
}
