//! Superblock and header of a vault. Checksums are put right, so that what lies behind them is reached.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use smoe_format::{SUPERBLOCK_BYTES, Superblock, VaultHeader};
use xxhash_rust::xxh3::xxh3_64;

const BLOCK: usize = SUPERBLOCK_BYTES as usize;
/// What the fuzzer writes into the superblock; zeros follow.
const FIELDS: usize = 104;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("fuzzed");
    let _ = Superblock::decode(path, data, data.len() as u64);
    let (fields, json) = data.split_at(data.len().min(FIELDS));
    let mut block = vec![0; BLOCK];
    block[..fields.len()].copy_from_slice(fields);
    let checksum = xxh3_64(&block[..BLOCK - 8]);
    block[BLOCK - 8..].copy_from_slice(&checksum.to_le_bytes());
    let mut total = [0; 8];
    total.copy_from_slice(&block[96..104]);
    let Ok(superblock) = Superblock::decode(path, &block, u64::from_le_bytes(total)) else { return };
    assert_eq!(superblock.encode()[..], block[..]);
    if let Ok(header) = VaultHeader::parse(path, json, &superblock) {
        for entry in &header.resident {
            assert!(entry.offset + entry.bytes <= superblock.resident.1);
        }
        for layer in &header.expert_layers {
            assert!(layer.base + layer.stride * u64::from(layer.count) <= superblock.experts.1);
            for part in &layer.parts {
                assert!(part.offset + part.bytes <= layer.record_bytes);
            }
        }
    }
});
