//! The header of a safetensors file (<https://github.com/huggingface/safetensors>, "Format").
//!
//! Eight bytes of header length, a JSON object from tensor name to dtype, shape and data offsets, then the data, without
//! holes and overlaps, to the end of the file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};

use crate::error::FormatError;

/// Longest header in bytes; the reference implementation's own limit.
pub const HEADER_LIMIT_BYTES: u64 = 100_000_000;

/// Bytes that hold the header's length.
pub const PREFIX_BYTES: u64 = 8;

/// More dimensions than any tensor of a model has.
const DIMENSIONS_LIMIT: usize = 16;

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type by the format's own name.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Bits of an element; none for a type that this version has not heard of.
#[must_use]
pub fn dtype_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// Length of the header from the file's first eight bytes, checked against the file's length.
///
/// # Errors
/// The file is shorter than eight bytes or than its header, or the length is beyond the limit.
pub fn header_bytes(path: &Path, prefix: &[u8], file_bytes: u64) -> Result<u64, FormatError> {
    let truncated = |what: &str, expected, found| FormatError::Truncated {
        path: path.to_owned(),
        what: what.into(),
        expected,
        found,
    };
    let Some(prefix) = prefix.first_chunk::<8>() else {
        return Err(truncated("the header's length", PREFIX_BYTES, file_bytes.min(prefix.len() as u64)));
    };
    let length = u64::from_le_bytes(*prefix);
    if length > HEADER_LIMIT_BYTES {
        let limit = format!("at most {HEADER_LIMIT_BYTES} (is this a safetensors file?)");
        return Err(FormatError::invalid(path, "the header's length", limit, length));
    }
    if length > file_bytes.saturating_sub(PREFIX_BYTES) {
        return Err(truncated("the header", PREFIX_BYTES + length, file_bytes));
    }
    Ok(length)
}

/// Tensors by name, all checked to lie within a file of `file_bytes`.
///
/// # Errors
/// The JSON is not what the format asks for, a tensor's shape, type and bytes contradict each other, the data has holes or
/// overlaps, or the file is shorter or longer than it.
pub fn parse_header(
    path: &Path,
    header: &[u8],
    file_bytes: u64,
) -> Result<BTreeMap<String, TensorInfo>, FormatError> {
    let invalid =
        |what: String, expected: &str, found: String| FormatError::invalid(path, what, expected, found);
    if header.first() != Some(&b'{') {
        let found = header.first().map_or("empty".into(), |byte| format!("byte {byte:#04x}"));
        return Err(invalid("the header's start".into(), "{", found));
    }
    let RawHeader(entries) = serde_json::from_slice(header)
        .map_err(|error| invalid("the header".into(), "a JSON object of tensors", error.to_string()))?;
    let data_start = PREFIX_BYTES + header.len() as u64;
    let mut places = Vec::with_capacity(entries.len());
    let mut tensors = BTreeMap::new();
    for (name, raw) in entries {
        let [start, end] = raw.data_offsets;
        let bytes = end.checked_sub(start).ok_or_else(|| {
            let found = format!("{start} to {end}");
            invalid(format!("data_offsets of tensor {name}"), "an end that is not before the start", found)
        })?;
        if raw.shape.len() > DIMENSIONS_LIMIT {
            let found = format!("{} dimensions", raw.shape.len());
            return Err(invalid(format!("shape of tensor {name}"), "at most 16 dimensions", found));
        }
        if let Some(bits) = dtype_bits(&raw.dtype) {
            let total = raw.shape.iter().try_fold(bits, |total, &length| total.checked_mul(length));
            let expected = total.filter(|total| total % 8 == 0).map(|total| total / 8);
            if expected != Some(bytes) {
                let expected = expected.map_or("a size that fits 64 bits".into(), |bytes| bytes.to_string());
                return Err(invalid(
                    format!("length in bytes of tensor {name} ({} {:?})", raw.dtype, raw.shape),
                    &expected,
                    bytes.to_string(),
                ));
            }
        }
        let offset = data_start.checked_add(start).filter(|start| start.checked_add(bytes).is_some());
        let Some(offset) = offset else {
            return Err(invalid(
                format!("data_offsets of tensor {name}"),
                "64 bits",
                format!("{start} to {end}"),
            ));
        };
        places.push((offset, bytes, name.clone()));
        tensors.insert(name, TensorInfo { dtype: raw.dtype, shape: raw.shape, offset, bytes });
    }
    places.sort();
    let mut expected = data_start;
    for (offset, bytes, name) in &places {
        if *offset != expected {
            let what = format!("start of tensor {name} in the file");
            let overlap =
                if *offset < expected { "another tensor's bytes lie there" } else { "a hole lies before it" };
            return Err(FormatError::invalid(path, what, expected, format!("{offset}: {overlap}")));
        }
        expected = offset + bytes;
    }
    if expected > file_bytes {
        let last = places.iter().find(|(offset, bytes, _)| offset + bytes > file_bytes);
        let what = last.map_or("the data".into(), |(_, _, name)| format!("tensor {name} (and all others)"));
        return Err(FormatError::Truncated { path: path.to_owned(), what, expected, found: file_bytes });
    }
    if expected < file_bytes {
        return Err(FormatError::invalid(path, "its length in bytes", expected, file_bytes));
    }
    Ok(tensors)
}

/// Entries in their order; a name that occurs twice is an error.
struct RawHeader(Vec<(String, RawTensor)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut names = std::collections::HashSet::new();
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{name} occurs twice")));
                    }
                    if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                        continue;
                    }
                    let tensor = map
                        .next_value()
                        .map_err(|error| A::Error::custom(format!("tensor {name}: {error}")))?;
                    entries.push((name, tensor));
                }
                Ok(RawHeader(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
