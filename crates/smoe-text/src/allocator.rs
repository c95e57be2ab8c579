//! An allocator that can hold a thread to a budget.
//!
//! The template engine counts its work, but a list that holds another one twice, a few dozen levels deep, is exponentially
//! long when it is printed or compared, and nothing counts that. An allocation cannot fail gracefully and must not unwind,
//! so a thread whose budget is used up stops in the allocator for good, with the memory it has, and whoever waits for its
//! result gives up on it. Threads without a budget, which are all but those that render, pay for one look at a pointer.
// The global allocator is an unsafe interface; all work is passed on to the system's.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use std::time::Duration;

/// The system's allocator with budgets for threads that have one. A binary that renders templates of strangers installs
/// it with `#[global_allocator]`.
#[derive(Debug, Default, Clone, Copy)]
pub struct BudgetAllocator;

/// What a thread may still allocate.
#[derive(Debug)]
pub(crate) struct Budget {
    left_bytes: AtomicI64,
    /// Set when the thread has stopped in the allocator.
    exceeded: AtomicBool,
    /// Set by whoever no longer waits: the thread stops at its next allocation.
    abandoned: AtomicBool,
}

thread_local! {
    /// The thread's budget, or null. It stays alive while it is set: see `within`.
    static BUDGET: Cell<*const Budget> = const { Cell::new(ptr::null()) };
}

impl Budget {
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            left_bytes: AtomicI64::new(i64::try_from(bytes).unwrap_or(i64::MAX)),
            exceeded: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        })
    }

    /// Whether the thread has stopped for good.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.exceeded.load(Relaxed)
    }

    /// Stops the thread at its next allocation.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Relaxed);
    }

    /// Runs work under this budget. Does not return where the budget is exceeded.
    pub(crate) fn within<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        /// Takes the budget off, also when the work panics.
        struct Off;
        impl Drop for Off {
            fn drop(&mut self) {
                BUDGET.set(ptr::null());
            }
        }
        let _off = Off;
        BUDGET.set(Arc::as_ptr(self));
        work()
    }
}

/// Takes bytes from the thread's budget, if it has one.
fn charge(bytes: usize) {
    let budget = BUDGET.try_with(Cell::get).unwrap_or(ptr::null());
    // SAFETY: the pointer is set only inside `Budget::within`, which borrows the `Arc` until it has cleared it.
    let Some(budget) = (unsafe { budget.as_ref() }) else { return };
    let bytes = bytes as i64;
    let left = budget.left_bytes.fetch_sub(bytes, Relaxed);
    if left < bytes || budget.abandoned.load(Relaxed) {
        budget.exceeded.store(true, Relaxed);
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
}

fn give_back(bytes: usize) {
    let budget = BUDGET.try_with(Cell::get).unwrap_or(ptr::null());
    // SAFETY: as in `charge`.
    if let Some(budget) = unsafe { budget.as_ref() } {
        budget.left_bytes.fetch_add(bytes as i64, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for BudgetAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        charge(new_size.saturating_sub(layout.size()));
        give_back(layout.size().saturating_sub(new_size));
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
