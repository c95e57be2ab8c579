//! `smoe demo`: the committed checkpoint, packed and spoken to.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result, bail};
use smoe_engine::{CacheSize, EngineOptions, GenerateOptions, SamplingOptions};
use smoe_format::Vault;

use crate::cli::{DemoArgs, PackArgs};
use crate::commands::chat::{self, Conversation};
use crate::commands::pack;
use crate::{open, output};

/// What is said where nobody can type.
const TURNS: [&str; 3] = [
    "Tell me a story about a brave snail in a lighthouse.",
    "What is the moon?",
    "Give me three tips for baking bread.",
];

/// The cache holds a quarter of the experts, so that the others really come from the drive.
const CACHE_DIVISOR: u64 = 4;

pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    if !args.checkpoint.is_dir() {
        bail!(
            "{} is not there; run the demo in the folder of the sources, or name a checkpoint with --checkpoint",
            args.checkpoint.display()
        );
    }
    if let Some(folder) = args.vault.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    pack::run(&PackArgs::with_defaults(args.checkpoint.clone(), args.vault.clone()))?;

    let whole = expert_bytes(&args.vault)?;
    let options =
        EngineOptions { cache: CacheSize::Bytes(whole / CACHE_DIVISOR), ..EngineOptions::default() };
    let mut engine = open::open(&args.vault, options)?;
    output::note(&open::banner(&engine));
    let sampling = SamplingOptions::greedy();
    let options = GenerateOptions { max_tokens: 160, sampling, ignore_eos: false };
    let mut conversation = Conversation::new(None, None, options)?;
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        chat::converse(&mut engine, &mut conversation)?;
    } else {
        for turn in TURNS {
            output::line(&format!("> {turn}"))?;
            conversation.turn(&mut engine, turn)?;
        }
    }
    output::note(&conversation.session(&engine));
    Ok(())
}

/// Bytes of all expert records of a vault.
fn expert_bytes(path: &Path) -> Result<u64> {
    let vault = Vault::open(path)?;
    Ok(vault.header().expert_layers.iter().map(|layer| layer.stride * u64::from(layer.count)).sum())
}
