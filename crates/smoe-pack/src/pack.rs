//! Writing a vault.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use crate::convert::{Converter, ErrorSums};
use crate::disk;
use crate::error::PackError;
use crate::journal::{Finished, Journal, JournalKey};
use crate::plan::{PackPlan, Unit};

/// How often finished units are synced and written to the journal: what a crash can cost.
const COMMIT_EVERY: Duration = Duration::from_secs(1);
/// How often progress is shown and a wish to stop is looked at.
const TICK: Duration = Duration::from_millis(100);
/// Bytes compared at a time.
const COMPARE_BYTES: u64 = 4 << 20;

/// How to write.
#[derive(Debug, Clone, Copy)]
pub struct PackRun<'a> {
    /// Threads that convert.
    pub threads: usize,
    /// Replace a vault that exists.
    pub force: bool,
    /// Measure what the formats lose.
    pub measure_error: bool,
    /// Set by whoever wants to stop; what is finished is kept.
    pub cancel: &'a AtomicBool,
}

/// Where packing stands.
#[derive(Debug, Clone, Copy)]
pub struct PackProgress {
    /// Bytes of the checkpoint that were converted in this run.
    pub done_bytes: u64,
    /// Bytes that were converted by earlier runs.
    pub resumed_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

/// What was written.
#[derive(Debug, Clone)]
pub struct PackReport {
    /// Length of the vault.
    pub vault_bytes: u64,
    /// Units that an earlier run had finished.
    pub resumed_units: usize,
    /// Time of this run.
    pub elapsed: Duration,
    /// What each format lost, by class and format, where measured.
    pub errors: Vec<(String, ErrorSums)>,
}

/// Writes the planned vault to `output`, or goes on where an interrupted run stopped.
///
/// # Errors
/// [`PackError`]; nothing is left under the final name.
pub fn pack(
    plan: &PackPlan,
    output: &Path,
    run: PackRun<'_>,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<PackReport, PackError> {
    let started = Instant::now();
    // Through a link, what it points to is replaced, and the link stays.
    let target = fs::canonicalize(output).unwrap_or_else(|_| output.to_owned());
    let output = target.as_path();
    let names = Names::new(output)?;
    if let Ok(metadata) = fs::metadata(output) {
        if metadata.is_dir() {
            return Err(PackError::Output {
                path: output.to_owned(),
                reason: "is a directory; name the vault's file",
            });
        }
        if !metadata.is_file() {
            return Err(PackError::Output { path: output.to_owned(), reason: "is no regular file" });
        }
        if !run.force {
            return Err(PackError::Exists { path: output.to_owned() });
        }
    }
    check_equal(plan, run.cancel)?;
    let mut partial = Partial::open(names, plan, run.measure_error)?;
    let resumed_units = partial.finished.len();
    let converted = partial.reserve(plan).and_then(|()| convert_all(plan, &mut partial, run, progress));
    if let Err(error) = converted {
        // What the checkpoint cannot give will not come by trying again; all else may.
        let resumable =
            matches!(error, PackError::Interrupted { .. } | PackError::NoSpace { .. } | PackError::Io { .. });
        if !resumable || partial.finished.is_empty() {
            partial.remove();
        }
        return Err(error);
    }
    let errors = errors_by_format(plan, &partial.finished);
    partial.complete(plan, output)?;
    let errors = if run.measure_error { errors } else { Vec::new() };
    Ok(PackReport { vault_bytes: plan.vault_bytes(), resumed_units, elapsed: started.elapsed(), errors })
}

/// The files beside the vault.
struct Names {
    folder: PathBuf,
    partial: PathBuf,
    journal: PathBuf,
}

impl Names {
    fn new(output: &Path) -> Result<Self, PackError> {
        let Some(name) = output.file_name() else {
            return Err(PackError::Output { path: output.to_owned(), reason: "names no file" });
        };
        let beside = |ending: &str| {
            let mut name = name.to_owned();
            name.push(ending);
            output.with_file_name(name)
        };
        let folder = match output.parent() {
            Some(folder) if folder != Path::new("") => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok(Self { folder, partial: beside(".partial"), journal: beside(".partial.journal") })
    }
}

/// A vault in the making.
struct Partial {
    names: Names,
    /// Locked for as long as it is open.
    file: File,
    journal: Journal,
    finished: HashMap<usize, Finished>,
}

impl Partial {
    fn open(names: Names, plan: &PackPlan, measure: bool) -> Result<Self, PackError> {
        let path = &names.partial;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(PackError::io(path))?;
        let lock = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        match lock {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(PackError::Busy { path: path.clone() }),
            // File systems without locks: two runs at once are then the user's concern.
            Err(_) => {}
        }
        // The file before the lock may have been completed and renamed by the process that held it.
        let same = fs::metadata(path).ok().zip(file.metadata().ok()).is_some_and(|(named, open)| {
            use std::os::unix::fs::MetadataExt;
            named.ino() == open.ino() && named.dev() == open.dev()
        });
        if !same {
            return Err(PackError::Busy { path: path.clone() });
        }
        // A partial file that lost its bytes cannot be continued, whatever the journal says.
        let whole = file.metadata().map_err(PackError::io(path))?.len() == plan.vault_bytes();
        let key = JournalKey { fingerprint: plan.fingerprint(), measure, fresh: !whole };
        let (journal, mut finished) =
            Journal::open(&names.journal, key).map_err(PackError::io(&names.journal))?;
        finished.retain(|&unit, _| unit < plan.units.len());
        if finished.is_empty() {
            file.set_len(0).map_err(PackError::io(path))?;
        }
        Ok(Self { names, file, journal, finished })
    }

    /// Makes sure that there is room for everything.
    fn reserve(&self, plan: &PackPlan) -> Result<(), PackError> {
        let needed = plan.vault_bytes().saturating_sub(disk::allocated_bytes(&self.file));
        let free = disk::free_bytes(&self.names.folder);
        if free.is_some_and(|free| free < needed) {
            return Err(PackError::NoSpace { path: self.names.partial.clone(), needed, free });
        }
        disk::reserve(&self.file, plan.vault_bytes()).map_err(|error| write_error(&self.names, needed, error))
    }

    /// Leaves nothing behind.
    fn remove(self) {
        let _ = fs::remove_file(&self.names.journal);
        let _ = fs::remove_file(&self.names.partial);
    }

    /// Syncs what was written and notes it.
    fn commit(&mut self, finished: &mut Vec<Finished>) -> Result<(), PackError> {
        if finished.is_empty() {
            return Ok(());
        }
        self.file.sync_data().map_err(|error| write_error(&self.names, 0, error))?;
        disk::forget_pages(&self.file);
        self.journal.append(finished).map_err(|error| write_error(&self.names, 0, error))?;
        self.finished.extend(finished.drain(..).map(|unit| (unit.unit, unit)));
        Ok(())
    }

    /// Writes tables and superblock, syncs, and gives the vault its name.
    fn complete(self, plan: &PackPlan, output: &Path) -> Result<(), PackError> {
        let table: Vec<u8> = (0..plan.units.len())
            .flat_map(|unit| self.finished.get(&unit).map_or(0, |unit| unit.checksum).to_le_bytes())
            .collect();
        let mut superblock = plan.superblock;
        superblock.checksums_checksum = xxh3_64(&table);
        let write = |bytes: &[u8], offset: u64| {
            self.file
                .write_all_at(bytes, offset)
                .map_err(|error| write_error(&self.names, bytes.len() as u64, error))
        };
        write(&table, superblock.checksums.0)?;
        write(&plan.header_json, superblock.header.0)?;
        write(&superblock.encode(), 0)?;
        self.file.sync_all().map_err(PackError::io(&self.names.partial))?;
        fs::rename(&self.names.partial, output).map_err(PackError::io(output))?;
        // The new name is durable when the directory is; not every file system can sync one.
        if let Ok(folder) = File::open(&self.names.folder) {
            let _ = folder.sync_all();
        }
        let _ = fs::remove_file(&self.names.journal);
        Ok(())
    }
}

fn write_error(names: &Names, needed: u64, error: io::Error) -> PackError {
    let path = names.partial.clone();
    if disk::is_no_space(&error) {
        return PackError::NoSpace { path, needed, free: disk::free_bytes(&names.folder) };
    }
    if disk::is_file_limit(&error) {
        return PackError::FileLimit { path, bytes: needed };
    }
    PackError::Io { path, source: error }
}

/// Converts all units that are not finished, on several threads; this one commits and shows progress.
fn convert_all(
    plan: &PackPlan,
    partial: &mut Partial,
    run: PackRun<'_>,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<(), PackError> {
    let todo: Vec<usize> =
        (0..plan.units.len()).filter(|unit| !partial.finished.contains_key(unit)).collect();
    let total_bytes = plan.source_bytes();
    let todo_bytes: u64 = todo.iter().map(|&unit| plan.units[unit].source_bytes()).sum();
    let resumed_bytes = total_bytes - todo_bytes;
    let file = partial.file.try_clone().map_err(PackError::io(&partial.names.partial))?;
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let work = Work { plan, file: &file, todo: &todo, next: &next, stop: &stop, measure: run.measure_error };
    let mut failure = None;
    let mut waiting = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..run.threads.clamp(1, todo.len().max(1)) {
            let (sender, work) = (sender.clone(), &work);
            scope.spawn(move || work.take_all(&sender));
        }
        drop(sender);
        let mut done_bytes = 0;
        let mut committed = Instant::now();
        loop {
            match receiver.recv_timeout(TICK) {
                Ok(Ok(finished)) => {
                    done_bytes += plan.units[finished.unit].source_bytes();
                    waiting.push(finished);
                }
                Ok(Err(error)) => {
                    stop.store(true, Ordering::Relaxed);
                    failure.get_or_insert(error);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            progress(PackProgress { done_bytes, resumed_bytes, total_bytes });
            if run.cancel.load(Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
            }
            if committed.elapsed() >= COMMIT_EVERY {
                if let Err(error) = partial.commit(&mut waiting) {
                    stop.store(true, Ordering::Relaxed);
                    failure.get_or_insert(error);
                }
                committed = Instant::now();
            }
        }
    });
    let committed = partial.commit(&mut waiting);
    if let Some(failure) = failure {
        return Err(match failure {
            PackError::Io { source, .. } => write_error(&partial.names, todo_bytes, source),
            other => other,
        });
    }
    committed?;
    let (done, total) = (partial.finished.len(), plan.units.len());
    if done == total { Ok(()) } else { Err(PackError::Interrupted { done, total }) }
}

/// What the converting threads share.
struct Work<'a> {
    plan: &'a PackPlan,
    file: &'a File,
    todo: &'a [usize],
    next: &'a AtomicUsize,
    stop: &'a AtomicBool,
    measure: bool,
}

impl Work<'_> {
    fn take_all(&self, sender: &mpsc::Sender<Result<Finished, PackError>>) {
        let mut converter = Converter::new(&self.plan.checkpoint, self.measure);
        while !self.stop.load(Ordering::Relaxed) {
            let Some(&unit) = self.todo.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            let result = self.convert(&mut converter, unit, &self.plan.units[unit]);
            if sender.send(result).is_err() {
                return;
            }
        }
    }

    fn convert(
        &self,
        converter: &mut Converter<'_>,
        index: usize,
        unit: &Unit,
    ) -> Result<Finished, PackError> {
        // The file was cut to nothing when it was begun, so padding is zero already.
        let (checksum, sums) = converter.convert(unit, &mut |offset, bytes| {
            self.file.write_all_at(bytes, unit.offset + offset).map_err(PackError::io(Path::new("")))
        })?;
        Ok(Finished { unit: index, checksum, sums })
    }
}

/// Compares tensors that the configuration says are the same.
fn check_equal(plan: &PackPlan, cancel: &AtomicBool) -> Result<(), PackError> {
    let checkpoint = &plan.checkpoint;
    for (first, second) in &plan.must_equal {
        let lengths = [first, second].map(|name| checkpoint.tensors().get(name).map(|tensor| tensor.bytes));
        let not_equal = |byte| PackError::NotEqual {
            path: checkpoint.path().to_owned(),
            first: first.clone(),
            second: second.clone(),
            byte,
        };
        let [Some(length), Some(other)] = lengths else { continue };
        if length != other {
            return Err(not_equal(length.min(other)));
        }
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for start in (0..length).step_by(COMPARE_BYTES as usize) {
            if cancel.load(Ordering::Relaxed) {
                return Err(PackError::Interrupted { done: 0, total: plan.units.len() });
            }
            let bytes = COMPARE_BYTES.min(length - start) as usize;
            a.resize(bytes, 0);
            b.resize(bytes, 0);
            checkpoint.read(first, start, &mut a)?;
            checkpoint.read(second, start, &mut b)?;
            if let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) {
                return Err(not_equal(start + at as u64));
            }
        }
    }
    Ok(())
}

/// Sums in the order of the units, so that they do not depend on the threads.
fn errors_by_format(plan: &PackPlan, finished: &HashMap<usize, Finished>) -> Vec<(String, ErrorSums)> {
    let mut all: Vec<(String, ErrorSums)> = Vec::new();
    for (index, unit) in plan.units.iter().enumerate() {
        let Some(finished) = finished.get(&index) else { continue };
        for (part, sums) in unit.parts.iter().zip(&finished.sums) {
            let name = format!("{} {}", part.class, part.format);
            let sums = ErrorSums { elements: part.elements(), ..*sums };
            match all.iter_mut().find(|(other, _)| *other == name) {
                Some((_, total)) => total.add(&sums),
                None => all.push((name, sums)),
            }
        }
    }
    all
}
