//! Slots of one buffer, lent one by one to I/O threads.
//!
//! The arena has one owner that reads finished slots and lends others out to be written. The rules that make this
//! sound hold by construction and not by the caller's discipline:
//! - a loan is taken through `&mut SlotArena`, so no slice of any slot that the owner gave out is alive then;
//! - a slot has at most one loan, and a [`SlotLoan`] cannot be cloned: its holder has the only access to the slot;
//! - the owner gets no slice of a slot while it is lent (an atomic flag, cleared when the loan is dropped);
//! - the memory lives as long as the owner or any loan.
// Disjoint slots of one mapping are handed to other threads; the borrow checker cannot see that they are disjoint.
#![allow(unsafe_code)]

use std::fmt;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{AlignedBuffer, StreamError};

/// Equal slots of one aligned buffer; the only handle through which slots are read and lent.
pub(crate) struct SlotArena {
    memory: Arc<SlotMemory>,
}

struct SlotMemory {
    /// Never borrowed as a slice; only its base address is used.
    buffer: AlignedBuffer,
    slot_bytes: usize,
    lent: Box<[AtomicBool]>,
}

impl SlotArena {
    /// `slots` slots of `slot_bytes` bytes each, back to back.
    pub(crate) fn new(slots: usize, slot_bytes: usize) -> Result<SlotArena, StreamError> {
        let bytes = slots.saturating_mul(slot_bytes);
        let buffer = AlignedBuffer::new(bytes)?;
        let lent = (0..slots).map(|_| AtomicBool::new(false)).collect();
        Ok(SlotArena { memory: Arc::new(SlotMemory { buffer, slot_bytes, lent }) })
    }

    /// Bytes of one slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.memory.slot_bytes
    }

    /// The first `len` bytes of a slot; `None` while it is lent, or where there is no such slot or length.
    pub(crate) fn bytes(&self, slot: usize, len: usize) -> Option<&[u8]> {
        let memory = &*self.memory;
        if len > memory.slot_bytes || memory.lent.get(slot)?.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: `slot` is below the number of slots (it has a flag) and `len` at most a slot, so the range lies in
        // the buffer, which is initialized. Nobody writes it: the slot is not lent (acquire pairs with the release in
        // the loan's drop, so what the loan wrote is visible), and a new loan needs `&mut self`, which the returned
        // borrow of `self` excludes.
        Some(unsafe { slice::from_raw_parts(memory.slot_start(slot), len) })
    }

    /// Lends the first `len` bytes of a slot for writing; `None` where it is lent already or does not exist.
    pub(crate) fn lend(&mut self, slot: usize, len: usize) -> Option<SlotLoan> {
        let memory = &*self.memory;
        if len > memory.slot_bytes || memory.lent.get(slot)?.swap(true, Ordering::Acquire) {
            return None;
        }
        Some(SlotLoan { memory: Arc::clone(&self.memory), slot, len })
    }
}

impl SlotMemory {
    /// First byte of a slot that exists.
    fn slot_start(&self, slot: usize) -> *mut u8 {
        debug_assert!(slot < self.lent.len());
        // SAFETY: callers pass a slot with a flag, and the buffer holds `slot_bytes` bytes for each flag.
        unsafe { self.buffer.base().as_ptr().add(slot * self.slot_bytes) }
    }
}

/// The exclusive right to write one slot of the cache, until it is dropped.
///
/// A read backend gets one with each [`ReadRequest`](crate::ReadRequest) and gives it back in the
/// [`Completion`](crate::Completion). The slot's memory outlives the loan, whatever else is dropped.
pub struct SlotLoan {
    memory: Arc<SlotMemory>,
    slot: usize,
    len: usize,
}

impl SlotLoan {
    /// Length of the lent range in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the lent range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The lent bytes. Whatever an earlier use of the slot left is still there.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `lend` checked slot and length and saw the flag clear before setting it, so this is the only loan of
        // the slot, the owner gives out no slice of it until the loan is dropped, and `&mut self` makes this the only
        // slice made from the loan. The `Arc` keeps the memory mapped.
        unsafe { slice::from_raw_parts_mut(self.memory.slot_start(self.slot), self.len) }
    }
}

impl Drop for SlotLoan {
    fn drop(&mut self) {
        if let Some(lent) = self.memory.lent.get(self.slot) {
            lent.store(false, Ordering::Release);
        }
    }
}

impl fmt::Debug for SlotLoan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotLoan(slot {}, {} bytes)", self.slot, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lent_slot_cannot_be_read_or_lent_again() {
        let mut arena = SlotArena::new(3, 4096).unwrap();
        let mut loan = arena.lend(1, 100).unwrap();
        assert!(arena.lend(1, 100).is_none());
        assert!(arena.bytes(1, 100).is_none());
        assert!(arena.bytes(0, 4096).is_some());
        loan.as_mut_slice().fill(7);
        drop(loan);
        assert_eq!(arena.bytes(1, 101).unwrap()[98..], [7, 7, 0]);
        assert!(arena.lend(1, 4096).is_some());
    }

    #[test]
    fn slots_and_lengths_that_do_not_exist_are_refused() {
        let mut arena = SlotArena::new(2, 4096).unwrap();
        assert!(arena.lend(2, 1).is_none());
        assert!(arena.lend(0, 4097).is_none());
        assert!(arena.bytes(2, 1).is_none());
        assert!(arena.bytes(0, 4097).is_none());
        assert!(SlotArena::new(usize::MAX, 4096).is_err());
    }

    #[test]
    fn a_loan_outlives_its_arena() {
        let mut arena = SlotArena::new(2, 4096).unwrap();
        let mut loan = arena.lend(1, 4096).unwrap();
        drop(arena);
        loan.as_mut_slice().fill(3);
        assert!(loan.as_mut_slice().iter().all(|&byte| byte == 3));
    }

    #[test]
    fn threads_write_disjoint_slots() {
        let mut arena = SlotArena::new(16, 4096).unwrap();
        let loans: Vec<_> = (0..16).map(|slot| arena.lend(slot, 4096).unwrap()).collect();
        std::thread::scope(|scope| {
            for (slot, mut loan) in loans.into_iter().enumerate() {
                scope.spawn(move || loan.as_mut_slice().fill(slot as u8));
            }
        });
        for slot in 0..16 {
            assert!(arena.bytes(slot, 4096).unwrap().iter().all(|&byte| byte == slot as u8));
        }
    }
}
