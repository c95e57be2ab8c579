//! What the end-to-end tests share: the built command, packed models, references.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

use serde_json::Value;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository's root exists")
}

/// The committed trained checkpoint.
pub fn pebble() -> PathBuf {
    root().join("models/pebble-22m")
}

/// A committed random checkpoint.
pub fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

/// Runs the command with the given arguments.
pub fn smoe<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smoe"))
        .args(args)
        .stdin(std::process::Stdio::null())
        .output()
        .expect("the command starts")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the command, which must succeed, and reads its result as JSON.
pub fn smoe_json<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Value {
    let output = smoe(args);
    assert!(output.status.success(), "failed: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("stdout holds one JSON object")
}

/// The vault of a checkpoint in the given formats, packed once for each test binary.
pub fn packed(checkpoint: &Path, experts: &str, dense: &str) -> PathBuf {
    static PACKED: OnceLock<Mutex<HashMap<String, PathBuf>>> = OnceLock::new();
    let name = checkpoint.file_name().expect("a checkpoint has a name").to_string_lossy().into_owned();
    let key = format!("{name}-{experts}-{dense}");
    let mut packed =
        PACKED.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    packed
        .entry(key.clone())
        .or_insert_with(|| {
            let folder = temp_dir("vaults");
            let vault = folder.join(format!("{key}.smoe"));
            let output = smoe([
                "pack".as_ref(),
                checkpoint.as_os_str(),
                "-o".as_ref(),
                vault.as_os_str(),
                "--experts".as_ref(),
                experts.as_ref(),
                "--dense".as_ref(),
                dense.as_ref(),
                "--force".as_ref(),
            ]);
            assert!(output.status.success(), "pack failed: {}", stderr(&output));
            vault
        })
        .clone()
}

/// A folder of this test process.
pub fn temp_dir(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    folder
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file exists")).expect("the file holds JSON")
}

pub fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .expect("a list of ids")
        .iter()
        .map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id of 32 bits"))
        .collect()
}

pub fn comma_separated(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
