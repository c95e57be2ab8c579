//! `smoe chat`: a conversation in the terminal.

use std::cell::Cell;
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use smoe_engine::{Engine, EngineError, FinishReason, GenerateOptions, Generation};
use smoe_text::Message;

use crate::cli::{ChatArgs, Switch};
use crate::{commands::run, interrupt, open, output, sampling, stats};

const HELP: &str = "\
/help          this list
/reset         forget the conversation
/stats         figures of the last answer and of the session
/exit          leave (also Ctrl-D)
Ctrl-C         stop the answer; at the prompt, drop the line
\\ at the end   go on in the next line
\"\"\"            begin and end a text of several lines";

/// Lines of history that are kept.
const HISTORY_LINES: usize = 1_000;

pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    let mut engine = open::open(&args.model, open::engine_options(&args.engine))?;
    output::note(&open::banner(&engine));
    let sampling = sampling::options(&args.sampling, &engine)?;
    if sampling.temperature > 0.0 {
        output::note(&format!("seed {}", sampling.seed));
    }
    let max_tokens = args.max_tokens.unwrap_or(usize::MAX);
    let options = GenerateOptions { max_tokens, sampling, ignore_eos: false };
    let mut conversation = Conversation::new(args.system.as_deref(), args.thinking, options)?;
    converse(&mut engine, &mut conversation)
}

/// The messages so far and how answers are made.
pub(crate) struct Conversation {
    system: Option<String>,
    messages: Vec<Message>,
    thinking: Option<Switch>,
    options: GenerateOptions,
    cancel: Arc<AtomicBool>,
    last: Option<(Generation, usize)>,
    answers: usize,
    answer_tokens: usize,
}

impl Conversation {
    pub(crate) fn new(
        system: Option<&str>,
        thinking: Option<Switch>,
        options: GenerateOptions,
    ) -> Result<Self> {
        // Ctrl-C while an answer is made; at the prompt the line editor handles it.
        let cancel = interrupt::flag()?;
        let mut conversation = Self {
            system: system.map(str::to_owned),
            messages: Vec::new(),
            thinking,
            options,
            cancel,
            last: None,
            answers: 0,
            answer_tokens: 0,
        };
        conversation.reset();
        Ok(conversation)
    }

    fn reset(&mut self) {
        self.messages.clear();
        self.messages.extend(self.system.as_deref().map(|system| Message::new("system", system)));
    }

    /// Answers what the user says. A turn that fails is taken back, so that the conversation can go on.
    pub(crate) fn turn(&mut self, engine: &mut Engine, text: &str) -> Result<()> {
        self.messages.push(Message::new("user", text));
        let result = self.answer(engine);
        if result.is_err() {
            self.messages.pop();
        }
        result
    }

    fn answer(&mut self, engine: &mut Engine) -> Result<()> {
        let prompt = run::encode(engine, &self.messages, self.thinking)?;
        self.cancel.store(false, Ordering::Relaxed);
        let cancel = Arc::clone(&self.cancel);
        let (generation, answer) = run::answer(engine, &prompt, &self.options, Some(&cancel), true)?;
        self.cancel.store(false, Ordering::Relaxed);
        output::line("")?;
        output::note(&stats::summary(engine, &generation, prompt.len()));
        if generation.finish_reason == FinishReason::Length && generation.token_ids.is_empty() {
            output::note("the context is full; /reset begins a new conversation");
        }
        if let Some(report) = stats::instruments(&generation.instrument) {
            output::note(&report);
        }
        self.answers += 1;
        self.answer_tokens += generation.token_ids.len();
        self.last = Some((generation, prompt.len()));
        self.messages.push(Message::new("assistant", answer));
        Ok(())
    }

    /// Figures of the last answer and of the session.
    pub(crate) fn statistics(&self, engine: &Engine) -> String {
        let mut text = String::new();
        if let Some((generation, prompt)) = &self.last {
            text.push_str(&stats::summary(engine, generation, *prompt));
            text.push('\n');
        }
        text.push_str(&self.session(engine));
        text
    }

    /// Figures of the session.
    pub(crate) fn session(&self, engine: &Engine) -> String {
        stats::session(engine, self.answers, self.answer_tokens)
    }
}

/// Reads turns until the end of input; from the line editor on a terminal, line by line otherwise.
pub(crate) fn converse(engine: &mut Engine, conversation: &mut Conversation) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        let lines = std::io::stdin().lock().lines();
        return read_turns(
            engine,
            conversation,
            &mut lines.map(|line| Ok(Input::Line(line?))),
            &Cell::new(false),
        );
    }
    output::note("/help lists the commands; Ctrl-D ends the conversation");
    let config = Config::builder().max_history_size(HISTORY_LINES)?.auto_add_history(true).build();
    let mut editor = DefaultEditor::with_config(config)?;
    let history = history_file();
    if let Some(path) = &history {
        // A first run has no history.
        let _ = editor.load_history(path);
    }
    let continued = Cell::new(false);
    let mut lines =
        std::iter::from_fn(|| match editor.readline(if continued.get() { "… " } else { "> " }) {
            Ok(line) => Some(Ok(Input::Line(line))),
            Err(ReadlineError::Interrupted) => Some(Ok(Input::Dropped)),
            Err(ReadlineError::Eof) => None,
            Err(error) => Some(Err(error.into())),
        });
    let result = read_turns(engine, conversation, &mut lines, &continued);
    if let Some(path) = &history {
        if let Some(folder) = path.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        if let Err(error) = editor.save_history(path) {
            output::note(&format!("{}: the history was not saved: {error}", path.display()));
        }
    }
    result
}

/// What came from the terminal.
enum Input {
    Line(String),
    /// Ctrl-C: what was typed so far is dropped.
    Dropped,
}

/// Joins lines to turns and handles commands, until the input ends. `continued` tells whether more lines are expected.
fn read_turns(
    engine: &mut Engine,
    conversation: &mut Conversation,
    lines: &mut dyn Iterator<Item = Result<Input>>,
    continued: &Cell<bool>,
) -> Result<()> {
    let mut pending = String::new();
    let mut quoted = false;
    for line in lines {
        let text = match line? {
            Input::Line(line) => joined(&mut pending, &mut quoted, &line),
            Input::Dropped => {
                pending.clear();
                quoted = false;
                None
            }
        };
        continued.set(quoted || !pending.is_empty());
        let Some(text) = text else { continue };
        if text.starts_with('/') {
            if command(engine, conversation, text.trim())? == Next::Leave {
                return Ok(());
            }
        } else if !text.trim().is_empty()
            && let Err(error) = conversation.turn(engine, &text)
        {
            // A closed stdout ends the session; anything else is this turn's failure only.
            if error.downcast_ref::<std::io::Error>().is_some() {
                return Err(error);
            }
            output::failure(&error);
            if matches!(error.downcast_ref(), Some(EngineError::ContextExceeded { .. })) {
                output::note("/reset begins a new conversation");
            }
        }
    }
    if !pending.trim().is_empty() {
        conversation.turn(engine, pending.trim_end())?;
    }
    Ok(())
}

/// Adds a line; returns the whole text once it is complete.
fn joined(pending: &mut String, quoted: &mut bool, line: &str) -> Option<String> {
    const QUOTES: &str = "\"\"\"";
    if *quoted {
        if let Some(last) = line.trim_end().strip_suffix(QUOTES) {
            *quoted = false;
            pending.push_str(last);
            return Some(std::mem::take(pending));
        }
        pending.push_str(line);
        pending.push('\n');
        return None;
    }
    if let Some(rest) = line.strip_prefix(QUOTES).filter(|_| pending.is_empty()) {
        if let Some(inner) = rest.strip_suffix(QUOTES) {
            return Some(inner.to_owned());
        }
        *quoted = true;
        if !rest.is_empty() {
            pending.push_str(rest);
            pending.push('\n');
        }
        return None;
    }
    if let Some(start) = line.strip_suffix('\\') {
        pending.push_str(start);
        pending.push('\n');
        return None;
    }
    pending.push_str(line);
    Some(std::mem::take(pending))
}

/// What a command leads to.
#[derive(PartialEq, Eq)]
enum Next {
    Stay,
    Leave,
}

/// Carries a command out.
fn command(engine: &mut Engine, conversation: &mut Conversation, text: &str) -> Result<Next> {
    match text {
        "/help" | "/?" => output::note(HELP),
        "/reset" => {
            conversation.reset();
            engine.reset();
            output::note("the conversation begins anew");
        }
        "/stats" => output::note(&conversation.statistics(engine)),
        "/exit" | "/quit" | "/bye" => return Ok(Next::Leave),
        other => output::note(&format!("unknown command {other}; /help lists them")),
    }
    Ok(Next::Stay)
}

/// Where the history is kept: the platform's place for state.
fn history_file() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let state = std::env::var_os("XDG_STATE_HOME")
        .map(PathBuf::from)
        .or(home.map(|home| home.join(".local/state")))?;
    Some(state.join("smoe").join("history"))
}

#[cfg(test)]
mod tests {
    use super::joined;

    fn texts(lines: &[&str]) -> (Vec<String>, String) {
        let (mut pending, mut quoted) = (String::new(), false);
        let texts = lines.iter().filter_map(|line| joined(&mut pending, &mut quoted, line)).collect();
        (texts, pending)
    }

    #[test]
    fn each_line_is_a_turn() {
        assert_eq!(texts(&["a", "b"]).0, ["a", "b"]);
    }

    #[test]
    fn a_backslash_goes_on() {
        assert_eq!(texts(&["a\\", "b", "c"]).0, ["a\nb", "c"]);
    }

    #[test]
    fn quotes_hold_several_lines() {
        assert_eq!(texts(&["\"\"\"", "a", "", "b\\", "c\"\"\"", "d"]).0, ["a\n\nb\\\nc", "d"]);
        assert_eq!(texts(&["\"\"\"one\"\"\""]).0, ["one"]);
    }

    #[test]
    fn what_is_not_finished_is_kept() {
        assert_eq!(texts(&["\"\"\"a", "b"]).1, "a\nb\n");
    }
}
