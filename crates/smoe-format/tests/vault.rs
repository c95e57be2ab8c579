//! Tables of a vault that lie although every checksum is right.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;

use serde_json::{Value, json};
use smoe_format::{Superblock, VaultHeader};

fn superblock() -> Superblock {
    Superblock {
        alignment: 4096,
        header: (4096, 1000),
        header_checksum: 1,
        resident: (8192, 1000),
        experts: (12288, 4 * 4096),
        checksums: (12288 + 4 * 4096, 8 * 6),
        checksums_checksum: 2,
        total_bytes: 12288 + 4 * 4096 + 48,
    }
}

fn header() -> Value {
    let part = |name: &str, offset: u64| json!({"name": name, "format": "Q4_0", "rows": 2, "columns": 32, "offset": offset, "bytes": 36});
    let layer = |layer: u64, base: u64| {
        json!({"layer": layer, "base": base, "stride": 4096, "record_bytes": 200, "count": 2,
               "parts": [part("gate", 0), part("up", 64), part("down", 128)]})
    };
    json!({
        "config": "{}", "generation_config": null, "tokenizer": "", "tokenizer_config": null, "chat_template": null,
        "resident": [
            {"name": "a", "format": "F32", "shape": [4], "offset": 0, "bytes": 16},
            {"name": "b", "format": "Q8_0", "shape": [3, 64], "offset": 64, "bytes": 204},
        ],
        "expert_layers": [layer(0, 0), layer(2, 8192)],
        "provenance": {"source": "", "packed_by": "", "expert_format": "", "dense_format": "", "fallbacks": [],
                       "ignored_tensors": [], "ignored_keys": []},
    })
}

fn parse(value: &Value) -> Result<VaultHeader, String> {
    VaultHeader::parse(Path::new("x.smoe"), value.to_string().as_bytes(), &superblock())
        .map_err(|e| e.to_string())
}

#[test]
fn a_truthful_header_is_read() {
    let parsed = parse(&header()).unwrap();
    assert_eq!((parsed.resident.len(), parsed.expert_layers.len(), parsed.checksums()), (2, 2, 6));
    // Keys of later versions are no harm.
    let mut later = header();
    later["hints"] = json!({"warm": [1, 2]});
    assert!(parse(&later).is_ok());
}

#[test]
fn tables_that_lie_are_refused() {
    let huge = json!(u64::MAX);
    for (pointer, value, reason) in [
        ("/resident/0/bytes", json!(20), "length in bytes of tensor a"),
        ("/resident/0/bytes", huge.clone(), "length in bytes of tensor a"),
        ("/resident/0/shape", json!([]), "tensor a"),
        ("/resident/0/shape", json!([1, 2, 2]), "tensor a"),
        ("/resident/0/shape", json!([0]), "tensor a"),
        ("/resident/1/shape", json!([3, 63]), "tensor b"),
        ("/resident/1/shape", json!([u64::MAX, 64]), "tensor b"),
        ("/resident/1/offset", json!(0), "place of tensor b"),
        ("/resident/1/offset", json!(65), "place of tensor b"),
        ("/resident/1/offset", json!(832), "place of tensor b"),
        ("/resident/1/offset", huge.clone(), "place of tensor b"),
        ("/resident/1/name", json!("a"), "listed once"),
        ("/resident/1/format", json!("Q9_9"), "Q9_9"),
        ("/expert_layers/1/layer", json!(0), "order of expert layers"),
        ("/expert_layers/0/count", json!(0), "count"),
        ("/expert_layers/0/count", json!(4_000_000_000_u32), "count"),
        ("/expert_layers/1/count", json!(3), "place"),
        ("/expert_layers/0/stride", json!(0), "stride"),
        ("/expert_layers/0/stride", json!(4095), "stride"),
        ("/expert_layers/1/stride", json!(u64::MAX - 4095), "place"),
        ("/expert_layers/0/record_bytes", json!(4097), "record_bytes"),
        ("/expert_layers/0/record_bytes", json!(0), "record_bytes"),
        ("/expert_layers/0/record_bytes", json!(163), "down"),
        ("/expert_layers/1/base", json!(4096), "place"),
        ("/expert_layers/1/base", json!(8193), "place"),
        ("/expert_layers/1/base", huge.clone(), "place"),
        ("/expert_layers/0/parts/1/name", json!("gate"), "gate"),
        ("/expert_layers/0/parts/1/offset", json!(0), "up"),
        ("/expert_layers/0/parts/1/offset", json!(65), "up"),
        ("/expert_layers/0/parts/2/offset", huge.clone(), "down"),
        ("/expert_layers/0/parts/2/bytes", json!(37), "down"),
        ("/expert_layers/0/parts/2/rows", json!(u64::MAX), "down"),
        ("/expert_layers/0/parts/2/columns", json!(31), "down"),
        ("/config", json!(7), "header"),
        ("/resident", json!({}), "header"),
    ] {
        let mut lying = header();
        *lying.pointer_mut(pointer).unwrap() = value.clone();
        let error = parse(&lying).unwrap_err();
        assert!(error.contains(reason) && error.contains("x.smoe"), "{pointer} = {value}: {error}");
    }
    let mut shorter = header();
    shorter["resident"].as_array_mut().unwrap().pop();
    assert!(parse(&shorter).unwrap_err().contains("checksum table"));
}

#[test]
fn superblocks_that_lie_are_refused() {
    let path = Path::new("x.smoe");
    let good = superblock();
    let total = good.total_bytes;
    assert_eq!(Superblock::decode(path, &good.encode(), total).unwrap(), good);
    for (changed, reason) in [
        (Superblock { alignment: 512, ..good }, "alignment"),
        (Superblock { alignment: 0, ..good }, "alignment"),
        (Superblock { header: (4095, 1000), ..good }, "offset of the header"),
        (Superblock { header: (4096, u64::MAX), ..good }, "end of the header"),
        (Superblock { header: (4096, 5000), ..good }, "offset of the resident section"),
        (Superblock { resident: (8193, 1000), ..good }, "offset of the resident section"),
        (Superblock { experts: (8192, 4096), ..good }, "offset of the expert section"),
        (Superblock { experts: (12288, u64::MAX - 100), ..good }, "end of the expert section"),
        (Superblock { checksums: (12288 + 4 * 4096, 40), ..good }, "end of the checksum table"),
        (Superblock { total_bytes: total + 1, ..good }, "end of the checksum table"),
    ] {
        let error = Superblock::decode(path, &changed.encode(), total).unwrap_err().to_string();
        assert!(error.contains(reason), "{changed:?}: {error}");
    }
    for length in 0..4096 {
        assert!(Superblock::decode(path, &good.encode()[..length], length as u64).is_err());
    }
}
