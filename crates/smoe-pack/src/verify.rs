//! Checking every byte of a vault.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use smoe_format::{FormatError, SUPERBLOCK_BYTES, Vault};

use crate::error::PackError;

/// How often progress is shown.
const TICK: Duration = Duration::from_millis(100);

/// What was found.
#[derive(Debug)]
pub struct VerifyReport {
    /// Checked parts.
    pub parts: usize,
    /// Bytes of them.
    pub bytes: u64,
    /// Time it took.
    pub elapsed: Duration,
    /// One message for each damaged part.
    pub damage: Vec<String>,
}

/// Something with a checksum, or a gap that must be zero.
#[derive(Clone, Copy)]
enum Piece {
    Expert { layer_index: usize, expert: u32, bytes: u64 },
    Resident { index: usize, bytes: u64 },
    Gap { offset: u64, bytes: u64 },
}

impl Piece {
    fn bytes(self) -> u64 {
        match self {
            Self::Expert { bytes, .. } | Self::Resident { bytes, .. } | Self::Gap { bytes, .. } => bytes,
        }
    }
}

/// Reads everything; damaged parts are collected, not the end of it.
///
/// # Errors
/// The vault cannot be opened, or the user asked to stop.
pub fn verify(
    path: &Path,
    threads: usize,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, PackError> {
    let started = Instant::now();
    let vault = Vault::open(path)?;
    let pieces = pieces(&vault);
    let total: u64 = pieces.iter().map(|piece| piece.bytes()).sum();
    let file = File::open(path).map_err(PackError::io(path))?;
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let mut damage = Vec::new();
    let mut done = 0;
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            let (sender, next, stop, pieces, vault, file) =
                (sender.clone(), &next, &stop, &pieces, &vault, &file);
            scope.spawn(move || {
                let mut buffer = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&piece) = pieces.get(index) else { return };
                    let result = check(vault, file, piece, &mut buffer);
                    if sender.send((index, piece.bytes(), result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        loop {
            match receiver.recv_timeout(TICK) {
                Ok((index, bytes, result)) => {
                    done += bytes;
                    if let Err(error) = result {
                        damage.push((index, error.to_string()));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            progress(done, total);
            if cancel.load(Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
            }
        }
    });
    if stop.load(Ordering::Relaxed) {
        return Err(PackError::Interrupted {
            done: next.into_inner().min(pieces.len()),
            total: pieces.len(),
        });
    }
    damage.sort();
    let damage = damage.into_iter().map(|(_, message)| message).collect();
    Ok(VerifyReport { parts: pieces.len(), bytes: total, elapsed: started.elapsed(), damage })
}

fn pieces(vault: &Vault) -> Vec<Piece> {
    let header = vault.header();
    let superblock = vault.superblock();
    let mut pieces = Vec::new();
    for (layer_index, layer) in header.expert_layers.iter().enumerate() {
        pieces.extend((0..layer.count).map(|expert| Piece::Expert {
            layer_index,
            expert,
            bytes: layer.stride,
        }));
    }
    for (index, entry) in header.resident.iter().enumerate() {
        pieces.push(Piece::Resident { index, bytes: entry.bytes });
    }
    // What lies between the parts has no checksum; it must be zero.
    let mut used = vec![(0, SUPERBLOCK_BYTES), superblock.header, superblock.checksums];
    used.extend(header.resident.iter().map(|entry| (superblock.resident.0 + entry.offset, entry.bytes)));
    used.extend(
        header
            .expert_layers
            .iter()
            .map(|layer| (superblock.experts.0 + layer.base, layer.stride * u64::from(layer.count))),
    );
    used.sort_unstable();
    let mut end = 0;
    for (offset, bytes) in used {
        if offset > end {
            pieces.push(Piece::Gap { offset: end, bytes: offset - end });
        }
        end = end.max(offset + bytes);
    }
    pieces
}

fn check(vault: &Vault, file: &File, piece: Piece, buffer: &mut Vec<u8>) -> Result<(), FormatError> {
    buffer.resize(piece.bytes() as usize, 0);
    match piece {
        Piece::Expert { layer_index, expert, .. } => vault.read_expert(layer_index, expert, buffer),
        Piece::Resident { index, .. } => vault.read_resident(index, buffer),
        Piece::Gap { offset, .. } => {
            let path = vault.path();
            file.read_exact_at(buffer, offset)
                .map_err(|source| FormatError::Io { path: path.to_owned(), source })?;
            match buffer.iter().position(|&byte| byte != 0) {
                None => Ok(()),
                Some(at) => Err(FormatError::Invalid {
                    path: path.to_owned(),
                    what: format!("the unused byte at {}", offset + at as u64),
                    expected: "0".into(),
                    found: buffer[at].to_string(),
                }),
            }
        }
    }
}
