//! Threads that wait for work by spinning, then yielding, then sleeping.
//!
//! A fork-join costs well under a microsecond while the threads are awake, and idle threads cost nothing. Rules:
//! - a run is open from the moment its job is in place until its caller has no task left to begin;
//! - a thread that sees a run announces itself (`active`), then looks whether the run is still open; only then does it
//!   touch the job. The caller closes the run, then waits until nobody is active. Whichever of both comes first in the
//!   one order of all these accesses (they are sequentially consistent), no thread holds a job that has ended, and the
//!   caller never waits for a thread that was asleep.
// The job's lifetime is erased while a run is open.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Looks for work before a thread starts to yield: a few tens of microseconds, more than lies between two products.
const SPINS: u32 = 4_000;
/// Yields before it goes to sleep.
const YIELDS: u32 = 64;

thread_local! {
    /// Whether this thread is inside a run; a run within a run is done by the thread alone.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A fixed number of threads, the caller among them.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a run: there is one job at a time.
    caller: Mutex<()>,
}

type Task = dyn Fn(usize) + Sync;

struct Shared {
    /// The task of the open run; valid only then.
    job: UnsafeCell<Option<*const Task>>,
    /// Next part to begin, and their number.
    next: AtomicUsize,
    parts: AtomicUsize,
    /// Number of the last run.
    epoch: AtomicU64,
    open: AtomicBool,
    active: AtomicUsize,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the caller alone, while the run is closed and nobody is active, and read by threads that
// are active and saw the run open after that. The task itself is `Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl ThreadPool {
    /// Starts `threads - 1` threads; where the system refuses one, there are fewer.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            epoch: AtomicU64::new(0),
            open: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let start = |index: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("smoe-compute-{index}"))
                .spawn(move || shared.serve())
                .ok()
        };
        let workers = (1..threads.max(1)).map_while(start).collect();
        Self { shared, workers, caller: Mutex::new(()) }
    }

    /// Number of threads, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(0)` to `task(parts - 1)` once each, in any order on any of the threads, and returns when all have
    /// returned. A panic in a task comes out here after that.
    pub fn run(&self, parts: usize, task: &(dyn Fn(usize) + Sync)) {
        if parts <= 1 || self.workers.is_empty() || INSIDE.get() {
            (0..parts).for_each(task);
            return;
        }
        let turn = lock(&self.caller);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is used by this call and by threads that found the run open
        // and are waited for below, before `task` can end.
        let task: *const Task =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Task>(task) };
        // SAFETY: the run is closed and nobody is active (the last one waited for that), so nobody reads the job.
        unsafe { *shared.job.get() = Some(task) };
        shared.next.store(0, SeqCst);
        shared.parts.store(parts, SeqCst);
        shared.open.store(true, SeqCst);
        shared.epoch.fetch_add(1, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            let _guard = lock(&shared.sleep);
            shared.wake.notify_all();
        }
        shared.work();
        shared.open.store(false, SeqCst);
        let mut looks = 0;
        while shared.active.load(SeqCst) > 0 {
            looks += 1;
            if looks < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panic = lock(&shared.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `task(index, chunk)` for each chunk of `data`, which divides into chunks of `chunk` elements.
    pub fn for_each_chunk<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        assert!(
            chunk > 0 && data.len().is_multiple_of(chunk),
            "{} elements in chunks of {chunk}",
            data.len()
        );
        let chunks = data.len() / chunk;
        let start = Start(data.as_mut_ptr());
        self.run(chunks, &|index| {
            // SAFETY: chunks are disjoint parts of `data`, each given out once, and `data` is borrowed until `run`
            // returns.
            let part = unsafe { std::slice::from_raw_parts_mut(start.get().add(index * chunk), chunk) };
            task(index, part);
        });
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ThreadPool({} threads)", self.threads())
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// The start of a slice whose parts go to several threads.
struct Start<T>(*mut T);

// SAFETY: the parts are disjoint and `T` can be sent.
unsafe impl<T: Send> Sync for Start<T> {}

impl<T> Start<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

impl Shared {
    /// The life of a thread.
    fn serve(&self) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(SeqCst) {
                return;
            }
            self.active.fetch_add(1, SeqCst);
            if self.open.load(SeqCst) {
                self.work();
            }
            self.active.fetch_sub(1, SeqCst);
        }
    }

    /// Waits for a run after number `seen`.
    fn next_epoch(&self, seen: u64) -> u64 {
        for look in 0..SPINS + YIELDS {
            let epoch = self.epoch.load(SeqCst);
            if epoch != seen {
                return epoch;
            }
            if look < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, SeqCst);
        loop {
            // Looked at after `sleepers` was raised: either this sees the new run, or its caller sees a sleeper.
            let epoch = self.epoch.load(SeqCst);
            if epoch != seen {
                self.sleepers.fetch_sub(1, SeqCst);
                return epoch;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes parts until none is left. The run is open, or the caller is this thread.
    fn work(&self) {
        // SAFETY: the job was put in place before the run was opened and stays until this thread is no longer active.
        let task = unsafe { *self.job.get() };
        let Some(task) = task else { return };
        // SAFETY: the caller of `run` still borrows the task: it waits for every active thread.
        let task = unsafe { &*task };
        let parts = self.parts.load(SeqCst);
        INSIDE.set(true);
        loop {
            let part = self.next.fetch_add(1, SeqCst);
            if part >= parts {
                break;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(part))) {
                *lock(&self.panic) = Some(panic);
            }
        }
        INSIDE.set(false);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_part_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = ThreadPool::new(threads);
            for round in 0..200 {
                let counts: Vec<_> = (0..round % 37).map(|_| AtomicUsize::new(0)).collect();
                pool.run(counts.len(), &|part| {
                    counts[part].fetch_add(1, SeqCst);
                });
                assert!(counts.iter().all(|count| count.load(SeqCst) == 1));
                if round % 50 == 0 {
                    // Long enough for the threads to fall asleep.
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        }
    }

    #[test]
    fn chunks_are_disjoint_and_complete() {
        let pool = ThreadPool::new(4);
        let mut data = vec![0_usize; 7 * 13];
        pool.for_each_chunk(&mut data, 7, |index, chunk| chunk.iter_mut().for_each(|x| *x += index + 1));
        assert!(data.iter().enumerate().all(|(at, &x)| x == at / 7 + 1));
    }

    #[test]
    fn a_run_within_a_run_is_done_by_the_thread_alone() {
        let pool = ThreadPool::new(3);
        let count = AtomicUsize::new(0);
        pool.run(5, &|_| {
            pool.run(5, &|_| {
                count.fetch_add(1, SeqCst);
            });
        });
        assert_eq!(count.load(SeqCst), 25);
    }

    #[test]
    fn several_callers_take_turns() {
        let pool = ThreadPool::new(3);
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(6, &|_| {
                            count.fetch_add(1, SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(count.load(SeqCst), 4 * 100 * 6);
    }

    #[test]
    fn a_panic_comes_out_and_the_pool_lives_on() {
        let pool = ThreadPool::new(3);
        let done = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, &|part| {
                if part == 7 {
                    panic!("on purpose");
                }
                done.fetch_add(1, SeqCst);
            });
        }));
        assert_eq!(result.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
        assert_eq!(done.load(SeqCst), 19);
        pool.run(20, &|_| {
            done.fetch_add(1, SeqCst);
        });
        assert_eq!(done.load(SeqCst), 39);
    }
}
