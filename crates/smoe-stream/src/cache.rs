//! Which expert is in which slot, and which slots may change. No I/O and no memory of slots here, only bookkeeping;
//! everything is allocated at construction.

use crate::policy::EvictionPolicy;

/// No slot, no expert.
const NONE: u32 = u32::MAX;

/// What the cache knows about an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    Absent,
    /// A read into this slot is in flight.
    Loading(u32),
    Ready(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Empty,
    Loading,
    Ready,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    state: SlotState,
    expert: u32,
    pins: u32,
    /// Requests that the read in flight will answer.
    waiters: u32,
}

/// The slot table. A slot is in exactly one place: free (empty), loading, ready and pinned, or ready and listed with
/// the eviction policy.
pub(crate) struct SlotTable {
    slots: Box<[Slot]>,
    slot_of_expert: Box<[u32]>,
    free: Vec<u32>,
    policy: Box<dyn EvictionPolicy>,
    pinned: usize,
}

impl SlotTable {
    /// `slots` empty slots for `experts` experts; the policy must have room for as many slots.
    pub(crate) fn new(slots: usize, experts: usize, policy: Box<dyn EvictionPolicy>) -> SlotTable {
        let empty = Slot { state: SlotState::Empty, expert: NONE, pins: 0, waiters: 0 };
        SlotTable {
            slots: vec![empty; slots].into(),
            slot_of_expert: vec![NONE; experts].into(),
            free: (0..slots as u32).rev().collect(),
            policy,
            pinned: 0,
        }
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Slots with at least one pin.
    pub(crate) fn pinned(&self) -> usize {
        self.pinned
    }

    pub(crate) fn lookup(&self, expert: u32) -> Lookup {
        match self.slot_of_expert[expert as usize] {
            NONE => Lookup::Absent,
            slot => match self.slots[slot as usize].state {
                SlotState::Empty => Lookup::Absent,
                SlotState::Loading => Lookup::Loading(slot),
                SlotState::Ready => Lookup::Ready(slot),
            },
        }
    }

    /// Adds a pin to a ready slot.
    pub(crate) fn pin(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        debug_assert_eq!(entry.state, SlotState::Ready);
        if entry.pins == 0 {
            self.pinned += 1;
            self.policy.remove(slot);
        }
        entry.pins += 1;
    }

    /// Takes a pin away; the last one leaves the slot evictable, as the most recently used.
    pub(crate) fn unpin(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        debug_assert!(entry.pins > 0);
        entry.pins = entry.pins.saturating_sub(1);
        if entry.pins == 0 {
            self.pinned -= 1;
            self.policy.insert(slot);
        }
    }

    /// Finds a slot for an absent expert and marks it loading, for one request. `None`: every slot is loading or
    /// pinned. The second value says whether another expert was evicted for it.
    pub(crate) fn begin_load(&mut self, expert: u32) -> Option<(u32, bool)> {
        debug_assert_eq!(self.lookup(expert), Lookup::Absent);
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, false),
            None => (self.policy.take_victim()?, true),
        };
        let entry = &mut self.slots[slot as usize];
        if evicted {
            self.slot_of_expert[entry.expert as usize] = NONE;
        }
        *entry = Slot { state: SlotState::Loading, expert, pins: 0, waiters: 1 };
        self.slot_of_expert[expert as usize] = slot;
        Some((slot, evicted))
    }

    /// One more request waits for the read into this slot.
    pub(crate) fn join_load(&mut self, slot: u32) {
        debug_assert_eq!(self.slots[slot as usize].state, SlotState::Loading);
        self.slots[slot as usize].waiters += 1;
    }

    /// The read ended well: the slot is ready, with one pin for each request that waited (returned with the expert).
    pub(crate) fn end_load(&mut self, slot: u32) -> (u32, u32) {
        let entry = &mut self.slots[slot as usize];
        debug_assert_eq!(entry.state, SlotState::Loading);
        let (expert, waiters) = (entry.expert, entry.waiters);
        *entry = Slot { state: SlotState::Ready, expert, pins: waiters, waiters: 0 };
        match waiters {
            0 => self.policy.insert(slot),
            _ => self.pinned += 1,
        }
        (expert, waiters)
    }

    /// The read failed: the slot is empty again. Returns the expert that it was for and the requests that waited.
    pub(crate) fn fail_load(&mut self, slot: u32) -> (u32, u32) {
        let entry = &mut self.slots[slot as usize];
        debug_assert_eq!(entry.state, SlotState::Loading);
        let (expert, waiters) = (entry.expert, entry.waiters);
        *entry = Slot { state: SlotState::Empty, expert: NONE, pins: 0, waiters: 0 };
        self.slot_of_expert[expert as usize] = NONE;
        self.free.push(slot);
        (expert, waiters)
    }

    /// Takes every pin away, lowest slot first.
    pub(crate) fn unpin_all(&mut self) {
        for slot in 0..self.slots.len() {
            let entry = &mut self.slots[slot];
            if entry.pins > 0 {
                entry.pins = 0;
                self.policy.insert(slot as u32);
            }
        }
        self.pinned = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::Lru;

    const SLOTS: usize = 4;
    const EXPERTS: u32 = 9;

    /// The same cache, written for clarity: (expert, loading, pins, waiters), least recently used first.
    #[derive(Default)]
    struct Model(Vec<(u32, bool, u32, u32)>);

    impl Model {
        fn position(&self, expert: u32) -> Option<usize> {
            self.0.iter().position(|entry| entry.0 == expert)
        }

        fn begin_load(&mut self, expert: u32) -> Option<bool> {
            let evicted = self.0.len() == SLOTS;
            if evicted {
                let victim = self.0.iter().position(|&(_, loading, pins, _)| !loading && pins == 0)?;
                self.0.remove(victim);
            }
            self.0.push((expert, true, 0, 1));
            Some(evicted)
        }
    }

    proptest! {
        #[test]
        fn the_table_agrees_with_a_plain_model(steps in prop::collection::vec((0..4_u8, 0..EXPERTS), 0..400)) {
            let mut table = SlotTable::new(SLOTS, EXPERTS as usize, Box::new(Lru::new(SLOTS)));
            let mut model = Model::default();
            for (step, expert) in steps {
                let position = model.position(expert);
                match (step, table.lookup(expert)) {
                    (0 | 1, Lookup::Absent) => {
                        prop_assert_eq!(position, None);
                        let evicted = table.begin_load(expert).map(|(_, evicted)| evicted);
                        prop_assert_eq!(evicted, model.begin_load(expert));
                    }
                    (0, Lookup::Loading(slot)) => {
                        let entry = &mut model.0[position.unwrap()];
                        prop_assert!(entry.1);
                        table.join_load(slot);
                        entry.3 += 1;
                    }
                    (0, Lookup::Ready(slot)) => {
                        let entry = &mut model.0[position.unwrap()];
                        prop_assert!(!entry.1);
                        table.pin(slot);
                        entry.2 += 1;
                    }
                    (1 | 2, Lookup::Loading(slot)) => {
                        let entry = &mut model.0[position.unwrap()];
                        prop_assert_eq!(table.end_load(slot), (expert, entry.3));
                        *entry = (expert, false, entry.3, 0);
                    }
                    (3, Lookup::Loading(slot)) => {
                        model.0.remove(position.unwrap());
                        prop_assert_eq!(table.fail_load(slot).0, expert);
                    }
                    (1 | 2, Lookup::Ready(slot)) if model.0[position.unwrap()].2 > 0 => {
                        table.unpin(slot);
                        let mut entry = model.0.remove(position.unwrap());
                        entry.2 -= 1;
                        // Order among pinned entries does not matter: only the last release places an entry.
                        model.0.push(entry);
                    }
                    (_, found) => prop_assert_eq!(found == Lookup::Absent, position.is_none()),
                }
                prop_assert_eq!(table.pinned(), model.0.iter().filter(|entry| entry.2 > 0).count());
                for expert in 0..EXPERTS {
                    let expected = model.position(expert).map(|position| model.0[position].1);
                    let found = match table.lookup(expert) {
                        Lookup::Absent => None,
                        Lookup::Loading(_) => Some(true),
                        Lookup::Ready(_) => Some(false),
                    };
                    prop_assert_eq!(found, expected);
                }
            }
            for expert in 0..EXPERTS {
                if let Lookup::Loading(slot) = table.lookup(expert) {
                    table.end_load(slot);
                }
            }
            table.unpin_all();
            prop_assert_eq!(table.pinned(), 0);
            let before: Vec<u32> = (0..EXPERTS).filter(|&e| table.lookup(e) == Lookup::Absent).collect();
            for expert in before.into_iter().take(SLOTS) {
                prop_assert!(table.begin_load(expert).is_some(), "every slot can be had after unpin_all");
            }
        }
    }
}
