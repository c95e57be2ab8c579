//! Which slot to give up when all are taken.

/// End of a list.
const NONE: u32 = u32::MAX;

/// Orders the slots that may be evicted: ready and not pinned. All memory is allocated at construction.
pub(crate) trait EvictionPolicy: Send {
    /// A slot may be evicted from now on; it was used just now.
    fn insert(&mut self, slot: u32);
    /// A slot may no longer be evicted. Does nothing where it could not be before.
    fn remove(&mut self, slot: u32);
    /// Takes out the slot to evict next; `None` where there is none.
    fn take_victim(&mut self) -> Option<u32>;
}

/// Least recently used first: a doubly linked list through arrays, every operation in constant time.
pub(crate) struct Lru {
    links: Box<[Link]>,
    oldest: u32,
    newest: u32,
}

#[derive(Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
    listed: bool,
}

impl Lru {
    /// For slots `0..slots`, none of them listed.
    pub(crate) fn new(slots: usize) -> Lru {
        let link = Link { older: NONE, newer: NONE, listed: false };
        Lru { links: vec![link; slots].into_boxed_slice(), oldest: NONE, newest: NONE }
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, slot: u32) {
        self.remove(slot);
        self.links[slot as usize] = Link { older: self.newest, newer: NONE, listed: true };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        self.newest = slot;
    }

    fn remove(&mut self, slot: u32) {
        let Link { older, newer, listed } = self.links[slot as usize];
        if !listed {
            return;
        }
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.links[slot as usize].listed = false;
    }

    fn take_victim(&mut self) -> Option<u32> {
        let victim = Some(self.oldest).filter(|&slot| slot != NONE)?;
        self.remove(victim);
        Some(victim)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain vector, oldest first.
        #[test]
        fn lru_is_a_queue_with_removal(operations in prop::collection::vec((0..3_u8, 0..6_u32), 0..200)) {
            let mut lru = Lru::new(6);
            let mut model: Vec<u32> = Vec::new();
            for (operation, slot) in operations {
                match operation {
                    0 => {
                        lru.insert(slot);
                        model.retain(|&other| other != slot);
                        model.push(slot);
                    }
                    1 => {
                        lru.remove(slot);
                        model.retain(|&other| other != slot);
                    }
                    _ => {
                        let victim = (!model.is_empty()).then(|| model.remove(0));
                        prop_assert_eq!(lru.take_victim(), victim);
                    }
                }
            }
            while !model.is_empty() {
                prop_assert_eq!(lru.take_victim(), Some(model.remove(0)));
            }
            prop_assert_eq!(lru.take_victim(), None);
        }
    }
}
