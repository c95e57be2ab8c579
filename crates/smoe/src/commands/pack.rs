//! `smoe pack`: a checkpoint directory becomes a vault.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use smoe_format::VaultHeader;
use smoe_pack::{ErrorSums, Estimate, FormatUse, PackError, PackOptions, PackPlan, PackReport, PackRun};
use smoe_stream::usable_cpus;

use crate::cli::PackArgs;
use crate::{interrupt, output};

/// What `--json` prints.
#[derive(Serialize)]
struct PackJson<'a> {
    checkpoint: String,
    output: String,
    source_bytes: u64,
    vault_bytes: u64,
    resident_bytes: u64,
    expert_bytes: u64,
    formats: &'a [FormatUse],
    fallbacks: &'a [String],
    ignored_tensors: &'a [String],
    free_bytes: Option<u64>,
    estimated_seconds: Option<f64>,
    written: bool,
    elapsed_seconds: Option<f64>,
    resumed_parts: usize,
    errors: Vec<ErrorJson>,
}

#[derive(Serialize)]
struct ErrorJson {
    format: String,
    elements: u64,
    rmse: f64,
    snr_db: Option<f64>,
}

pub(crate) fn run(args: &PackArgs) -> Result<()> {
    if args.output.exists() && !args.force && !args.dry_run {
        return Err(PackError::Exists { path: args.output.clone() }.into());
    }
    let threads = args.threads.unwrap_or_else(usable_cpus);
    let options = PackOptions {
        experts: args.experts,
        dense: args.dense,
        alignment: args.alignment,
        ignored_keys: args.ignore_key.clone(),
    };
    let plan = PackPlan::new(&args.checkpoint, &options)?;
    let free = smoe_pack::free_bytes(folder_of(&args.output));
    let estimate = smoe_pack::estimate(&plan, threads)?;
    let description = describe(args, &plan, free, &estimate, threads);
    if args.dry_run {
        if args.json {
            return output::json(&json(args, &plan, free, Some(&estimate), None));
        }
        output::line(description.trim_end())?;
        return Ok(());
    }
    output::note(description.trim_end());
    let cancel = interrupt::flag()?;
    interrupt::survive_file_limits()?;
    let bar = output::byte_progress("packing", plan.source_bytes());
    let mut started = false;
    let run = PackRun { threads, force: args.force, measure_error: args.measure_error, cancel: &cancel };
    let packed = smoe_pack::pack(&plan, &args.output, run, &mut |progress| {
        if !started {
            // Rate and time left count what this run does.
            bar.set_position(progress.resumed_bytes);
            bar.reset_eta();
            started = true;
        }
        bar.set_position(progress.resumed_bytes + progress.done_bytes);
    });
    bar.finish_and_clear();
    let report = packed?;
    if args.json {
        return output::json(&json(args, &plan, free, None, Some(&report)));
    }
    if !report.errors.is_empty() {
        output::line(error_table(&report.errors).trim_end())?;
    }
    let resumed = match report.resumed_units {
        0 => String::new(),
        units => format!(", {units} parts were there already"),
    };
    output::line(&format!(
        "{}: {} in {}{resumed}",
        args.output.display(),
        output::bytes(report.vault_bytes),
        output::duration(report.elapsed),
    ))?;
    Ok(())
}

impl PackArgs {
    /// A pack with all defaults that replaces what is there.
    pub(crate) fn with_defaults(checkpoint: PathBuf, output: PathBuf) -> Self {
        let PackOptions { experts, dense, alignment, .. } = PackOptions::default();
        Self {
            checkpoint,
            output,
            experts,
            dense,
            alignment,
            threads: None,
            dry_run: false,
            measure_error: false,
            force: true,
            ignore_key: Vec::new(),
            json: false,
        }
    }
}

/// The folder that a file is or will be in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

fn describe(
    args: &PackArgs,
    plan: &PackPlan,
    free: Option<u64>,
    estimate: &Estimate,
    threads: usize,
) -> String {
    let header = plan.header();
    let mut text = format!(
        "{} → {}\n  {} to read, {} to write: {} resident, {} in {} expert records\n",
        args.checkpoint.display(),
        args.output.display(),
        output::bytes(plan.source_bytes()),
        output::bytes(plan.vault_bytes()),
        output::bytes(plan.resident_bytes()),
        output::bytes(plan.expert_bytes()),
        header.expert_layers.iter().map(|layer| u64::from(layer.count)).sum::<u64>(),
    );
    text.push_str(&format_table(plan.formats()));
    text.push_str(&notes(header));
    let space = match free {
        Some(free) if free < plan.vault_bytes() => format!("{} free: not enough", output::bytes(free)),
        Some(free) => format!("{} free", output::bytes(free)),
        None => "free space unknown".into(),
    };
    text.push_str(&format!(
        "  {space} · about {} to convert at {}/s on {}\n",
        output::duration(estimate.convert),
        output::bytes(estimate.bytes_per_s as u64),
        output::plural(threads, "thread")
    ));
    text
}

/// Formats by class.
pub(crate) fn format_table(formats: &[FormatUse]) -> String {
    let mut rows = vec![["", "format", "tensors", "weights", "size"].map(str::to_owned).to_vec()];
    for entry in formats {
        rows.push(vec![
            entry.class.to_owned(),
            entry.format.clone(),
            entry.tensors.to_string(),
            output::count(entry.elements),
            output::bytes(entry.bytes),
        ]);
    }
    output::table(&rows)
}

/// Fallbacks and ignored tensors, each in a line; a long list is cut.
pub(crate) fn notes(header: &VaultHeader) -> String {
    const SHOWN: usize = 8;
    let mut text = String::new();
    let lists = [("format", &header.provenance.fallbacks), ("ignored", &header.provenance.ignored_tensors)];
    for (label, list) in lists {
        for line in list.iter().take(SHOWN) {
            text.push_str(&format!("  {label}: {line}\n"));
        }
        if list.len() > SHOWN {
            text.push_str(&format!("  {label}: and {} more\n", list.len() - SHOWN));
        }
    }
    text
}

fn error_table(errors: &[(String, ErrorSums)]) -> String {
    let mut rows = vec![["", "weights", "RMSE", "SNR"].map(str::to_owned).to_vec()];
    for (name, sums) in errors {
        let snr = sums.snr_db().map_or("exact".into(), |snr| format!("{snr:.2} dB"));
        rows.push(vec![name.clone(), output::count(sums.elements), format!("{:.3e}", sums.rmse()), snr]);
    }
    output::table(&rows)
}

fn json<'a>(
    args: &PackArgs,
    plan: &'a PackPlan,
    free_bytes: Option<u64>,
    estimate: Option<&Estimate>,
    report: Option<&PackReport>,
) -> PackJson<'a> {
    let provenance = &plan.header().provenance;
    let errors = report.map_or(&[][..], |report| &report.errors);
    PackJson {
        checkpoint: args.checkpoint.display().to_string(),
        output: args.output.display().to_string(),
        source_bytes: plan.source_bytes(),
        vault_bytes: plan.vault_bytes(),
        resident_bytes: plan.resident_bytes(),
        expert_bytes: plan.expert_bytes(),
        formats: plan.formats(),
        fallbacks: &provenance.fallbacks,
        ignored_tensors: &provenance.ignored_tensors,
        free_bytes,
        estimated_seconds: estimate.map(|estimate| estimate.convert.as_secs_f64()),
        written: report.is_some(),
        elapsed_seconds: report.map(|report| report.elapsed).as_ref().map(Duration::as_secs_f64),
        resumed_parts: report.map_or(0, |report| report.resumed_units),
        errors: errors
            .iter()
            .map(|(format, sums)| ErrorJson {
                format: format.clone(),
                elements: sums.elements,
                rmse: sums.rmse(),
                snr_db: sums.snr_db(),
            })
            .collect(),
    }
}
