//! The expert cache over a read backend: what a token loop asks for experts.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::arena::SlotArena;
use crate::backend::{Completion, IoMode, ReadBackend, ReadRequest};
use crate::cache::{Lookup, SlotTable};
use crate::counters::StreamCounters;
use crate::error::StreamError;
use crate::extent::{ExpertId, ExpertMap, LayerExtent};
use crate::policy::Lru;
use crate::transfer::ReadFailure;

/// The right to read an expert's record until it is given to [`ExpertStream::release`].
///
/// Dropping one without releasing it leaves its slot pinned until [`ExpertStream::abandon`].
#[derive(Debug)]
#[must_use = "a pin keeps its slot until it is released"]
pub struct Pin {
    id: ExpertId,
    slot: u32,
}

impl Pin {
    /// The expert.
    #[must_use]
    pub fn id(&self) -> ExpertId {
        self.id
    }
}

/// What became of a request.
#[derive(Debug)]
pub enum Request {
    /// The record is in the cache.
    Hit(Pin),
    /// A read is in flight; [`ExpertStream::wait`] will return the pin.
    Pending,
    /// Every slot is pinned or being read into, or the backend is full: release or wait first.
    Full,
}

/// Fixed slots for expert records, filled on demand.
///
/// One thread owns it and asks; reads happen on the backend's threads. After construction nothing here allocates.
pub struct ExpertStream {
    path: PathBuf,
    /// First, so that it is dropped first: afterwards nothing writes to the arena.
    backend: Box<dyn ReadBackend>,
    map: ExpertMap,
    table: SlotTable,
    arena: SlotArena,
    /// Slots whose read has ended well, with the pins that `wait` has still to hand out.
    answered: VecDeque<(u32, ExpertId, u32)>,
    /// Requests that `wait` has still to answer.
    pending: usize,
    /// Reads that the backend has not returned.
    reading: usize,
    counters: StreamCounters,
}

impl ExpertStream {
    /// A cache of as many whole records as fit into `cache_bytes`, at least `min_slots`, at most all.
    ///
    /// `path` is only for messages.
    ///
    /// # Errors
    /// [`StreamError::Layout`], [`StreamError::CacheTooSmall`], [`StreamError::OutOfMemory`].
    pub fn new(
        path: &Path,
        backend: Box<dyn ReadBackend>,
        layers: Vec<LayerExtent>,
        cache_bytes: u64,
        min_slots: usize,
    ) -> Result<ExpertStream, StreamError> {
        let map = ExpertMap::new(layers)?;
        let slot_bytes = map.max_stride();
        let min_slots = min_slots.clamp(1, map.experts().max(1)).min(map.experts()) as u64;
        let fitting = cache_bytes.checked_div(slot_bytes).unwrap_or(0);
        if fitting < min_slots {
            return Err(StreamError::CacheTooSmall {
                cache_bytes,
                slot_bytes,
                slots: fitting,
                min_slots,
                needed_bytes: min_slots * slot_bytes,
            });
        }
        let slots = fitting.min(map.experts() as u64) as usize;
        let too_large = |_| StreamError::TooLarge { bytes: slot_bytes };
        let arena = SlotArena::new(slots, usize::try_from(slot_bytes).map_err(too_large)?)?;
        let table = SlotTable::new(slots, map.experts(), Box::new(Lru::new(slots)));
        Ok(ExpertStream {
            path: path.to_owned(),
            backend,
            map,
            table,
            arena,
            answered: VecDeque::with_capacity(slots),
            pending: 0,
            reading: 0,
            counters: StreamCounters::default(),
        })
    }

    /// Pins an expert if it is in the cache.
    pub fn lookup(&mut self, id: ExpertId) -> Option<Pin> {
        let number = self.map.number(id).ok()?;
        let Lookup::Ready(slot) = self.table.lookup(number) else { return None };
        self.table.pin(slot);
        self.counters.hits += 1;
        Some(Pin { id, slot })
    }

    /// Pins an expert that is there, joins a read in flight, or starts one.
    ///
    /// # Errors
    /// [`StreamError::UnknownExpert`].
    pub fn request(&mut self, id: ExpertId) -> Result<Request, StreamError> {
        let number = self.map.number(id)?;
        match self.table.lookup(number) {
            Lookup::Ready(slot) => {
                self.table.pin(slot);
                self.counters.hits += 1;
                return Ok(Request::Hit(Pin { id, slot }));
            }
            Lookup::Loading(slot) => {
                self.table.join_load(slot);
                self.counters.joined += 1;
            }
            Lookup::Absent => {
                if self.reading >= self.backend.capacity() {
                    return Ok(Request::Full);
                }
                let Some((slot, evicted)) = self.table.begin_load(number) else { return Ok(Request::Full) };
                let record = self.map.record(id);
                let Some(loan) = self.arena.lend(slot as usize, record.stride as usize) else {
                    // A slot that is free in the table is never lent; give it back rather than trust that.
                    self.table.fail_load(slot);
                    return Ok(Request::Full);
                };
                let request = ReadRequest {
                    tag: u64::from(slot),
                    offset: record.offset,
                    loan,
                    checksum: Some(record.checksum),
                };
                if self.backend.submit(request).is_err() {
                    self.table.fail_load(slot);
                    return Ok(Request::Full);
                }
                self.reading += 1;
                self.counters.misses += 1;
                self.counters.evictions += u64::from(evicted);
            }
        }
        self.pending += 1;
        Ok(Request::Pending)
    }

    /// Requests that [`ExpertStream::wait`] has still to answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending
    }

    /// The next expert that was asked for and has arrived, in order of arrival; blocks until there is one.
    ///
    /// # Errors
    /// The read failed for good: [`StreamError::Read`], [`StreamError::Truncated`], [`StreamError::Checksum`].
    /// [`StreamError::NothingPending`] where waiting would never end.
    pub fn wait(&mut self) -> Result<Pin, StreamError> {
        loop {
            if let Some((slot, id, pins)) = self.answered.front_mut() {
                let pin = Pin { id: *id, slot: *slot };
                *pins -= 1;
                if *pins == 0 {
                    self.answered.pop_front();
                }
                self.pending -= 1;
                return Ok(pin);
            }
            if self.pending == 0 {
                return Err(StreamError::NothingPending);
            }
            self.complete_one()?;
        }
    }

    /// Waits for one read to end.
    fn complete_one(&mut self) -> Result<(), StreamError> {
        let started = Instant::now();
        let completion = self.backend.complete(true);
        self.counters.wait_ns += started.elapsed().as_nanos() as u64;
        let Some(Completion { tag, loan, result, stats }) = completion else {
            let in_flight = self.reading as u64;
            (self.reading, self.pending) = (0, 0);
            return Err(StreamError::BackendStopped { file: self.path.display().to_string(), in_flight });
        };
        drop(loan);
        self.reading -= 1;
        self.counters.add_read(&stats, result.is_ok());
        let slot = tag as u32;
        match result {
            Ok(()) => {
                let (number, waiters) = self.table.end_load(slot);
                if waiters > 0 {
                    self.answered.push_back((slot, self.map.id(number), waiters));
                }
                Ok(())
            }
            Err(failure) => {
                let (number, waiters) = self.table.fail_load(slot);
                self.pending -= waiters as usize;
                Err(self.failure(self.map.id(number), failure))
            }
        }
    }

    fn failure(&self, id: ExpertId, failure: ReadFailure) -> StreamError {
        let record = self.map.record(id);
        let (file, offset, bytes) = (self.path.display().to_string(), record.offset, record.stride);
        match failure {
            ReadFailure::Io(source) => StreamError::Read { file, offset, bytes, source },
            ReadFailure::Truncated { filled } => {
                StreamError::Truncated { file, offset, bytes, found: filled as u64 }
            }
            ReadFailure::Checksum { expected, found } => {
                StreamError::Checksum { file, layer: id.layer, expert: id.expert, offset, expected, found }
            }
        }
    }

    /// The bytes of a pinned record.
    #[must_use]
    pub fn bytes(&self, pin: &Pin) -> &[u8] {
        let bytes = self.arena.bytes(pin.slot as usize, self.map.record_bytes(pin.id.layer));
        debug_assert!(bytes.is_some(), "a pinned slot is not lent");
        bytes.unwrap_or(&[])
    }

    /// Gives a pin back; the record stays in the cache until its slot is needed.
    pub fn release(&mut self, pin: Pin) {
        self.table.unpin(pin.slot);
    }

    /// Ends all requests: waits for the reads in flight and takes every pin away. Records that have arrived stay.
    ///
    /// Pins that are still around must not be used any more.
    pub fn abandon(&mut self) {
        while self.reading > 0 {
            // Errors of reads that nobody waits for any more are nobody's.
            let _ = self.complete_one();
        }
        self.answered.clear();
        self.pending = 0;
        self.table.unpin_all();
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> StreamCounters {
        self.counters
    }

    /// Size of the cache.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        self.table.slots() as u64 * self.arena.slot_bytes() as u64
    }

    /// Slots that are pinned at this moment.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.table.pinned()
    }

    /// How records are read at this moment.
    #[must_use]
    pub fn mode(&self) -> IoMode {
        self.backend.mode()
    }
}
