//! What bad input gets: one clear error, exit code 1, nothing under the final name, no panic.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{fixture, smoe, stderr};
use serde_json::{Value, json};

/// A copy of a fixture that may be damaged.
struct Copy {
    folder: tempfile::TempDir,
}

impl Copy {
    fn of(name: &str) -> Self {
        let folder = tempfile::tempdir_in(common::temp_dir("bad")).unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = common::read_json(&self.path(name));
        change(&mut value);
        fs::write(self.path(name), value.to_string()).unwrap();
    }

    /// Replaces the header of a safetensors file, as text.
    fn edit_header(&self, name: &str, change: impl FnOnce(String) -> String) {
        let bytes = fs::read(self.path(name)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = change(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
        let mut changed = (header.len() as u64).to_le_bytes().to_vec();
        changed.extend_from_slice(header.as_bytes());
        changed.extend_from_slice(&bytes[8 + length..]);
        fs::write(self.path(name), changed).unwrap();
    }

    /// Packs; must fail with a message that contains all of `expected` and leave nothing behind.
    fn refuse(&self, expected: &[&str]) {
        let vault = self.path("out.smoe");
        let output =
            smoe(["pack".as_ref(), self.folder.path().as_os_str(), "-o".as_ref(), vault.as_os_str()]);
        check_error(&output, expected);
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(!name.starts_with("out.smoe"), "{name} was left behind");
        }
    }
}

/// One line that says what is wrong, and exit code 1.
fn check_error(output: &Output, expected: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let errors: Vec<_> = text.lines().filter(|line| line.starts_with("smoe: error: ")).collect();
    assert_eq!(errors.len(), 1, "{text}");
    assert!(!text.contains("panicked"), "{text}");
    let (_, message) = errors[0].split_at("smoe: error: ".len());
    let half = message.len() / 2;
    assert!(
        !message.is_char_boundary(half) || !message[half..].contains(&message[..half]),
        "said twice: {message}"
    );
    for part in expected {
        assert!(errors[0].contains(part), "{:?} does not contain {part:?}", errors[0]);
    }
}

#[test]
fn the_copies_are_packed_when_nothing_is_wrong() {
    for name in ["plain", "three-shards"] {
        let copy = Copy::of(name);
        let vault = copy.path("out.smoe");
        let output =
            smoe(["pack".as_ref(), copy.folder.path().as_os_str(), "-o".as_ref(), vault.as_os_str()]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

#[test]
fn shards_that_are_cut_short_or_too_long() {
    for cut in [1, 2, 1000] {
        let copy = Copy::of("plain");
        let path = copy.path("model.safetensors");
        let bytes = fs::metadata(&path).unwrap().len();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes - cut).unwrap();
        copy.refuse(&[
            "model.safetensors",
            &bytes.to_string(),
            &(bytes - cut).to_string(),
            "not copied or downloaded",
        ]);
    }
    for length in [0, 7, 8, 100] {
        let copy = Copy::of("plain");
        fs::OpenOptions::new()
            .write(true)
            .open(copy.path("model.safetensors"))
            .unwrap()
            .set_len(length)
            .unwrap();
        copy.refuse(&["model.safetensors", &length.to_string()]);
    }
    let copy = Copy::of("plain");
    let mut bytes = fs::read(copy.path("model.safetensors")).unwrap();
    bytes.push(0);
    fs::write(copy.path("model.safetensors"), bytes).unwrap();
    copy.refuse(&["model.safetensors", "its length in bytes"]);
}

#[test]
fn shards_and_indices_that_do_not_fit_together() {
    let copy = Copy::of("three-shards");
    fs::remove_file(copy.path("model-00002-of-00003.safetensors")).unwrap();
    copy.refuse(&["model-00002-of-00003.safetensors", "missing", "index"]);

    let index = "model.safetensors.index.json";
    let change = |tensor: &'static str, file: &'static str| {
        let copy = Copy::of("three-shards");
        copy.edit(index, |value| value["weight_map"][tensor] = file.into());
        copy
    };
    change("model.norm.weight", "model-00009-of-00003.safetensors")
        .refuse(&["model-00009-of-00003.safetensors"]);
    change("not.there", "model-00001-of-00003.safetensors").refuse(&["not.there", "in none of the shards"]);
    for file in ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", ".."] {
        change("model.norm.weight", file).refuse(&["model.norm.weight", "a file name in the same directory"]);
    }
    let copy = Copy::of("three-shards");
    fs::write(copy.path(index), "{").unwrap();
    copy.refuse(&[index]);

    // Without an index, a tensor may be in one file only.
    let copy = Copy::of("plain");
    fs::copy(copy.path("model.safetensors"), copy.path("again.safetensors")).unwrap();
    copy.refuse(&["in one file only", "again.safetensors"]);
    let copy = Copy::of("plain");
    fs::remove_file(copy.path("model.safetensors")).unwrap();
    copy.refuse(&["no *.safetensors"]);
}

#[test]
fn headers_that_lie() {
    let with_length = |length: u64| {
        let copy = Copy::of("plain");
        let file = fs::OpenOptions::new().write(true).open(copy.path("model.safetensors")).unwrap();
        file.write_all_at(&length.to_le_bytes(), 0).unwrap();
        copy
    };
    with_length(u64::MAX).refuse(&["model.safetensors", "header"]);
    with_length(100_000_001).refuse(&["the header's length", "100000001"]);
    with_length(99_999_999).refuse(&["the header needs 100000007 bytes"]);
    with_length(0).refuse(&["the header's start"]);
    with_length(10).refuse(&["model.safetensors", "the header"]);

    let norm = "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[64]";
    let changed = |from: &'static str, to: &'static str| {
        let copy = Copy::of("plain");
        copy.edit_header("model.safetensors", |header| {
            assert!(header.contains(from), "{header}");
            header.replace(from, to)
        });
        copy
    };
    let with = |shape: &'static str| changed(norm, shape);
    with("\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[65]").refuse(&[
        "model.norm.weight",
        "130",
        "128",
    ]);
    with("\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":[64]").refuse(&[
        "model.norm.weight",
        "256",
        "128",
    ]);
    with("\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":[32]").refuse(&[
        "model.norm.weight",
        "[32]",
        "[64]",
    ]);
    with("\"model.norm.weight\":{\"dtype\":\"I16\",\"shape\":[64]").refuse(&["model.norm.weight", "I16"]);
    with("\"model.norm.weight\":{\"dtype\":\"X7\",\"shape\":[64]").refuse(&["model.norm.weight", "X7"]);
    with("\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[18446744073709551615,18446744073709551615]")
        .refuse(&["model.norm.weight"]);
    with("\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[-64]").refuse(&["model.norm.weight"]);
    with("\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[64.5]").refuse(&["model.norm.weight"]);
    with("\"model.norm.weight\":{\"dtype\":7,\"shape\":[64]").refuse(&["model.norm.weight"]);
    with("\"lm_head.weight\":{\"dtype\":\"BF16\",\"shape\":[64]").refuse(&["lm_head.weight occurs twice"]);
    changed("\"model.norm.weight\"", "\"model.other.weight\"").refuse(&["model.norm.weight"]);
    changed("{\"dtype\"", "{\"extra\":1,\"dtype\"").refuse(&["extra"]);
}

/// Offsets of two tensors are exchanged, moved apart, or reversed.
#[test]
fn data_offsets_that_lie() {
    let offsets = |change: fn(&mut Value)| {
        let copy = Copy::of("plain");
        copy.edit_header("model.safetensors", |header| {
            let mut header: Value = serde_json::from_str(&header).unwrap();
            change(&mut header["model.norm.weight"]["data_offsets"]);
            header.to_string()
        });
        copy
    };
    offsets(|value| *value = json!([0, 128])).refuse(&["start of tensor"]);
    offsets(|value| *value = json!([value[1], value[0]])).refuse(&["model.norm.weight"]);
    offsets(|value| *value = json!([u64::MAX - 128, u64::MAX])).refuse(&["model.norm.weight"]);
    offsets(|value| *value = json!([1_u64 << 40, (1_u64 << 40) + 128])).refuse(&["tensor", "hole"]);
    offsets(|value| *value = json!([value[0]])).refuse(&["model.norm.weight"]);
}

#[test]
fn weights_that_are_no_numbers() {
    for (pattern, word) in [(0x7fc0_u16, "NaN"), (0x7f80, "inf"), (0xff80, "-inf")] {
        let copy = Copy::of("plain");
        let path = copy.path("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let header: Value = serde_json::from_slice(&bytes[8..8 + length as usize]).unwrap();
        let name = "model.layers.1.mlp.experts.5.up_proj.weight";
        let start = header[name]["data_offsets"][0].as_u64().unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&pattern.to_le_bytes(), 8 + length + start + 2 * 77).unwrap();
        copy.refuse(&["model.safetensors", name, word, "element 77"]);
    }
}

#[test]
fn configurations_that_cannot_be_run() {
    let with = |key: &'static str, value: Value| {
        let copy = Copy::of("plain");
        copy.edit("config.json", |config| config[key] = value);
        copy
    };
    with("architectures", json!(["GPT2LMHeadModel"])).refuse(&[
        "GPT2LMHeadModel",
        "not supported",
        "Qwen3Moe",
    ]);
    with("quantization_config", json!({"quant_method": "fp8"})).refuse(&["quantization_config"]);
    with("new_secret_knob", json!(2)).refuse(&["new_secret_knob", "--ignore-key"]);
    with("hidden_act", json!("gelu")).refuse(&["hidden_act", "gelu"]);
    with("attention_bias", json!(true)).refuse(&["q_proj.bias"]);
    with("tie_word_embeddings", json!(true)).refuse(&["lm_head.weight"]);
    with("num_hidden_layers", json!(4)).refuse(&["model.layers.3"]);
    with("num_hidden_layers", json!(2)).refuse(&["model.layers.2"]);
    with("num_local_experts", json!(7)).refuse(&["tensor"]);
    with("num_local_experts", json!(9)).refuse(&["model.layers.0.mlp.gate.weight", "[8, 64]", "[9, 64]"]);
    with("num_experts_per_tok", json!(9)).refuse(&["num_experts_per_tok"]);
    with("num_experts_per_tok", json!(0)).refuse(&["num_experts_per_tok"]);
    with("head_dim", json!(15)).refuse(&["head_dim"]);
    with("hidden_size", json!(1_u64 << 60)).refuse(&["hidden_size"]);
    with("hidden_size", json!(-1)).refuse(&["hidden_size"]);
    with("vocab_size", json!(261)).refuse(&["model.embed_tokens.weight", "261", "260"]);
    with("rms_norm_eps", json!("small")).refuse(&["rms_norm_eps"]);
    with("rope_parameters", json!({"rope_type": "longrope", "rope_theta": 1e4})).refuse(&["longrope"]);
    with("num_experts", json!(12)).refuse(&["num_experts", "num_local_experts"]);

    for text in ["", "{", "[]", "null", "{\"a\": 1e999}"] {
        let copy = Copy::of("plain");
        fs::write(copy.path("config.json"), text).unwrap();
        copy.refuse(&["config.json"]);
    }
    let copy = Copy::of("plain");
    fs::write(copy.path("config.json"), [0xff, 0xfe, 0x00]).unwrap();
    copy.refuse(&["config.json", "UTF-8"]);
    let copy = Copy::of("plain");
    fs::remove_file(copy.path("config.json")).unwrap();
    copy.refuse(&["config.json", "missing"]);
    let deep = "[".repeat(100_000);
    let copy = Copy::of("plain");
    fs::write(copy.path("config.json"), &deep).unwrap();
    copy.refuse(&["config.json"]);
}

#[test]
fn a_harmless_key_can_be_ignored_and_is_remembered() {
    let copy = Copy::of("plain");
    copy.edit("config.json", |config| config["new_secret_knob"] = json!(2));
    let vault = copy.path("out.smoe");
    let (from, to) = (copy.folder.path().to_str().unwrap(), vault.to_str().unwrap());
    let output = smoe(["pack", from, "-o", to, "--ignore-key", "new_secret_knob"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = common::smoe_json(["run", to, "--prompt-ids", "1,2", "-n", "2", "--json"]);
    assert_eq!(report["token_ids"].as_array().unwrap().len(), 2);
}

#[test]
fn tokenizers_that_cannot_be_used() {
    for text in ["", "{}", "[1]", "{\"model\": {\"type\": \"BPE\"}}"] {
        let copy = Copy::of("plain");
        fs::write(copy.path("tokenizer.json"), text).unwrap();
        copy.refuse(&["tokenizer.json"]);
    }
    let copy = Copy::of("plain");
    copy.edit("tokenizer.json", |tokenizer| tokenizer["model"]["vocab"]["!"] = json!(4_000_000_000_u32));
    copy.refuse(&["tokenizer.json", "4000000000"]);
    let copy = Copy::of("plain");
    copy.edit("generation_config.json", |config| config["eos_token_id"] = json!("end"));
    copy.refuse(&["generation_config.json", "eos_token_id"]);
    let copy = Copy::of("plain");
    copy.edit("tokenizer_config.json", |config| config["eos_token"] = json!(17));
    copy.refuse(&["tokenizer_config.json", "eos_token"]);
}

#[test]
fn templates_that_do_not_compile_loop_recurse_or_grow() {
    let with = |template: &str| {
        let copy = Copy::of("plain");
        fs::write(copy.path("chat_template.jinja"), template).unwrap();
        copy
    };
    for template in ["{% if %}", "{{ messages", "{% endfor %}", "{{ 1 + }}", "{% unknown %}"] {
        with(template).refuse(&["chat template"]);
    }
    with("{{ no_such_function() }}").refuse(&["chat template", "no_such_function"]);
    with("{{ raise_exception('not today') }}").refuse(&["not today"]);
    for template in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}",
        "{% set ns = namespace(x='abcdefgh') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a' * 1000000) %}{% for i in range(100000) %}{{ ns.x }}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{{ ('a' * 100000000) * 100000000 }}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).join(range(100000)) }}",
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
        "{{ range(10000000000) | list }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'x' | indent(1000000000) }}",
        "{{ 2 ** 99999999 }}",
    ] {
        with(template).refuse(&["chat template"]);
    }
    // Nesting that only hurts when it is given back.
    let nested =
        "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}ok";
    let output = {
        let copy = with(nested);
        smoe([
            "pack".as_ref(),
            copy.folder.path().as_os_str(),
            "-o".as_ref(),
            copy.path("out.smoe").as_os_str(),
        ])
    };
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
    let copy = Copy::of("plain");
    copy.edit("tokenizer_config.json", |config| config["chat_template"] = json!(["a"]));
    copy.refuse(&["tokenizer_config.json", "chat_template"]);
}

#[test]
fn paths_that_cannot_be_used() {
    let copy = Copy::of("plain");
    let file = copy.path("config.json");
    let run = |args: &[&str], expected: &[&str]| check_error(&smoe(args), expected);
    let (folder, file) = (copy.folder.path().to_str().unwrap(), file.to_str().unwrap());
    run(&["pack", "no/such/folder", "-o", "x.smoe"], &["no/such/folder"]);
    run(&["pack", file, "-o", "x.smoe"], &[file, "directory"]);
    run(&["pack", folder, "-o", "no/such/folder/x.smoe"], &["no/such/folder/x.smoe"]);
    run(&["pack", folder, "-o", folder], &[folder, "exists"]);
    run(&["pack", folder, "-o", folder, "--force"], &[folder, "is a directory"]);
    run(&["pack", folder, "-o", file], &[file, "--force"]);
    for command in ["run", "chat", "inspect", "verify"] {
        let extra: &[&str] = if command == "run" { &["-p", "x"] } else { &[] };
        run(&[&[command, "no-such.smoe"], extra].concat(), &["no-such.smoe"]);
        run(&[&[command, folder], extra].concat(), &[folder, "smoe pack"]);
        run(&[&[command, file], extra].concat(), &[file, "not a vault"]);
        run(&[&[command, "/dev/zero"], extra].concat(), &["/dev/zero"]);
    }
    // A directory where a file should be.
    let copy = Copy::of("plain");
    fs::remove_file(copy.path("tokenizer.json")).unwrap();
    fs::create_dir(copy.path("tokenizer.json")).unwrap();
    copy.refuse(&["tokenizer.json", "a directory"]);
}

fn vault() -> PathBuf {
    common::packed(&fixture("plain"), "Q4_0", "Q8_0")
}

/// Writes a changed vault and checks that run, inspect and verify refuse it.
fn refuse_vault(bytes: &[u8], commands: &[&str], expected: &[&str]) {
    let folder = tempfile::tempdir_in(common::temp_dir("bad")).unwrap();
    let path = folder.path().join("changed.smoe");
    fs::write(&path, bytes).unwrap();
    for command in commands {
        let mut args = vec![*command, path.to_str().unwrap()];
        if *command == "run" {
            args.extend(["--prompt-ids", "1,2,3,4,5,6,7,8", "-n", "4"]);
        }
        let expected: Vec<_> = [&["changed.smoe"], expected].concat();
        check_error(&smoe(args), &expected);
    }
}

const ALL: &[&str] = &["run", "inspect", "verify"];

#[test]
fn files_that_are_no_vault_are_called_by_their_names() {
    let mut old = b"SMOE\xDE\xEA\x00\x01".to_vec();
    old.resize(10_000, 7);
    refuse_vault(&old, ALL, &["original S-MoE", "pack the checkpoint again"]);
    refuse_vault(&old[..8], ALL, &["original S-MoE"]);
    refuse_vault(b"GGUF\x03\0\0\0rest", ALL, &["GGUF"]);
    refuse_vault(b"", ALL, &["empty"]);
    refuse_vault(b"PK\x03\x04", ALL, &["not a vault"]);
    refuse_vault(&[0; 100_000], ALL, &["not a vault"]);
}

#[test]
fn vaults_of_another_version() {
    for version in [0_u32, 2, u32::MAX] {
        let mut bytes = fs::read(vault()).unwrap();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        refuse_vault(&bytes, ALL, &["version", &version.to_string()]);
    }
}

#[test]
fn vaults_that_were_cut() {
    let bytes = fs::read(vault()).unwrap();
    for length in [8, 11, 100, 4095, 4096, 5000, bytes.len() / 2, bytes.len() - 4096, bytes.len() - 1] {
        refuse_vault(&bytes[..length], ALL, &["bytes"]);
    }
    let mut longer = bytes.clone();
    longer.push(0);
    refuse_vault(&longer, ALL, &["its length in bytes"]);
}

/// Offset and length of a section by the superblock.
fn section(bytes: &[u8], at: usize) -> (usize, usize) {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    (number(at), number(at + 8))
}

#[test]
fn bits_that_were_flipped() {
    let bytes = fs::read(vault()).unwrap();
    let flipped = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x10;
        bytes
    };
    let (header, resident, experts) = (section(&bytes, 16), section(&bytes, 40), section(&bytes, 56));
    refuse_vault(&flipped(20), ALL, &["checksum of the superblock"]);
    refuse_vault(&flipped(2000), ALL, &["checksum of the superblock"]);
    refuse_vault(&flipped(header.0 + header.1 / 2), ALL, &["checksum of the header"]);
    refuse_vault(&flipped(bytes.len() - 4), ALL, &["checksum of the checksum table"]);
    let run = &["run"];
    refuse_vault(&flipped(resident.0 + 10), run, &["resident tensor", "model.embed_tokens.weight"]);
    // Every record of the first layer is damaged, so that whichever is chosen is.
    let mut all = bytes.clone();
    for at in (experts.0..experts.0 + experts.1).step_by(512) {
        all[at] ^= 1;
    }
    refuse_vault(&all, run, &["checksum of layer 0, expert", "offset"]);
}

#[test]
fn verify_finds_every_single_flipped_bit() {
    use std::sync::atomic::AtomicBool;
    let bytes = fs::read(vault()).unwrap();
    let folder = tempfile::tempdir_in(common::temp_dir("bad")).unwrap();
    let path = folder.path().join("flipped.smoe");
    fs::write(&path, &bytes).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let verify = |path: &Path| smoe_pack::verify(path, 1, &AtomicBool::new(false), &mut |_, _| {});
    assert!(verify(&path).unwrap().damage.is_empty());
    let mut state = 1_u64;
    for _ in 0..400 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (state >> 20) as usize % bytes.len();
        file.write_all_at(&[bytes[at] ^ (1 << (state >> 61))], at as u64).unwrap();
        let found = match verify(&path) {
            Ok(report) => !report.damage.is_empty(),
            Err(_) => true,
        };
        assert!(found, "a flipped bit in byte {at} was not found");
        file.write_all_at(&bytes[at..=at], at as u64).unwrap();
    }
    assert!(verify(&path).unwrap().damage.is_empty());
}

#[test]
fn requests_that_cannot_be_answered() {
    let vault = vault();
    let run = |args: &[&str], expected: &[&str]| {
        check_error(&smoe([&["run", vault.to_str().unwrap()], args].concat()), expected);
    };
    let long = vec!["7"; 300].join(",");
    run(&["--prompt-ids", &long], &["300", "256", "context_length_exceeded"]);
    run(&["--prompt-ids", &long, "--ctx", "64"], &["300", "holds 64"]);
    run(&["--prompt-ids", "1,2", "--ctx", "257"], &["257", "256"]);
    run(&["--prompt-ids", "1,260"], &["260"]);
    run(&["-p", "", "--raw"], &["empty"]);
    // Heads of 16 do not divide into blocks of 32.
    run(&["-p", "x", "--kv", "q8"], &["--kv q8", "heads of 16", "--kv f16"]);
    run(&["-p", "x", "--memory", "1M"], &["1.00 MiB", "would do"]);
    for usage in [
        &["--temperature", "-1"][..],
        &["--temperature", "nan"],
        &["--top-p", "0"],
        &["--min-p", "2"],
        &["--threads", "0"],
        &["--ctx", "0"],
        &["--cache", "lots"],
        &["--kv", "q2"],
        &["--io", "magic"],
        &["--prompt-ids", "1,x"],
        &["--prompt-ids", "-4"],
        &["--no-such-option"],
    ] {
        let mut args = vec!["run", vault.to_str().unwrap()];
        args.extend_from_slice(usage);
        if usage[0] != "--prompt-ids" {
            args.extend(["-p", "x"]);
        }
        let output = smoe(&args);
        assert_eq!(output.status.code(), Some(2), "{usage:?}: {}", stderr(&output));
    }
}

#[test]
fn a_context_that_is_exactly_full_is_allowed() {
    let vault = vault();
    let ids = vec!["7"; 256].join(",");
    let report =
        common::smoe_json(["run", vault.to_str().unwrap(), "--prompt-ids", &ids, "--json", "--ignore-eos"]);
    assert_eq!(report["finish_reason"], "length");
    let ids = vec!["7"; 250].join(",");
    let report =
        common::smoe_json(["run", vault.to_str().unwrap(), "--prompt-ids", &ids, "--json", "--ignore-eos"]);
    assert_eq!(report["finish_reason"], "length");
    assert!(report["token_ids"].as_array().unwrap().len() >= 6);
}

#[test]
fn data_that_cannot_be_scored() {
    let vault = vault();
    let folder = tempfile::tempdir_in(common::temp_dir("bad")).unwrap();
    let data = folder.path().join("data.jsonl");
    for (text, expected) in [
        ("", "holds no rows"),
        ("\n\n", "holds no rows"),
        ("{\"user\": \"a\"}\n", "line 1"),
        ("{\"user\": \"a\", \"assistant\": \"b\"}\nnot json\n", "line 2"),
        ("{\"user\": 1, \"assistant\": \"b\"}", "line 1"),
    ] {
        fs::write(&data, text).unwrap();
        let output = smoe(["eval", vault.to_str().unwrap(), "--data", data.to_str().unwrap()]);
        check_error(&output, &["data.jsonl", expected]);
    }
    let output = smoe(["eval", vault.to_str().unwrap(), "--data", "no-such.jsonl"]);
    check_error(&output, &["no-such.jsonl"]);
}
