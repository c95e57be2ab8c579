//! Opening a vault for the commands that run it, with progress and a banner that says what was decided.

use std::path::Path;

use anyhow::{Result, bail};
use smoe_engine::{CacheSize, Engine, EngineOptions, OpenProgress};

use crate::cli::ModelArgs;
use crate::output;

/// Options of the command line as the engine takes them.
pub(crate) fn engine_options(args: &ModelArgs) -> EngineOptions {
    EngineOptions {
        threads: args.threads,
        cache: args.cache,
        memory: args.memory,
        context: args.ctx,
        kv: args.kv.into(),
        io: args.io.into(),
        chunk: args.chunk,
        logits_rows: 1,
        instrument: args.instrument,
    }
}

/// Opens a vault.
pub(crate) fn open(path: &Path, options: EngineOptions) -> Result<Engine> {
    refuse_directories(path)?;
    let mut bar = None;
    let engine = Engine::open(path, options, &mut |OpenProgress::Resident { done, total }| {
        bar.get_or_insert_with(|| output::byte_progress("loading", total)).set_position(done);
    })?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(engine)
}

/// A checkpoint is a directory; a vault is a file.
pub(crate) fn refuse_directories(path: &Path) -> Result<()> {
    if path.is_dir() {
        let name = path.display();
        bail!("{name} is a directory; pack it first: smoe pack {name} -o NAME.smoe");
    }
    Ok(())
}

/// What runs, where it is kept, how it is read.
pub(crate) fn banner(engine: &Engine) -> String {
    let plan = engine.plan();
    let all = engine.expert_bytes();
    let share = if all == 0 { 100.0 } else { plan.cache_bytes as f64 * 100.0 / all as f64 };
    let counters = engine.io_mode();
    let provenance = &engine.vault().header().provenance;
    let asked = match engine.options().cache {
        CacheSize::Auto => "what the budget leaves",
        CacheSize::All => "all experts",
        CacheSize::Bytes(bytes) if bytes < plan.cache_bytes => "the least that works, more than asked",
        CacheSize::Bytes(_) => "as asked",
    };
    format!(
        "{}: experts {}, dense {}, KV {}\n\
         memory: budget {} ({}): program {}, resident {}, KV {} for {} tokens, scratch {}, expert cache {} ({share:.0} % of {}, {asked})\n\
         reads: {counters} · kernels: {} on {}",
        engine.path().display(),
        provenance.expert_format,
        provenance.dense_format,
        engine.options().kv.name(),
        output::bytes(plan.budget_bytes),
        plan.budget_origin,
        output::bytes(plan.program_bytes),
        output::bytes(plan.resident_bytes),
        output::bytes(plan.kv_bytes),
        plan.context,
        output::bytes(plan.scratch_bytes),
        output::bytes(plan.cache_bytes),
        output::bytes(all),
        engine.kernels(),
        output::plural(engine.threads(), "thread"),
    )
}
