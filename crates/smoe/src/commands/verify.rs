//! `smoe verify`: every checksum of a vault.

use anyhow::{Result, bail};
use serde::Serialize;
use smoe_stream::usable_cpus;

use crate::cli::VerifyArgs;
use crate::{interrupt, open, output};

/// Messages that are shown of many.
const SHOWN: usize = 20;

/// What `--json` prints.
#[derive(Serialize)]
struct VerifyJson<'a> {
    path: String,
    ok: bool,
    parts: usize,
    bytes: u64,
    seconds: f64,
    damage: &'a [String],
}

pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    open::refuse_directories(&args.model)?;
    let cancel = interrupt::flag()?;
    let mut bar = None;
    let report = smoe_pack::verify(&args.model, usable_cpus(), &cancel, &mut |done, total| {
        bar.get_or_insert_with(|| output::byte_progress("verifying", total)).set_position(done);
    })?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let name = args.model.display();
    if args.json {
        output::json(&VerifyJson {
            path: name.to_string(),
            ok: report.damage.is_empty(),
            parts: report.parts,
            bytes: report.bytes,
            seconds: report.elapsed.as_secs_f64(),
            damage: &report.damage,
        })?;
    }
    if !report.damage.is_empty() {
        for message in report.damage.iter().take(SHOWN) {
            output::note(message);
        }
        bail!("{name}: {} of {} parts are damaged", report.damage.len(), report.parts);
    }
    if !args.json {
        output::line(&format!(
            "{name}: {} parts, {} in {}: all as they were packed",
            report.parts,
            output::bytes(report.bytes),
            output::duration(report.elapsed)
        ))?;
    }
    Ok(())
}
