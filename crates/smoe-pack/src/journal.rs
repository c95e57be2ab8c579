//! Which units of a partial vault are finished and on the drive.
//!
//! A file of fixed-length entries; the first holds the plan's fingerprint. An entry is appended only after the unit's bytes
//! were synced, and carries a checksum of its own, so that a torn end is recognized and cut off.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::convert::ErrorSums;

const MAGIC: u64 = u64::from_le_bytes(*b"SMOEJNL1");
/// Sums of up to three parts.
const PARTS: usize = 3;
const ENTRY_BYTES: usize = 8 + 8 + PARTS * 16 + 8;

/// A finished unit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Finished {
    pub(crate) unit: usize,
    pub(crate) checksum: u64,
    /// By part; zeros where nothing was measured.
    pub(crate) sums: Vec<ErrorSums>,
}

pub(crate) struct Journal {
    file: File,
}

/// Which journal is looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JournalKey {
    /// The plan.
    pub(crate) fingerprint: u64,
    /// Whether figures of the error are needed for every unit.
    pub(crate) measure: bool,
    /// Whatever is there must not be used.
    pub(crate) fresh: bool,
}

impl Journal {
    /// Opens the journal of a plan. Returns what it holds: nothing where it is new, belongs to another plan, or the key
    /// asks for figures that it was written without.
    pub(crate) fn open(path: &Path, key: JournalKey) -> io::Result<(Self, HashMap<usize, Finished>)> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let head = entry(MAGIC, key.fingerprint ^ u64::from(key.measure), &[]);
        let mut finished = HashMap::new();
        let mut good = 0;
        if !key.fresh && bytes.starts_with(&head) {
            good = ENTRY_BYTES;
            for bytes in bytes[ENTRY_BYTES..].chunks_exact(ENTRY_BYTES) {
                let Some(unit) = parse(bytes) else { break };
                finished.insert(unit.unit, unit);
                good += ENTRY_BYTES;
            }
        }
        file.set_len(good as u64)?;
        file.seek(SeekFrom::Start(good as u64))?;
        if good == 0 {
            file.write_all(&head)?;
        }
        file.sync_data()?;
        Ok((Self { file }, finished))
    }

    /// Adds units whose bytes are on the drive.
    pub(crate) fn append(&mut self, finished: &[Finished]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(finished.len() * ENTRY_BYTES);
        for unit in finished {
            bytes.extend_from_slice(&entry(unit.unit as u64, unit.checksum, &unit.sums));
        }
        self.file.write_all(&bytes)?;
        self.file.sync_data()
    }
}

fn entry(first: u64, second: u64, sums: &[ErrorSums]) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    let none = ErrorSums::default();
    let sums = (0..PARTS).flat_map(|part| {
        let sum = sums.get(part).unwrap_or(&none);
        [sum.error.to_bits(), sum.signal.to_bits()]
    });
    let words = [first, second].into_iter().chain(sums);
    for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    let checksum = xxh3_64(&bytes[..ENTRY_BYTES - 8]);
    bytes[ENTRY_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn parse(bytes: &[u8]) -> Option<Finished> {
    let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let (&checksum, words) = words.split_last()?;
    if xxh3_64(&bytes[..ENTRY_BYTES - 8]) != checksum {
        return None;
    }
    let [unit, checksum, sums @ ..] = words else { return None };
    let sums = sums
        .as_chunks::<2>()
        .0
        .iter()
        .map(|&[error, signal]| ErrorSums {
            error: f64::from_bits(error),
            signal: f64::from_bits(signal),
            elements: 0,
        })
        .collect();
    Some(Finished { unit: usize::try_from(*unit).ok()?, checksum: *checksum, sums })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path, fingerprint: u64, measure: bool) -> io::Result<(Journal, HashMap<usize, Finished>)> {
        Journal::open(path, JournalKey { fingerprint, measure, fresh: false })
    }

    fn finished(unit: usize) -> Finished {
        let sums =
            (0..PARTS).map(|part| ErrorSums { error: part as f64, signal: 0.5, elements: 0 }).collect();
        Finished { unit, checksum: unit as u64 * 3, sums }
    }

    #[test]
    fn what_was_appended_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let (mut journal, found) = open(&path, 7, false).unwrap();
        assert!(found.is_empty());
        journal.append(&[finished(3), finished(1)]).unwrap();
        drop(journal);
        let (mut journal, found) = open(&path, 7, false).unwrap();
        assert_eq!((found.len(), &found[&3], &found[&1]), (2, &finished(3), &finished(1)));
        journal.append(&[finished(2)]).unwrap();
        assert_eq!(open(&path, 7, false).unwrap().1.len(), 3);
    }

    #[test]
    fn another_plan_starts_clean() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        open(&path, 7, false).unwrap().0.append(&[finished(3)]).unwrap();
        assert!(open(&path, 8, false).unwrap().1.is_empty());
        open(&path, 8, false).unwrap().0.append(&[finished(3)]).unwrap();
        assert!(open(&path, 8, true).unwrap().1.is_empty());
        open(&path, 8, true).unwrap().0.append(&[finished(3)]).unwrap();
        let key = JournalKey { fingerprint: 8, measure: true, fresh: true };
        assert!(Journal::open(&path, key).unwrap().1.is_empty());
        assert!(open(&path, 8, true).unwrap().1.is_empty());
    }

    #[test]
    fn a_torn_end_is_cut_off_wherever_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        open(&path, 7, false).unwrap().0.append(&[finished(0), finished(1)]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let (mut journal, found) = open(&path, 7, false).unwrap();
            assert_eq!(found.len(), (length / ENTRY_BYTES).saturating_sub(1));
            journal.append(&[finished(5)]).unwrap();
            drop(journal);
            assert!(open(&path, 7, false).unwrap().1.contains_key(&5));
        }
        let mut flipped = whole.clone();
        flipped[2 * ENTRY_BYTES + 9] ^= 1;
        std::fs::write(&path, &flipped).unwrap();
        assert_eq!(open(&path, 7, false).unwrap().1.len(), 1);
    }
}
