//! The portable backend: threads that call pread.
//!
//! A record is one request, however large: the kernel cuts a direct read into the drive's largest transfers and keeps them
//! in flight together.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::backend::{Completion, IoMode, ReadBackend, ReadRequest};
use crate::transfer::{self, ReadFailure, ReadStats};
use crate::{ReadAt, StreamError};

/// Threads where the user names no number: enough depth for one consumer drive, few enough to cost nothing.
pub const DEFAULT_PREAD_THREADS: usize = 8;

/// More threads than any drive's useful depth.
pub const MAX_PREAD_THREADS: usize = 256;

/// Outstanding reads where the user names no number: four layers of 256 experts.
pub const DEFAULT_QUEUE_CAPACITY: usize = 1024;

/// A fixed number of threads that read from one [`ReadAt`].
pub struct PreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    capacity: usize,
}

struct Shared {
    reader: Arc<dyn ReadAt>,
    queues: Mutex<Queues>,
    /// Signalled once per submitted read, and to all at shutdown.
    submitted: Condvar,
    /// Signalled once per finished read.
    finished: Condvar,
}

struct Queues {
    waiting: VecDeque<ReadRequest>,
    done: VecDeque<Completion>,
    outstanding: usize,
    shutdown: bool,
}

impl PreadPool {
    /// Starts `threads` threads; at most `capacity` reads (at least 1) can be outstanding.
    ///
    /// # Errors
    /// [`StreamError::ThreadCount`], [`StreamError::Thread`].
    pub fn new(reader: Arc<dyn ReadAt>, threads: usize, capacity: usize) -> Result<PreadPool, StreamError> {
        if threads == 0 || threads > MAX_PREAD_THREADS {
            return Err(StreamError::ThreadCount { threads, limit: MAX_PREAD_THREADS });
        }
        let capacity = capacity.max(1);
        let queues = Queues {
            waiting: VecDeque::with_capacity(capacity),
            done: VecDeque::with_capacity(capacity),
            outstanding: 0,
            shutdown: false,
        };
        let shared = Arc::new(Shared {
            reader,
            queues: Mutex::new(queues),
            submitted: Condvar::new(),
            finished: Condvar::new(),
        });
        let mut pool = PreadPool { shared, threads: Vec::with_capacity(threads), capacity };
        for index in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("smoe-read-{index}"))
                .spawn(move || serve(&shared))
                .map_err(|source| StreamError::Thread { source })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }
}

impl ReadBackend for PreadPool {
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadRequest> {
        let mut queues = self.shared.lock();
        if queues.outstanding >= self.capacity {
            return Err(request);
        }
        queues.outstanding += 1;
        queues.waiting.push_back(request);
        drop(queues);
        self.shared.submitted.notify_one();
        Ok(())
    }

    fn complete(&mut self, block: bool) -> Option<Completion> {
        let mut queues = self.shared.lock();
        loop {
            if let Some(completion) = queues.done.pop_front() {
                queues.outstanding -= 1;
                return Some(completion);
            }
            if !block || queues.outstanding == 0 {
                return None;
            }
            queues = self.shared.finished.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn mode(&self) -> IoMode {
        let access = self.shared.reader.access();
        IoMode {
            name: format!("pread {}", access.name),
            access: access.name,
            alignment_bytes: access.alignment_bytes,
            depth: self.threads.len() as u32,
            reason: access.reason,
        }
    }
}

impl Drop for PreadPool {
    /// Waits for reads that have begun; those that have not are dropped unread.
    fn drop(&mut self) {
        self.shared.lock().shutdown = true;
        self.shared.submitted.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request; sleeps while there is none. `None` at shutdown.
    fn next(&self) -> Option<ReadRequest> {
        let mut queues = self.lock();
        loop {
            if queues.shutdown {
                return None;
            }
            if let Some(request) = queues.waiting.pop_front() {
                return Some(request);
            }
            queues = self.submitted.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The life of one thread.
fn serve(shared: &Shared) {
    while let Some(request) = shared.next() {
        let completion = perform(&*shared.reader, request);
        shared.lock().done.push_back(completion);
        shared.finished.notify_one();
    }
}

/// Performs one read. A reader that panics ends its read and not the thread, which others wait for.
fn perform(reader: &dyn ReadAt, request: ReadRequest) -> Completion {
    let ReadRequest { tag, offset, mut loan, checksum } = request;
    let mut stats = ReadStats::default();
    let result = catch_unwind(AssertUnwindSafe(|| {
        transfer::read_verified(reader, loan.as_mut_slice(), offset, checksum, &mut stats)
    }))
    .unwrap_or_else(|_| Err(ReadFailure::Io(io::Error::other("the reader panicked"))));
    Completion { tag, loan, result, stats }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::arena::SlotArena;

    fn request(arena: &mut SlotArena, slot: usize) -> ReadRequest {
        ReadRequest {
            tag: slot as u64,
            offset: slot as u64 * 4096,
            loan: arena.lend(slot, 4096).unwrap(),
            checksum: None,
        }
    }

    #[test]
    fn all_reads_complete_once_with_their_bytes() {
        let data: Vec<u8> = (0..64 * 4096).map(|i| (i / 4096) as u8 + 1).collect();
        for threads in [1, 2, 8] {
            let mut arena = SlotArena::new(64, 4096).unwrap();
            let mut pool = PreadPool::new(Arc::new(data.clone()), threads, 64).unwrap();
            assert!(pool.complete(true).is_none(), "nothing is outstanding");
            for slot in 0..64 {
                pool.submit(request(&mut arena, slot)).unwrap();
            }
            let mut seen = vec![0; 64];
            while let Some(completion) = pool.complete(true) {
                completion.result.unwrap();
                seen[completion.tag as usize] += 1;
            }
            assert_eq!(seen, vec![1; 64]);
            for slot in 0..64 {
                assert!(arena.bytes(slot, 4096).unwrap().iter().all(|&byte| byte == slot as u8 + 1));
            }
        }
    }

    #[test]
    fn the_queue_is_bounded_by_its_capacity() {
        let mut arena = SlotArena::new(3, 4096).unwrap();
        let mut pool = PreadPool::new(Arc::new(vec![0; 3 * 4096]), 1, 2).unwrap();
        pool.submit(request(&mut arena, 0)).unwrap();
        pool.submit(request(&mut arena, 1)).unwrap();
        let refused = pool.submit(request(&mut arena, 2)).unwrap_err();
        assert_eq!(refused.tag, 2);
        assert!(pool.complete(true).is_some());
        pool.submit(refused).unwrap();
        assert!(pool.complete(true).is_some() && pool.complete(true).is_some());
        assert!(pool.complete(true).is_none());
    }

    /// Sleeps in each read and counts those that have begun and ended.
    #[derive(Default)]
    struct Slow {
        begun: AtomicUsize,
        ended: AtomicUsize,
    }

    impl ReadAt for Slow {
        fn read_at(&self, buf: &mut [u8], _offset: u64) -> io::Result<usize> {
            self.begun.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
            buf.fill(9);
            self.ended.fetch_add(1, Ordering::SeqCst);
            Ok(buf.len())
        }
    }

    #[test]
    fn dropping_the_pool_waits_for_reads_that_have_begun() {
        let slow = Arc::new(Slow::default());
        let mut arena = SlotArena::new(8, 4096).unwrap();
        let mut pool = PreadPool::new(slow.clone(), 2, 8).unwrap();
        for slot in 0..8 {
            pool.submit(request(&mut arena, slot)).unwrap();
        }
        while slow.begun.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        drop(pool);
        assert_eq!(slow.begun.load(Ordering::SeqCst), slow.ended.load(Ordering::SeqCst));
        assert!(slow.ended.load(Ordering::SeqCst) < 8, "reads that had not begun are not performed");
        for slot in 0..8 {
            assert!(arena.bytes(slot, 4096).is_some(), "every loan has come back");
        }
    }

    struct Panics;

    impl ReadAt for Panics {
        fn read_at(&self, _buf: &mut [u8], _offset: u64) -> io::Result<usize> {
            panic!("on purpose");
        }
    }

    #[test]
    fn a_panicking_reader_fails_its_read_and_nothing_else() {
        let mut arena = SlotArena::new(1, 4096).unwrap();
        let mut pool = PreadPool::new(Arc::new(Panics), 1, 1).unwrap();
        for _ in 0..2 {
            pool.submit(request(&mut arena, 0)).unwrap();
            let completion = pool.complete(true).unwrap();
            assert!(matches!(completion.result, Err(ReadFailure::Io(_))));
        }
    }

    #[test]
    fn thread_counts_are_checked() {
        for threads in [0, MAX_PREAD_THREADS + 1, usize::MAX] {
            let error = PreadPool::new(Arc::new(Vec::new()), threads, 1).err().unwrap();
            assert!(matches!(error, StreamError::ThreadCount { .. }), "{error}");
        }
    }
}
