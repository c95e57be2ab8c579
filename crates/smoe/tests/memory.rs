//! The budget is a ceiling for the whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{fixture, packed, pebble, smoe, smoe_json, stderr};

/// The answer's own text, JSON and libraries' lazy tables; what the program may take is otherwise part of the budget.
const SLACK_BYTES: u64 = 1 << 20;

fn bytes(report: &serde_json::Value, name: &str) -> u64 {
    report["memory"][name].as_u64().unwrap_or_else(|| panic!("{name}: {}", report["memory"]))
}

#[test]
fn the_peak_stays_below_the_budget_and_its_parts_add_up() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let prompt = vec!["7"; 400].join(",");
    for budget in ["56M", "64M", "128M"] {
        for more in [
            &["--io", "auto"][..],
            &["--io", "buffered"],
            &["--instrument"],
            &["--kv", "f32", "--threads", "4"],
        ] {
            let args = [
                "run",
                vault.to_str().unwrap(),
                "--prompt-ids",
                &prompt,
                "-n",
                "60",
                "--ignore-eos",
                "--json",
            ];
            let report = smoe_json([&args[..], &["--memory", budget], more].concat());
            let limit = bytes(&report, "budget_bytes");
            let peak = bytes(&report, "peak_rss_bytes");
            assert!(peak <= limit + SLACK_BYTES, "{budget} {more:?}: peak {peak}, budget {limit}");
            let parts: u64 = ["program_bytes", "resident_bytes", "kv_bytes", "scratch_bytes", "cache_bytes"]
                .iter()
                .map(|name| bytes(&report, name))
                .sum();
            assert!(parts <= limit, "{parts} of {limit}");
        }
    }
}

/// Reads "… bytes: " out of the refusal.
fn needed(text: &str) -> u64 {
    let (before, _) = text.split_once(" bytes: ").unwrap_or_else(|| panic!("{text}"));
    before.rsplit('(').next().unwrap().parse().unwrap_or_else(|_| panic!("{text}"))
}

#[test]
fn a_budget_that_is_too_small_is_refused_with_one_that_would_do() {
    for (vault, more) in [
        (packed(&pebble(), "Q4_0", "Q8_0"), &[][..]),
        (packed(&pebble(), "BF16", "BF16"), &["--cache", "all"]),
        (packed(&fixture("many-experts"), "Q8_0", "Q8_0"), &["--ctx", "100", "--kv", "f32"]),
    ] {
        let run = |memory: &str| {
            let args =
                ["run", vault.to_str().unwrap(), "--prompt-ids", "1,2,3", "-n", "4", "--memory", memory];
            smoe([&args[..], more].concat())
        };
        let refused = run("10M");
        assert_eq!(refused.status.code(), Some(1));
        let text = stderr(&refused);
        assert!(
            text.contains("10.0 MiB") && text.contains("--memory") && text.contains("would do"),
            "{text}"
        );
        let needed = needed(&text).to_string();
        let accepted = run(&needed);
        assert!(accepted.status.success(), "{needed}: {}", stderr(&accepted));
    }
}

#[test]
fn a_cache_of_all_experts_reads_each_once() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let inspected = smoe_json(["inspect", vault.to_str().unwrap(), "--json"]);
    let prompt = vec!["7"; 100].join(",");
    let args =
        ["run", vault.to_str().unwrap(), "--prompt-ids", &prompt, "-n", "200", "--ignore-eos", "--json"];
    let report = smoe_json([&args[..], &["--cache", "all"]].concat());
    assert_eq!(report["memory"]["cache_bytes"], inspected["expert_bytes"]);
    let prefill = report["instrument"]["prefill_bytes_read"].as_u64().unwrap();
    assert_eq!(report["instrument"]["prefill_distinct_expert_bytes"].as_u64().unwrap(), prefill);
    let decode = report["instrument"]["decode_bytes_per_token"].as_f64().unwrap() * 199.0;
    assert!(prefill as f64 + decode <= inspected["expert_bytes"].as_f64().unwrap() + 1.0);
}

#[test]
fn a_prompt_reads_each_expert_once_per_chunk_even_from_a_small_cache() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let prompt: Vec<_> = (0..300).map(|id| (id * 17 % 6000).to_string()).collect();
    let args = ["run", vault.to_str().unwrap(), "--prompt-ids", &prompt.join(","), "-n", "1", "--json"];
    let report = smoe_json([&args[..], &["--cache", "1M", "--chunk", "512"]].concat());
    let instrument = &report["instrument"];
    assert_eq!(instrument["prefill_bytes_read"], instrument["prefill_distinct_expert_bytes"]);
}

#[test]
fn the_panel_is_complete_and_consistent() {
    let vault = packed(&pebble(), "Q4_0", "Q8_0");
    let args = [
        "run",
        vault.to_str().unwrap(),
        "-p",
        "Hello!",
        "-n",
        "40",
        "--ignore-eos",
        "--json",
        "--instrument",
    ];
    let report = smoe_json([&args[..], &["--cache", "2M"]].concat());
    for (object, names) in [
        (
            "timings",
            &[
                "prefill_ms",
                "decode_ms",
                "prefill_tokens_per_s",
                "decode_tokens_per_s",
                "time_to_first_token_ms",
            ][..],
        ),
        (
            "memory",
            &["budget_bytes", "resident_bytes", "kv_bytes", "scratch_bytes", "cache_bytes", "peak_rss_bytes"],
        ),
        ("io", &["alignment_bytes", "depth"]),
        (
            "instrument",
            &[
                "prefill_bytes_read",
                "prefill_distinct_expert_bytes",
                "decode_bytes_per_token",
                "hit_rate",
                "adjacent_overlap",
                "drive_bandwidth_bytes_per_s",
                "memory_bandwidth_bytes_per_s",
                "drive_limit_tokens_per_s",
                "memory_limit_tokens_per_s",
                "share_of_limit",
            ],
        ),
    ] {
        for name in names {
            let value = report[object][name].as_f64().unwrap_or_else(|| panic!("{object}.{name}: {report}"));
            assert!(value.is_finite() && value >= 0.0, "{object}.{name}: {value}");
        }
    }
    let instrument = &report["instrument"];
    let number = |name: &str| instrument[name].as_f64().unwrap();
    let limit = number("drive_bandwidth_bytes_per_s") / number("decode_bytes_per_token");
    assert!((limit / number("drive_limit_tokens_per_s") - 1.0).abs() < 1e-6);
    assert!(number("hit_rate") <= 1.0 && number("adjacent_overlap") <= 1.0);
    let per_token: f64 =
        instrument["ms_per_token"].as_object().unwrap().values().map(|ms| ms.as_f64().unwrap()).sum();
    let decode = report["timings"]["decode_ms"].as_f64().unwrap() / 39.0;
    assert!((per_token / decode - 1.0).abs() < 0.2, "buckets add up to {per_token} ms of {decode} ms");
    assert!(report["io"]["mode"].as_str().unwrap().contains("reads"));
}
