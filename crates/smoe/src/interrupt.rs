//! Signals. Ctrl-C: the first asks work to stop at the next good point, the second ends the process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};

/// Exit code of a process that was interrupted, as shells use it.
const INTERRUPTED: i32 = 130;

/// The flag that is set by Ctrl-C (or SIGTERM) from now on.
pub(crate) fn flag() -> Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        flag.store(false, Ordering::Relaxed);
        return Ok(Arc::clone(flag));
    }
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if set.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
    })
    .context("cannot handle Ctrl-C")?;
    Ok(Arc::clone(FLAG.get_or_init(|| flag)))
}

/// A file that grows beyond the limit of `ulimit -f` is an error like any other, and not the end of the process.
pub(crate) fn survive_file_limits() -> Result<()> {
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))
        .context("cannot handle SIGXFSZ")?;
    Ok(())
}
