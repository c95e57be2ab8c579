//! The `smoe` command.

mod cli;
mod commands;
mod interrupt;
mod open;
mod output;
mod sampling;
mod stats;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

/// Chat templates are programs from strangers; this holds them to their memory.
#[global_allocator]
static ALLOCATOR: smoe_text::BudgetAllocator = smoe_text::BudgetAllocator;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Pack(args) => commands::pack::run(&args),
        Command::Run(args) => commands::run::run(&args),
        Command::Chat(args) => commands::chat::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Demo(args) => commands::demo::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::failure(&error);
            ExitCode::FAILURE
        }
    }
}

/// A reader that has seen enough, such as `head`, is not an error.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}
