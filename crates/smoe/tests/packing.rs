//! Packing: atomic, resumable, deterministic, within the space there is.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{fixture, pebble, smoe, smoe_json, stderr};
use smoe_pack::{PackError, PackOptions, PackPlan, PackReport, PackRun};
use smoe_quant::BlockFormat;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(common::temp_dir("packing")).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn pack_with(
    output: &Path,
    threads: usize,
    cancel: &AtomicBool,
    stop_at: u64,
) -> Result<PackReport, PackError> {
    let plan = PackPlan::new(&pebble(), &PackOptions::default()).unwrap();
    let run = PackRun { threads, force: false, measure_error: false, cancel };
    smoe_pack::pack(&plan, output, run, &mut |progress| {
        if progress.done_bytes >= stop_at {
            cancel.store(true, Ordering::Relaxed);
        }
    })
}

#[test]
fn the_same_bytes_from_any_number_of_threads() {
    let folder = folder();
    let vaults: Vec<PathBuf> = [1, 2, 5]
        .into_iter()
        .map(|threads| {
            let vault = folder.path().join(format!("{threads}.smoe"));
            pack_with(&vault, threads, &AtomicBool::new(false), u64::MAX).unwrap();
            vault
        })
        .collect();
    let first = fs::read(&vaults[0]).unwrap();
    assert!(vaults.iter().all(|vault| fs::read(vault).unwrap() == first));
}

#[test]
fn an_interrupted_pack_resumes_and_gives_the_same_vault() {
    let folder = folder();
    let whole = folder.path().join("whole.smoe");
    pack_with(&whole, 2, &AtomicBool::new(false), u64::MAX).unwrap();

    let resumed = folder.path().join("resumed.smoe");
    let mut interruptions = 0;
    let mut units = 0;
    let report = loop {
        match pack_with(&resumed, 1, &AtomicBool::new(false), 6 << 20) {
            Ok(report) => break report,
            Err(PackError::Interrupted { done, total }) => {
                assert!(done > units && done < total, "{done} of {total} after {units}");
                assert!(!resumed.exists());
                units = done;
                interruptions += 1;
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert!(interruptions >= 3 && report.resumed_units == units, "{interruptions} interruptions, {report:?}");
    assert_eq!(fs::read(&resumed).unwrap(), fs::read(&whole).unwrap());
    assert_eq!(names(folder.path()), ["resumed.smoe", "whole.smoe"]);
}

#[test]
fn a_partial_vault_of_other_options_or_sources_is_begun_again() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    pack_with(&vault, 1, &AtomicBool::new(false), 6 << 20).unwrap_err();
    let options = PackOptions { experts: BlockFormat::Q8_0, ..PackOptions::default() };
    let plan = PackPlan::new(&pebble(), &options).unwrap();
    let cancel = AtomicBool::new(false);
    let run = PackRun { threads: 2, force: false, measure_error: false, cancel: &cancel };
    let report = smoe_pack::pack(&plan, &vault, run, &mut |_| {}).unwrap();
    assert_eq!(report.resumed_units, 0);
    assert!(smoe_pack::verify(&vault, 2, &cancel, &mut |_, _| {}).unwrap().damage.is_empty());
}

#[test]
fn a_partial_vault_that_lost_its_bytes_is_begun_again() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    for damage in ["cut", "removed"] {
        pack_with(&vault, 1, &AtomicBool::new(false), 6 << 20).unwrap_err();
        let partial = folder.path().join("vault.smoe.partial");
        match damage {
            "cut" => fs::OpenOptions::new().write(true).open(&partial).unwrap().set_len(5000).unwrap(),
            _ => fs::remove_file(&partial).unwrap(),
        }
        // Interrupted once more right away, and then completed: the old journal must not come back.
        pack_with(&vault, 1, &AtomicBool::new(false), 1).unwrap_err();
        let cancel = AtomicBool::new(false);
        pack_with(&vault, 2, &cancel, u64::MAX).unwrap();
        assert!(smoe_pack::verify(&vault, 2, &cancel, &mut |_, _| {}).unwrap().damage.is_empty(), "{damage}");
        fs::remove_file(&vault).unwrap();
    }
}

#[test]
fn killed_at_ten_moments_the_next_pack_completes() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    let checkpoint = pebble();
    let args =
        ["pack", checkpoint.to_str().unwrap(), "-o", vault.to_str().unwrap(), "--threads", "1", "--force"];
    let mut killed = 0;
    for moment in 0..10 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_smoe"))
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(7 + 23 * moment));
        killed += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        if vault.exists() {
            // It was faster than the signal: then the vault is whole.
            let output = smoe(["verify", vault.to_str().unwrap()]);
            assert!(output.status.success(), "{}", stderr(&output));
            fs::remove_file(&vault).unwrap();
        }
    }
    assert!(killed > 0, "the first signals come before any pack can be done");
    let output = smoe(args);
    assert!(output.status.success(), "{}", stderr(&output));
    let output = smoe(["verify", vault.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(names(folder.path()), ["vault.smoe"]);
}

#[test]
fn two_packs_of_one_vault_do_not_meet() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    let plan = PackPlan::new(&pebble(), &PackOptions::default()).unwrap();
    let cancel = AtomicBool::new(false);
    let run = PackRun { threads: 1, force: false, measure_error: false, cancel: &cancel };
    let mut second = None;
    smoe_pack::pack(&plan, &vault, run, &mut |_| {
        second.get_or_insert_with(|| {
            let plan = PackPlan::new(&pebble(), &PackOptions::default()).unwrap();
            smoe_pack::pack(&plan, &vault, run, &mut |_| {})
        });
    })
    .unwrap();
    let error = second.unwrap().unwrap_err();
    assert!(matches!(error, PackError::Busy { .. }), "{error}");
    assert!(smoe_pack::verify(&vault, 2, &cancel, &mut |_, _| {}).unwrap().damage.is_empty());
}

#[test]
fn a_full_drive_is_an_error_with_both_numbers() {
    // A file system of 1 MiB, mounted in a namespace of its own, where that is allowed.
    let folder = folder();
    let mount = folder.path().join("small");
    fs::create_dir(&mount).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=1m tmpfs {mount} && {smoe} pack {checkpoint} -o {mount}/v.smoe; code=$?; \
         ls {mount}; exit $code",
        mount = mount.display(),
        smoe = env!("CARGO_BIN_EXE_smoe"),
        checkpoint = pebble().display()
    );
    let probe = format!("mount -t tmpfs -o size=1m tmpfs {}", mount.display());
    let in_namespace = |script: &str| {
        Command::new("unshare").args(["--user", "--map-root-user", "--mount", "sh", "-c", script]).output()
    };
    if in_namespace(&probe).is_ok_and(|output| output.status.success()) {
        let output = in_namespace(&script).unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("no space left") && text.contains(" are free"), "{text}");
        assert_eq!(common::stdout(&output), "", "nothing is left");
    }
    // A limit on the length of files, which is found out later, works everywhere.
    {
        let vault = folder.path().join("v.smoe");
        let script = format!(
            "ulimit -f 2000; {} pack {} -o {}",
            env!("CARGO_BIN_EXE_smoe"),
            pebble().display(),
            vault.display()
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("ulimit -f"), "{text}");
        assert_eq!(names(folder.path()), ["small"], "nothing is left");
    }
}

#[test]
fn an_existing_vault_is_replaced_only_when_asked() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    fs::write(&vault, "precious").unwrap();
    let (from, to) = (fixture("plain"), vault.to_str().unwrap());
    let output = smoe(["pack", from.to_str().unwrap(), "-o", to]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--force"));
    assert_eq!(fs::read(&vault).unwrap(), b"precious");
    assert!(smoe(["pack", from.to_str().unwrap(), "-o", to, "--force"]).status.success());
    assert!(smoe(["verify", to]).status.success());
}

#[test]
fn a_dry_run_writes_nothing_and_tells_the_truth() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    let from = pebble();
    let args = ["pack", from.to_str().unwrap(), "-o", vault.to_str().unwrap(), "--json"];
    let plan = smoe_json([&args[..], &["--dry-run"]].concat());
    assert_eq!(names(folder.path()), [""; 0]);
    assert_eq!(plan["written"], false);
    assert!(plan["free_bytes"].as_u64().unwrap() > 0 && plan["estimated_seconds"].as_f64().unwrap() > 0.0);
    let report = smoe_json(args);
    assert_eq!(report["vault_bytes"], plan["vault_bytes"]);
    assert_eq!(fs::metadata(&vault).unwrap().len(), plan["vault_bytes"].as_u64().unwrap());
    assert_eq!(report["formats"], plan["formats"]);
}

#[test]
fn errors_of_the_formats_are_measured() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    let from = pebble();
    let args = ["pack", from.to_str().unwrap(), "-o", vault.to_str().unwrap(), "--measure-error", "--json"];
    let report = smoe_json(args);
    let snr = |format: &str| {
        let entries = report["errors"].as_array().unwrap();
        let entry =
            entries.iter().find(|entry| entry["format"] == format).unwrap_or_else(|| panic!("{entries:?}"));
        (entry["rmse"].as_f64().unwrap(), entry["snr_db"].as_f64())
    };
    // Weights near a normal distribution: a format of 4 bits with a scale for each 32 keeps about 20 dB, 8 bits 40 and
    // more; what is stored as it was loses nothing.
    let (rmse, q4) = snr("experts Q4_0");
    assert!(rmse > 0.0 && (18.0..24.0).contains(&q4.unwrap()), "{q4:?}");
    assert!((40.0..50.0).contains(&snr("dense Q8_0").1.unwrap()));
    assert_eq!(snr("norm BF16"), (0.0, None));
}

#[test]
fn records_are_aligned_as_asked() {
    let folder = folder();
    let vault = folder.path().join("vault.smoe");
    let from = fixture("many-experts");
    let args = ["pack", from.to_str().unwrap(), "-o", vault.to_str().unwrap(), "--alignment", "16384"];
    assert!(smoe(args).status.success());
    let report = smoe_json(["inspect", vault.to_str().unwrap(), "--json"]);
    assert_eq!(report["alignment_bytes"], 16384);
    for layer in report["expert_layers"].as_array().unwrap() {
        assert_eq!(layer["stride"].as_u64().unwrap() % 16384, 0);
    }
    assert!(smoe(["run", vault.to_str().unwrap(), "--prompt-ids", "1,2", "-n", "2"]).status.success());
}

#[test]
fn links_are_followed_and_pipes_are_not_replaced() {
    let folder = folder();
    let (vault, link) = (folder.path().join("vault.smoe"), folder.path().join("link.smoe"));
    fs::write(&vault, "old").unwrap();
    std::os::unix::fs::symlink(&vault, &link).unwrap();
    let from = fixture("plain");
    let args = ["pack", from.to_str().unwrap(), "-o", link.to_str().unwrap(), "--force"];
    assert!(smoe(args).status.success());
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(smoe(["verify", vault.to_str().unwrap()]).status.success());

    let pipe = folder.path().join("pipe.smoe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let output = smoe(["pack", from.to_str().unwrap(), "-o", pipe.to_str().unwrap(), "--force"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("is no regular file"), "{}", stderr(&output));
}
