//! The first bytes of a safetensors file, whatever the length of the file claims to be.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use smoe_format::safetensors::{header_bytes, parse_header};

fuzz_target!(|data: &[u8]| {
    let path = Path::new("fuzzed");
    let file_bytes = data.len() as u64;
    let prefix = &data[..data.len().min(8)];
    if let Ok(length) = header_bytes(path, prefix, file_bytes) {
        let header = &data[8..8 + length as usize];
        let tensors = parse_header(path, header, file_bytes);
        for info in tensors.iter().flat_map(|tensors| tensors.values()) {
            assert!(info.offset + info.bytes <= file_bytes);
        }
    }
    // The same header in a file of any length.
    if let Some((length, header)) = data.split_first_chunk::<8>() {
        let _ = parse_header(path, header, u64::from_le_bytes(*length));
    }
});
