//! The expert cache over real backends, with readers that misbehave; and that the token loop's side allocates nothing.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
// Counting allocations needs an allocator of one's own.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use smoe_stream::chaos::{ChaosOptions, ChaosReader};
use smoe_stream::{ExpertId, ExpertStream, LayerExtent, Pin, PreadPool, ReadAt, Request, StreamError};
use xxhash_rust::xxh3::xxh3_64;

/// Counts what the current thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
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

const STRIDES: [u64; 3] = [4096, 12288, 8192];
const COUNTS: [u32; 3] = [16, 5, 9];

/// Three layers of different records; each record begins with its layer and expert.
fn file() -> (Vec<u8>, Vec<LayerExtent>) {
    let mut bytes = vec![0xEE; 4096];
    let mut layers = Vec::new();
    for (layer, (stride, count)) in STRIDES.into_iter().zip(COUNTS).enumerate() {
        let base = bytes.len() as u64;
        let mut checksums = Vec::new();
        for expert in 0..count {
            let mut record = vec![(layer * 31) as u8 ^ expert as u8; stride as usize];
            record[..8].copy_from_slice(&[layer as u8, expert as u8, 1, 2, 3, 4, 5, 6]);
            checksums.push(xxh3_64(&record));
            bytes.extend_from_slice(&record);
        }
        layers.push(LayerExtent { base, stride, record_bytes: stride - 100, count, checksums });
    }
    (bytes, layers)
}

fn stream_over(reader: impl ReadAt + 'static, slots: u64, capacity: usize) -> ExpertStream {
    let backend = PreadPool::new(Arc::new(reader), 3, capacity).unwrap();
    ExpertStream::new(Path::new("test.smoe"), Box::new(backend), file().1, slots * 12288, 2).unwrap()
}

fn check(stream: &ExpertStream, pin: &Pin) {
    let id = pin.id();
    let bytes = stream.bytes(pin);
    assert_eq!(bytes.len() as u64, STRIDES[id.layer as usize] - 100);
    assert_eq!(bytes[..8], [id.layer as u8, id.expert as u8, 1, 2, 3, 4, 5, 6]);
    assert!(bytes[8..].iter().all(|&byte| byte == (id.layer as usize * 31) as u8 ^ id.expert as u8));
}

/// Asks for experts as a sparse layer does: as many at once as fit, each used once.
fn fetch(stream: &mut ExpertStream, ids: &[ExpertId]) -> Result<(), StreamError> {
    let mut waiting = ids.iter();
    let mut next = waiting.next();
    let mut used = 0;
    while used < ids.len() {
        while let Some(&id) = next {
            match stream.request(id)? {
                Request::Hit(pin) => {
                    check(stream, &pin);
                    stream.release(pin);
                    used += 1;
                }
                Request::Pending => {}
                Request::Full => break,
            }
            next = waiting.next();
        }
        if stream.in_flight() > 0 {
            let pin = stream.wait()?;
            check(stream, &pin);
            stream.release(pin);
            used += 1;
        }
    }
    Ok(())
}

fn any_id() -> impl Strategy<Value = ExpertId> {
    (0_u32..3)
        .prop_flat_map(|layer| (0..COUNTS[layer as usize]).prop_map(move |expert| ExpertId { layer, expert }))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_request_gets_its_own_record(
        ids in prop::collection::vec(any_id(), 1..120),
        slots in 2_u64..40,
        capacity in 1_usize..9,
        seed: u64,
    ) {
        let chaos = ChaosOptions { delay: Duration::from_micros(50), ..ChaosOptions::survivable(seed) };
        let mut stream = stream_over(ChaosReader::new(file().0, chaos), slots, capacity);
        for group in ids.chunks(17) {
            fetch(&mut stream, group).unwrap();
        }
        let counters = stream.counters();
        prop_assert_eq!(counters.hits + counters.misses + counters.joined, ids.len() as u64);
        prop_assert_eq!(counters.reads, counters.misses);
        prop_assert_eq!((stream.pinned(), stream.in_flight()), (0, 0));
    }
}

fn id(layer: u32, expert: u32) -> ExpertId {
    ExpertId { layer, expert }
}

#[test]
fn what_was_read_is_found_again_and_the_oldest_goes_first() {
    let mut stream = stream_over(file().0, 3, 8);
    for expert in 0..3 {
        fetch(&mut stream, &[id(0, expert)]).unwrap();
    }
    let pin = stream.lookup(id(0, 0)).unwrap();
    stream.release(pin);
    fetch(&mut stream, &[id(0, 3)]).unwrap();
    let there: Vec<_> = (0..4).map(|expert| stream.lookup(id(0, expert)).is_some()).collect();
    assert_eq!(there, [true, false, true, true]);
}

#[test]
fn pinned_records_are_never_given_up() {
    let mut stream = stream_over(file().0, 2, 8);
    assert!(matches!(stream.request(id(0, 0)).unwrap(), Request::Pending));
    assert!(matches!(stream.request(id(1, 1)).unwrap(), Request::Pending));
    assert!(matches!(stream.request(id(2, 2)).unwrap(), Request::Full));
    let first = stream.wait().unwrap();
    let second = stream.wait().unwrap();
    assert!(matches!(stream.request(id(2, 2)).unwrap(), Request::Full));
    check(&stream, &first);
    check(&stream, &second);
    stream.release(first);
    assert!(matches!(stream.request(id(2, 2)).unwrap(), Request::Pending));
    let third = stream.wait().unwrap();
    check(&stream, &second);
    check(&stream, &third);
}

#[test]
fn requests_share_a_read() {
    let mut stream = stream_over(file().0, 2, 8);
    for _ in 0..3 {
        assert!(matches!(stream.request(id(0, 7)).unwrap(), Request::Pending));
    }
    assert_eq!(stream.in_flight(), 3);
    let pins: Vec<_> = (0..3).map(|_| stream.wait().unwrap()).collect();
    assert_eq!((stream.counters().reads, stream.counters().joined, stream.pinned()), (1, 2, 1));
    pins.into_iter().for_each(|pin| stream.release(pin));
    assert_eq!(stream.pinned(), 0);
}

#[test]
fn waiting_for_nothing_is_an_error_and_not_forever() {
    let mut stream = stream_over(file().0, 2, 8);
    assert!(matches!(stream.wait(), Err(StreamError::NothingPending)));
    fetch(&mut stream, &[id(0, 0)]).unwrap();
    assert!(matches!(stream.wait(), Err(StreamError::NothingPending)));
}

#[test]
fn experts_that_do_not_exist_are_errors() {
    let mut stream = stream_over(file().0, 2, 8);
    for id in [id(0, 16), id(3, 0), id(u32::MAX, u32::MAX)] {
        assert!(stream.lookup(id).is_none());
        assert!(matches!(stream.request(id), Err(StreamError::UnknownExpert { .. })));
    }
}

#[test]
fn abandoning_waits_and_gives_everything_back() {
    let chaos = ChaosOptions { delay: Duration::from_millis(5), ..ChaosOptions::default() };
    let mut stream = stream_over(ChaosReader::new(file().0, chaos), 4, 8);
    for expert in 0..4 {
        assert!(matches!(stream.request(id(0, expert)).unwrap(), Request::Pending));
    }
    let _kept = stream.wait().unwrap();
    stream.abandon();
    assert_eq!((stream.in_flight(), stream.pinned()), (0, 0));
    // All four have arrived and are there; every slot can be had.
    assert!(stream.lookup(id(0, 2)).is_some());
    stream.abandon();
    fetch(&mut stream, &[id(1, 0), id(1, 1), id(1, 2), id(1, 3)]).unwrap();
}

#[test]
fn damage_and_dead_spots_are_named_and_the_rest_goes_on() {
    let (mut bytes, layers) = file();
    let damaged = layers[1].base + 3 * layers[1].stride;
    bytes[damaged as usize + 17] ^= 4;
    let mut stream = stream_over(bytes.clone(), 4, 8);
    let error = fetch(&mut stream, &[id(1, 3)]).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, StreamError::Checksum { layer: 1, expert: 3, .. }), "{text}");
    assert!(text.contains("test.smoe") && text.contains(&damaged.to_string()), "{text}");
    assert_eq!(stream.counters().rereads, 1);
    stream.abandon();
    fetch(&mut stream, &[id(1, 2), id(1, 4)]).unwrap();

    let dead = layers[0].base..layers[0].base + layers[0].stride;
    let reader =
        ChaosReader::new(bytes.clone(), ChaosOptions { dead: Some(dead), ..ChaosOptions::default() });
    let mut stream = stream_over(reader, 4, 8);
    let error = fetch(&mut stream, &[id(0, 0)]).unwrap_err();
    assert!(matches!(error, StreamError::Read { .. }), "{error}");
    stream.abandon();
    fetch(&mut stream, &[id(0, 1)]).unwrap();

    bytes.truncate(layers[2].base as usize + 100);
    let mut stream = stream_over(bytes, 4, 8);
    let error = fetch(&mut stream, &[id(2, 0)]).unwrap_err();
    assert!(matches!(error, StreamError::Truncated { found: 100, .. }), "{error}");
}

#[test]
fn caches_that_are_too_small_say_what_would_do() {
    let new = |bytes, min| {
        let backend = PreadPool::new(Arc::new(file().0), 1, 4).unwrap();
        ExpertStream::new(Path::new("x"), Box::new(backend), file().1, bytes, min)
    };
    let error = new(4 * 12288 - 1, 4).err().unwrap();
    assert!(matches!(error, StreamError::CacheTooSmall { needed_bytes: 49152, slots: 3, .. }), "{error}");
    assert_eq!(new(4 * 12288, 4).unwrap().cache_bytes(), 4 * 12288);
    // More than everything is everything.
    assert_eq!(new(u64::MAX, 4).unwrap().cache_bytes(), 30 * 12288);
}

#[test]
fn the_token_loops_side_allocates_nothing() {
    let mut stream = stream_over(file().0, 5, 8);
    let ids: Vec<_> = (0..16).map(|expert| id(0, expert)).chain((0..9).map(|expert| id(2, expert))).collect();
    fetch(&mut stream, &ids).unwrap();
    let before = ALLOCATIONS.get();
    for _ in 0..20 {
        fetch(&mut stream, &ids).unwrap();
        assert!(stream.lookup(id(1, 0)).is_none());
    }
    let counters = stream.counters();
    assert_eq!(ALLOCATIONS.get(), before, "{counters:?}");
    assert!(counters.misses > 400);
}
