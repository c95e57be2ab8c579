//! The command line: names, defaults and help. Values are checked here, so that a bad one is bad usage (exit code 2).

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use smoe_engine::CacheSize;
use smoe_model::KvFormat;
use smoe_quant::BlockFormat;
use smoe_stream::{IoChoice, parse_size};

/// Runs Mixture-of-Experts language models many times larger than the machine's memory.
#[derive(Debug, Parser)]
#[command(name = "smoe", version, max_term_width = 110, arg_required_else_help = true)]
#[command(after_help = "Examples:
  smoe pack Qwen3-30B-A3B -o qwen3-30b.smoe        pack a checkpoint directory into a vault
  smoe run qwen3-30b.smoe -p 'What is the moon?'   one answer
  smoe chat qwen3-30b.smoe --memory 12G            a conversation within 12 GiB
  smoe inspect qwen3-30b.smoe                      what a vault holds

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 bad usage.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Pack a checkpoint directory into a vault
    Pack(PackArgs),
    /// Answer one prompt
    Run(RunArgs),
    /// Hold a conversation in the terminal
    Chat(ChatArgs),
    /// Show what a vault holds
    Inspect(InspectArgs),
    /// Check every checksum of a vault
    Verify(VerifyArgs),
    /// Measure how well a model predicts given answers
    Eval(EvalArgs),
    /// Pack the small model that comes with the sources and talk to it
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  smoe pack Qwen3-30B-A3B -o qwen3-30b.smoe
  smoe pack Qwen3-30B-A3B -o exact.smoe --experts BF16 --dense BF16
  smoe pack Qwen3-30B-A3B -o qwen3-30b.smoe --dry-run

An interrupted pack resumes when the same command is given again.")]
pub(crate) struct PackArgs {
    /// Checkpoint directory: config.json, tokenizer.json and *.safetensors
    pub(crate) checkpoint: PathBuf,
    /// The vault to write
    #[arg(short, long, value_name = "FILE.smoe")]
    pub(crate) output: PathBuf,
    /// Format of the experts' weights: F32, F16, BF16, Q8_0, Q4_0
    #[arg(long, value_name = "FORMAT", default_value = "Q4_0", value_parser = format)]
    pub(crate) experts: BlockFormat,
    /// Format of the other matrices (norms and router gates stay as they are)
    #[arg(long, value_name = "FORMAT", default_value = "Q8_0", value_parser = format)]
    pub(crate) dense: BlockFormat,
    /// Alignment of sections and expert records in bytes: 4096, or 16384 for Apple silicon
    #[arg(long, value_name = "BYTES", default_value_t = 4096, value_parser = alignment)]
    pub(crate) alignment: u64,
    /// Threads that convert; default: the processors that this process may use
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Print the plan (sizes, formats, time, free disk) and stop
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Report the error that each format makes (RMSE, SNR)
    #[arg(long)]
    pub(crate) measure_error: bool,
    /// Replace an existing vault
    #[arg(long)]
    pub(crate) force: bool,
    /// A key of config.json that is unknown to smoe and known to be harmless; may be given several times
    #[arg(long, value_name = "KEY")]
    pub(crate) ignore_key: Vec<String>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of every command that runs a model.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Threads that compute; default: the processors that this process may use
    #[arg(long, value_name = "N", value_parser = threads, help_heading = "Machine")]
    pub(crate) threads: Option<usize>,
    /// Expert cache: a size, auto (what the budget leaves) or all (every expert)
    #[arg(long, value_name = "SIZE|auto|all", default_value = "auto", value_parser = cache, help_heading = "Machine")]
    pub(crate) cache: CacheSize,
    /// Budget for everything, such as 8G; default: what the machine has to spare
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Machine")]
    pub(crate) memory: Option<u64>,
    /// Context in tokens; default: the model's own, at most 8192
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Machine")]
    pub(crate) ctx: Option<usize>,
    /// Precision of the KV cache
    #[arg(long, value_enum, default_value_t = Kv::F16, help_heading = "Machine")]
    pub(crate) kv: Kv,
    /// How experts are read: auto tries direct reads first, buffered goes through the page cache
    #[arg(long, value_enum, default_value_t = Io::Auto, help_heading = "Machine")]
    pub(crate) io: Io,
    /// Largest number of prompt tokens that are computed together; default: by the budget
    #[arg(long, value_name = "N", value_parser = chunk, help_heading = "Machine")]
    pub(crate) chunk: Option<usize>,
    /// Measure where the time goes and how close the run is to the machine's limits
    #[arg(long, help_heading = "Machine")]
    pub(crate) instrument: bool,
}

/// How tokens are chosen; what is not given comes from the model's generation_config.json.
#[derive(Debug, Clone, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token
    #[arg(long, value_name = "T", value_parser = in_range::<0, 100>, help_heading = "Sampling")]
    pub(crate) temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    pub(crate) top_k: Option<usize>,
    /// Keep the likeliest tokens whose probabilities add up to P
    #[arg(long, value_name = "P", value_parser = probability, help_heading = "Sampling")]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", value_parser = in_range::<0, 1>, help_heading = "Sampling")]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of tokens that occurred already by R; 1 changes nothing
    #[arg(long, value_name = "R", value_parser = penalty, help_heading = "Sampling")]
    pub(crate) repetition_penalty: Option<f32>,
    /// The same seed gives the same answer; default: a new one, shown on stderr
    #[arg(long, value_name = "S", help_heading = "Sampling")]
    pub(crate) seed: Option<u64>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  smoe run model.smoe -p 'Tell me a story.' -n 200
  smoe run model.smoe -p 'Once upon a time' --raw --temperature 0
  smoe run model.smoe --prompt-ids 6142,314,274 --json --instrument
  echo 'Summarize: …' | smoe run model.smoe -p -")]
#[command(group = clap::ArgGroup::new("input").required(true).args(["prompt", "prompt_ids"]))]
pub(crate) struct RunArgs {
    /// The vault
    pub(crate) model: PathBuf,
    /// What the user says; - reads it from standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids, used as they are
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', num_args = 1)]
    pub(crate) prompt_ids: Option<Vec<u32>>,
    /// What the system message says
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["prompt_ids", "raw"])]
    pub(crate) system: Option<String>,
    /// Tokens to generate at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// Continue the text itself, without the chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Treat end-of-turn tokens as any other
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Let the model think first, or not; default: as its chat template does
    #[arg(long, value_enum)]
    pub(crate) thinking: Option<Switch>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: ModelArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  smoe chat model.smoe
  smoe chat model.smoe --memory 12G --kv q8 --ctx 16384 --system 'You are terse.'

Inside: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the conversation.")]
pub(crate) struct ChatArgs {
    /// The vault
    pub(crate) model: PathBuf,
    /// What the system message says
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Tokens of an answer at most; default: until the context is full
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) max_tokens: Option<usize>,
    /// Let the model think first, or not; default: as its chat template does
    #[arg(long, value_enum)]
    pub(crate) thinking: Option<Switch>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: ModelArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  smoe inspect model.smoe
  smoe inspect model.smoe --json | jq .formats")]
pub(crate) struct InspectArgs {
    /// The vault
    pub(crate) model: PathBuf,
    /// List every resident tensor
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  smoe verify model.smoe")]
pub(crate) struct VerifyArgs {
    /// The vault
    pub(crate) model: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  smoe eval model.smoe --data heldout.jsonl --limit 100
  smoe eval small.smoe --data heldout.jsonl --against exact.smoe --json

Each line of the data is an object with the texts `user` and `assistant`. The assistant's text and its end-of-turn
token are scored, given the prompt as the chat template renders it; rows are cut at the context length.")]
pub(crate) struct EvalArgs {
    /// The vault
    pub(crate) model: PathBuf,
    /// Conversations, one JSON object a line
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) data: PathBuf,
    /// Rows to read at most
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) limit: Option<usize>,
    /// Another vault of the same model to compare the distributions with
    #[arg(long, value_name = "FILE.smoe")]
    pub(crate) against: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: ModelArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Checkpoint directory
    #[arg(long, value_name = "DIR", default_value = "models/pebble-22m")]
    pub(crate) checkpoint: PathBuf,
    /// Where the vault is written
    #[arg(long, value_name = "FILE.smoe", default_value = "target/demo/pebble-22m.smoe")]
    pub(crate) vault: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kv {
    F32,
    F16,
    Q8,
}

impl From<Kv> for KvFormat {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::F32 => Self::F32,
            Kv::F16 => Self::F16,
            Kv::Q8 => Self::Q8,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Io {
    Auto,
    Pread,
    Buffered,
}

impl From<Io> for IoChoice {
    fn from(io: Io) -> Self {
        match io {
            Io::Auto => Self::Auto,
            Io::Pread => Self::Pread,
            Io::Buffered => Self::Buffered,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// Most threads that are started; more never helps and a slip of the finger should not start a million.
const THREADS_LIMIT: usize = 1024;
/// Longest chunk: its buffers grow with it.
const CHUNK_LIMIT: usize = 1 << 16;

fn format(text: &str) -> Result<BlockFormat, String> {
    BlockFormat::from_name(text).ok_or_else(|| {
        let names: Vec<_> = BlockFormat::ALL.iter().map(|format| format.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn alignment(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(bytes @ (4096 | 16384)) => Ok(bytes),
        _ => Err("expected 4096 or 16384".into()),
    }
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

fn cache(text: &str) -> Result<CacheSize, String> {
    match text {
        "auto" => Ok(CacheSize::Auto),
        "all" => Ok(CacheSize::All),
        _ => size(text).map(CacheSize::Bytes),
    }
}

fn bounded(text: &str, limit: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=limit).contains(&number) => Ok(number),
        _ => Err(format!("expected a whole number from 1 to {limit}")),
    }
}

fn threads(text: &str) -> Result<usize, String> {
    bounded(text, THREADS_LIMIT)
}

fn chunk(text: &str) -> Result<usize, String> {
    bounded(text, CHUNK_LIMIT)
}

fn positive(text: &str) -> Result<usize, String> {
    bounded(text, u32::MAX as usize)
}

fn in_range<const LOW: u8, const HIGH: u8>(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (f32::from(LOW)..=f32::from(HIGH)).contains(&number) => Ok(number),
        _ => Err(format!("expected a number from {LOW} to {HIGH}")),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number > 0.0 && number <= 1.0 => Ok(number),
        _ => Err("expected a number above 0, up to 1".into()),
    }
}

fn penalty(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (0.01..=100.0).contains(&number) => Ok(number),
        _ => Err("expected a number from 0.01 to 100".into()),
    }
}
