//! The token loop allocates nothing, whether experts are found in the cache or read.
// Counting allocations needs an allocator of one's own.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use smoe_engine::{CacheSize, Engine, EngineOptions, Event, GenerateOptions, SamplingOptions};

/// Counts what the whole process allocates, all threads together.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test only: others would allocate at the same time.
#[test]
fn decoding_allocates_nothing() {
    let vault = common::packed(&common::pebble(), "Q4_0", "Q8_0");
    for (cache, sampled) in
        [(CacheSize::All, false), (CacheSize::Bytes(1), false), (CacheSize::Bytes(2 << 20), true)]
    {
        let options = EngineOptions { cache, threads: Some(2), instrument: true, ..EngineOptions::default() };
        let mut engine = Engine::open(&vault, options, &mut |_| {}).unwrap();
        let mut sampling = SamplingOptions::greedy();
        if sampled {
            sampling = SamplingOptions {
                temperature: 0.8,
                top_k: 40,
                top_p: 0.9,
                min_p: 0.01,
                repetition_penalty: 1.1,
                seed: 1,
            };
        }
        let options = GenerateOptions { max_tokens: 60, sampling, ignore_eos: true };
        let mut counts = Vec::with_capacity(60);
        engine
            .generate(&[1, 2, 3, 4, 5], &options, None, &mut |event| {
                if let Event::Token(_) = event {
                    counts.push(ALLOCATIONS.load(Ordering::Relaxed));
                }
            })
            .unwrap();
        // The first tokens may still set something up.
        let steady = &counts[3..];
        assert_eq!(steady.first(), steady.last(), "{cache:?}: {counts:?}");
    }
}
