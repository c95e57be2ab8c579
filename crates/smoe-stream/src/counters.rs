//! What the cache and its reads have done.

use crate::ReadStats;

/// Totals since the stream was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamCounters {
    /// Requests answered from the cache.
    pub hits: u64,
    /// Requests that started a read.
    pub misses: u64,
    /// Requests that joined a read already in flight.
    pub joined: u64,
    /// Reads of records that ended well.
    pub reads: u64,
    /// Reads that ended with an error.
    pub failed_reads: u64,
    /// Bytes that arrived from the file, those read twice included.
    pub bytes_read: u64,
    /// Records given up for others.
    pub evictions: u64,
    /// System calls repeated after a transient error.
    pub retries: u64,
    /// System calls that returned fewer bytes than asked for.
    pub short_reads: u64,
    /// System calls that a signal interrupted.
    pub interrupted: u64,
    /// Records read again after a checksum mismatch.
    pub rereads: u64,
    /// Time that the consumer spent blocked in `wait`, in nanoseconds.
    pub wait_ns: u64,
    /// Time that I/O threads spent reading and checking, summed over them, in nanoseconds.
    pub read_ns: u64,
}

impl StreamCounters {
    /// Hits among all requests that needed an expert, 0 to 1; `None` where there was no request.
    pub fn hit_rate(&self) -> Option<f64> {
        let requests = self.hits + self.misses + self.joined;
        (requests > 0).then(|| self.hits as f64 / requests as f64)
    }

    /// What happened since `earlier`, a copy taken from the same stream.
    pub fn since(&self, earlier: &StreamCounters) -> StreamCounters {
        StreamCounters {
            hits: self.hits.saturating_sub(earlier.hits),
            misses: self.misses.saturating_sub(earlier.misses),
            joined: self.joined.saturating_sub(earlier.joined),
            reads: self.reads.saturating_sub(earlier.reads),
            failed_reads: self.failed_reads.saturating_sub(earlier.failed_reads),
            bytes_read: self.bytes_read.saturating_sub(earlier.bytes_read),
            evictions: self.evictions.saturating_sub(earlier.evictions),
            retries: self.retries.saturating_sub(earlier.retries),
            short_reads: self.short_reads.saturating_sub(earlier.short_reads),
            interrupted: self.interrupted.saturating_sub(earlier.interrupted),
            rereads: self.rereads.saturating_sub(earlier.rereads),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            read_ns: self.read_ns.saturating_sub(earlier.read_ns),
        }
    }

    pub(crate) fn add_read(&mut self, stats: &ReadStats, ended_well: bool) {
        self.reads += u64::from(ended_well);
        self.failed_reads += u64::from(!ended_well);
        self.bytes_read += stats.bytes;
        self.retries += stats.retries;
        self.short_reads += stats.short_reads;
        self.interrupted += stats.interrupted;
        self.rereads += stats.rereads;
        self.read_ns += stats.busy_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_and_rates() {
        let earlier = StreamCounters { hits: 1, misses: 2, bytes_read: 10, ..Default::default() };
        let later = StreamCounters { hits: 4, misses: 3, bytes_read: 30, ..earlier };
        let step = later.since(&earlier);
        assert_eq!((step.hits, step.misses, step.bytes_read), (3, 1, 20));
        assert_eq!(step.hit_rate(), Some(0.75));
        assert_eq!(StreamCounters::default().hit_rate(), None);
    }
}
