//! Writing to the terminal in one voice: results on stdout, everything else on stderr.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// A failure with its causes, each said once: many errors quote their cause already.
pub(crate) fn failure(error: &anyhow::Error) {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    // Nothing can be done about a closed stderr.
    let _ = writeln!(io::stderr(), "smoe: error: {message}");
}

/// Something worth knowing that is no result.
pub(crate) fn note(message: &str) {
    let _ = writeln!(io::stderr(), "{message}");
}

/// One line of a result.
pub(crate) fn line(text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// A piece of streamed text, shown at once.
pub(crate) fn piece(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// One JSON object as a result.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    line(&text)?;
    Ok(())
}

/// A progress bar over bytes with rate and time left; plain lines where stderr is no terminal.
pub(crate) fn byte_progress(label: &'static str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(8));
    let style = ProgressStyle::with_template(
        "{prefix} {wide_bar:.cyan/blue} {bytes}/{total_bytes} {binary_bytes_per_sec}, {eta} left",
    );
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(label);
    if io::stderr().is_terminal() {
        bar.enable_steady_tick(Duration::from_millis(200));
    }
    bar
}

/// Bytes as people read them.
pub(crate) fn bytes(count: u64) -> String {
    smoe_stream::format_size(count)
}

/// A large number as people read it.
pub(crate) fn count(number: u64) -> String {
    const UNITS: [(&str, f64); 4] = [("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)];
    let value = number as f64;
    match UNITS.iter().find(|(_, scale)| value >= *scale) {
        Some((unit, scale)) => format!("{:.1} {unit}", value / scale),
        None => number.to_string(),
    }
}

/// A count of things, in the singular where there is one.
pub(crate) fn plural(count: usize, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

/// A duration in the units that fit it.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match time.as_secs() {
        0..10 => format!("{seconds:.1} s"),
        10..120 => format!("{seconds:.0} s"),
        120..7200 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// A table of text columns; the first is aligned to the left, the others to the right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let padding = " ".repeat(width - cell.chars().count());
            match column {
                0 => text.push_str(&format!("  {cell}{padding}")),
                _ => text.push_str(&format!("  {padding}{cell}")),
            }
        }
        while text.ends_with(' ') {
            text.pop();
        }
        text.push('\n');
    }
    text
}
