//! The boundary between the expert cache and whatever performs its reads.

use std::fmt;

use crate::arena::SlotLoan;
use crate::transfer::{ReadFailure, ReadStats};

/// How a user wants the vault to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum IoChoice {
    /// The best that works here.
    #[default]
    Auto,
    /// Threads with pread, past the page cache where that works.
    Pread,
    /// Threads with pread, through the page cache.
    Buffered,
}

impl IoChoice {
    /// Every choice, in the order of the command line's help.
    pub const ALL: &'static [IoChoice] = &[IoChoice::Auto, IoChoice::Pread, IoChoice::Buffered];

    /// The command line's word.
    pub fn name(self) -> &'static str {
        match self {
            IoChoice::Auto => "auto",
            IoChoice::Pread => "pread",
            IoChoice::Buffered => "buffered",
        }
    }

    /// The choice of that name.
    pub fn from_name(name: &str) -> Option<IoChoice> {
        IoChoice::ALL.iter().copied().find(|choice| choice.name() == name)
    }
}

/// The mode that reads really use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoMode {
    /// Backend and access, for example `pread direct` or `pread buffered`.
    pub name: String,
    /// `direct`, `uncached`, `buffered` or `memory`.
    pub access: &'static str,
    /// Alignment of offsets, lengths and addresses in bytes; 1: any.
    pub alignment_bytes: u64,
    /// Reads in flight at most.
    pub depth: u32,
    /// Why the mode is not the best one; `None` where it is.
    pub reason: Option<String>,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reads", self.access)?;
        if self.alignment_bytes > 1 {
            write!(f, ", {}-byte alignment", self.alignment_bytes)?;
        }
        let backend = self.name.split(' ').next().unwrap_or_default();
        let plural = if self.depth == 1 { "" } else { "s" };
        write!(f, ", {} {backend} thread{plural}", self.depth)?;
        match &self.reason {
            Some(reason) => write!(f, " ({reason})"),
            None => Ok(()),
        }
    }
}

/// One read: fill the loan from `offset` on.
#[derive(Debug)]
pub struct ReadRequest {
    /// The submitter's name for the read; comes back in the completion.
    pub tag: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Where the bytes go; its length is the length of the read.
    pub loan: SlotLoan,
    /// XXH3-64 (seed 0) that the bytes must have; `None`: do not check.
    pub checksum: Option<u64>,
}

/// A finished read.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// The request's loan; dropping it makes the slot readable.
    pub loan: SlotLoan,
    /// Whether the bytes are there and right.
    pub result: Result<(), ReadFailure>,
    /// What it took.
    pub stats: ReadStats,
}

/// Performs many reads at once. Retries and checksums happen behind this boundary, so that they cost the consumer
/// nothing.
///
/// Dropping a backend waits for the reads in flight: afterwards nothing writes to any loan. After construction,
/// `submit` and `complete` allocate nothing.
pub trait ReadBackend: Send {
    /// Queues a read; gives the request back where `capacity` reads are outstanding already.
    ///
    /// # Errors
    /// The request itself.
    #[allow(clippy::result_large_err)]
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadRequest>;

    /// The next finished read, in completion order. `None` where none is finished; with `block`, only where none is
    /// outstanding.
    fn complete(&mut self, block: bool) -> Option<Completion>;

    /// Reads that may be outstanding (submitted, not yet returned by `complete`).
    fn capacity(&self) -> usize;

    /// The mode in use at this moment.
    fn mode(&self) -> IoMode;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_read_as_sentences() {
        let mut mode = IoMode {
            name: "pread direct".into(),
            access: "direct",
            alignment_bytes: 4096,
            depth: 8,
            reason: None,
        };
        assert_eq!(mode.to_string(), "direct reads, 4096-byte alignment, 8 pread threads");
        mode = IoMode {
            name: "pread buffered".into(),
            access: "buffered",
            alignment_bytes: 1,
            depth: 1,
            ..mode
        };
        mode.reason = Some("asked for".into());
        assert_eq!(mode.to_string(), "buffered reads, 1 pread thread (asked for)");
    }

    #[test]
    fn choices_have_the_command_lines_names() {
        for choice in IoChoice::ALL {
            assert_eq!(IoChoice::from_name(choice.name()), Some(*choice));
        }
        assert_eq!(IoChoice::from_name("Auto"), None);
    }
}
