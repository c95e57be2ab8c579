//! Headers against the reference implementation.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;

use proptest::prelude::*;
use smoe_format::safetensors::{PREFIX_BYTES, header_bytes, parse_header};

type Tensors = Vec<(String, String, Vec<u64>, u64, u64)>;

/// What our reader makes of a whole file.
fn ours(bytes: &[u8]) -> Result<Tensors, String> {
    let path = Path::new("x.safetensors");
    let prefix = &bytes[..bytes.len().min(8)];
    let length = header_bytes(path, prefix, bytes.len() as u64).map_err(|error| error.to_string())? as usize;
    let tensors =
        parse_header(path, &bytes[8..8 + length], bytes.len() as u64).map_err(|error| error.to_string())?;
    let start = PREFIX_BYTES + length as u64;
    Ok(tensors
        .into_iter()
        .map(|(name, info)| (name, info.dtype, info.shape, info.offset - start, info.bytes))
        .collect())
}

/// What the reference makes of it.
fn theirs(bytes: &[u8]) -> Result<Tensors, String> {
    safetensors::SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let (_, metadata) = safetensors::SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
    let mut tensors: Vec<_> = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let shape = info.shape.iter().map(|&length| length as u64).collect();
            (name, info.dtype.to_string(), shape, start as u64, (end - start) as u64)
        })
        .collect();
    tensors.sort();
    Ok(tensors)
}

fn file_of(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(std::iter::repeat_n(7, data));
    bytes
}

#[test]
fn files_that_both_accept_mean_the_same() {
    for (header, data) in [
        ("{}", 0),
        (r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#, 24),
        (
            r#"{"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"b":{"dtype":"F16","shape":[0],"data_offsets":[2,2]}}"#,
            2,
        ),
        (
            r#"{"b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}"#,
            7,
        ),
        (r#"{"__metadata__":{"format":"pt"},"a":{"shape":[1],"dtype":"I64","data_offsets":[0,8]}}   "#, 8),
    ] {
        let bytes = file_of(header, data);
        assert_eq!(ours(&bytes).unwrap(), theirs(&bytes).unwrap(), "{header}");
    }
}

#[test]
fn malformed_files_are_refused_with_a_reason() {
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let one = |entry: &str| format!(r#"{{"a":{{{entry}}}}}"#);
    for (header, data, reason) in [
        (two("[0,4]", "[2,6]"), 6, "another tensor's bytes lie there"),
        (two("[0,4]", "[5,9]"), 9, "a hole lies before it"),
        (two("[1,5]", "[5,9]"), 9, "a hole lies before it"),
        (two("[0,4]", "[4,8]"), 7, "needs"),
        (two("[0,4]", "[4,8]"), 9, "its length in bytes"),
        (two("[0,4]", "[8,4]"), 8, "an end that is not before the start"),
        (one(r#""dtype":"U8","shape":[5],"data_offsets":[0,4]"#), 4, "length in bytes of tensor a"),
        (one(r#""dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]"#), 4, "64 bits"),
        (one(r#""dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551616]"#), 4, "tensor a"),
        (one(r#""dtype":"U8","shape":[4],"data_offsets":[0,4,4]"#), 4, "tensor a"),
        (one(r#""dtype":"U8","shape":4,"data_offsets":[0,4]"#), 4, "tensor a"),
        (one(r#""shape":[4],"data_offsets":[0,4]"#), 4, "missing field `dtype`"),
        (one(r#""dtype":"F4","shape":[1],"data_offsets":[0,1]"#), 1, "length in bytes of tensor a"),
        (r#"{"a":1}"#.into(), 0, "tensor a"),
        ("[]".into(), 0, "the header's start"),
        (r#"{"__metadata__":{"a":1}}"#.into(), 0, "the header"),
        ("{".into(), 0, "the header"),
    ] {
        let error = ours(&file_of(&header, data)).unwrap_err();
        assert!(error.contains(reason) && error.contains("x.safetensors"), "{header}: {error}");
    }
    let many = format!("[{}]", vec!["1"; 17].join(","));
    let header = one(&format!(r#""dtype":"U8","shape":{many},"data_offsets":[0,1]"#));
    assert!(ours(&file_of(&header, 1)).unwrap_err().contains("dimensions"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Tables with small lies in them: whatever we accept, the reference accepts and understands alike.
    #[test]
    fn what_we_accept_the_reference_accepts(
        tensors in prop::collection::vec((0_usize..5, prop::collection::vec(0_u64..4, 0..3), 0_u64..3), 0..5),
        lie in 0_usize..40,
        cut in 0_usize..20,
    ) {
        let types = [("U8", 1), ("BF16", 2), ("F16", 2), ("F32", 4), ("I64", 8)];
        let mut entries = Vec::new();
        let mut end = 0;
        for (index, (kind, shape, shift)) in tensors.iter().enumerate() {
            let (name, size) = types[*kind];
            let bytes = shape.iter().product::<u64>() * size;
            let start = end + if lie == index { *shift } else { 0 };
            end = start + bytes + if lie == index + 10 { *shift } else { 0 };
            entries.push(format!(r#""t{index}":{{"dtype":"{name}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#));
        }
        let mut bytes = file_of(&format!("{{{}}}", entries.join(",")), end as usize);
        if cut == 1 {
            bytes.pop();
        }
        match (ours(&bytes), theirs(&bytes)) {
            (Ok(ours), Ok(theirs)) => prop_assert_eq!(ours, theirs),
            (Ok(_), Err(error)) => prop_assert!(false, "only we accept it: {}", error),
            // Nothing truthful is refused.
            (Err(error), _) => prop_assert!(lie < 20 || cut == 1, "{}", error),
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let (Ok(ours), Ok(theirs)) = (ours(&bytes), theirs(&bytes)) {
            prop_assert_eq!(ours, theirs);
        }
    }
}
