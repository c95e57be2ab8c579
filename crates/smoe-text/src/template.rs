//! Chat templates: Jinja programs that come with a checkpoint, run within limits.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value, json};

use crate::allocator::Budget;
use crate::error::TextError;
use crate::files::{TextFiles, invalid, object};
use crate::tojson::tojson;
use crate::tokenizer::token_roles;

/// Longest template in bytes; the longest known ones have about 40,000.
const SOURCE_LIMIT_BYTES: usize = 1 << 20;
/// Work of one rendering: a unit pays for an instruction or for 64 bytes of data, so this also bounds memory.
const FUEL: u64 = 1 << 20;
/// Deepest nesting of calls; real templates use a handful.
const DEPTH_LIMIT: usize = 100;
/// Stack of a rendering. Nested values are dropped recursively, and the fuel bounds how deep they can be; only pages that
/// are touched cost memory.
const STACK_BYTES: usize = 256 << 20;
/// Memory of one rendering, for a conversation without text and for each byte of one that has.
const MEMORY_BYTES: u64 = 128 << 20;
const MEMORY_PER_INPUT_BYTE: u64 = 128;
/// Time of one rendering; real ones take a few milliseconds.
const DEADLINE: Duration = Duration::from_secs(5);
/// How often the budget is looked at while a rendering takes long.
const TICK: Duration = Duration::from_millis(5);
const NAME: &str = "chat_template";
/// Marks an error that the template raised itself.
const RAISED: &str = "raise_exception: ";

/// A compiled chat template that has rendered a first conversation.
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: String,
    /// Special tokens' texts by role.
    roles: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    /// Compiles the template of `chat_template.jinja`, else of `tokenizer_config.json`, and tries it; none if there is none.
    ///
    /// # Errors
    /// It does not compile, fails on a plain conversation, or exceeds the limits.
    pub fn from_files(files: &TextFiles<'_>) -> Result<Option<Self>, TextError> {
        let config = object("tokenizer_config.json", files.tokenizer_config)?;
        let source = match files.chat_template {
            Some(source) => source.to_owned(),
            None => match from_config(&config)? {
                Some(source) => source,
                None => return Ok(None),
            },
        };
        if source.len() > SOURCE_LIMIT_BYTES {
            let reason = format!("has {} bytes, more than the {SOURCE_LIMIT_BYTES} allowed", source.len());
            return Err(TextError::Template(reason));
        }
        let text = source.clone();
        let environment = Arc::new(guarded(source.len() as u64, move || compile(&text))?);
        let template = Self { environment, source, roles: token_roles(&config)? };
        template.try_out()?;
        Ok(Some(template))
    }

    /// The template's source.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Renders with the given variables; special tokens are added by role.
    pub(crate) fn render(&self, mut variables: Map<String, Value>) -> Result<String, TextError> {
        for (role, text) in &self.roles {
            variables.insert((*role).to_owned(), Value::from(text.as_str()));
        }
        let mut bytes = 0;
        let mut count = |text: &str| bytes += text.len() as u64;
        variables.values().for_each(|value| count_text(value, &mut count));
        let environment = Arc::clone(&self.environment);
        guarded(bytes, move || {
            // The input is paid for once more, so that a long conversation has the work that it needs.
            let mut environment = Environment::clone(&environment);
            environment.set_fuel(Some(FUEL.saturating_add(bytes)));
            let template = environment.get_template(NAME).map_err(template_error)?;
            template
                .render(minijinja::Value::from(minijinja::value::Serde(&variables)))
                .map_err(template_error)
        })
    }

    /// A template that cannot render the simplest conversation is not usable; strict ones may insist on a system message.
    fn try_out(&self) -> Result<(), TextError> {
        let user = json!({"role": "user", "content": "Hello"});
        let system = json!({"role": "system", "content": "Be brief."});
        let attempt = |messages: Vec<Value>| {
            let mut variables = Map::new();
            variables.insert("messages".into(), Value::Array(messages));
            variables.insert("add_generation_prompt".into(), Value::Bool(true));
            self.render(variables)
        };
        match attempt(vec![user.clone()]) {
            Err(TextError::Refused(_)) => attempt(vec![system, user]).map(drop),
            other => other.map(drop),
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChatTemplate({} bytes)", self.source.len())
    }
}

/// Renders without a trial; references are compared with it.
#[doc(hidden)]
pub fn render_for_tests(source: &str, variables: Map<String, Value>) -> Result<String, TextError> {
    let environment = Arc::new(compile(source)?);
    ChatTemplate { environment, source: source.to_owned(), roles: Vec::new() }.render(variables)
}

/// `chat_template` as a string, or the one named `default` of a list.
fn from_config(config: &Map<String, Value>) -> Result<Option<String>, TextError> {
    const FILE: &str = "tokenizer_config.json";
    const EXPECTED: &str = "a template, or a list of named templates with one named default";
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(list)) => list
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template")?.as_str())
            .map(|source| Some(source.to_owned()))
            .ok_or_else(|| invalid(FILE, "chat_template", EXPECTED, &Value::Null)),
        Some(other) => Err(invalid(FILE, "chat_template", EXPECTED, other)),
    }
}

/// An environment like that of `transformers`.
fn compile(source: &str) -> Result<Environment<'static>, TextError> {
    let mut environment = Environment::new();
    let syntax =
        SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(template_error)?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_recursion_limit(DEPTH_LIMIT);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    // Python's None is not iterable.
    environment.add_test("iterable", |value: &minijinja::Value| {
        use minijinja::value::ValueKind::{Bytes, Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), String | Bytes | Seq | Iterable | Map | Undefined)
    });
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        jiff::fmt::strtime::format(&format, &jiff::ZonedDateTime::now())
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
    });
    environment.add_template_owned(NAME, without_generation_tags(source)).map_err(template_error)?;
    Ok(environment)
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which only mark a span for training.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, inside)) = rest.split_once("{%") {
        let Some((tag, after)) = inside.split_once("%}") else { break };
        let replaced = match tag.trim_matches(['-', '+']).trim() {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_owned(),
        };
        out.extend([before, "{%", &replaced, "%}"]);
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Runs on a thread of its own, with a large stack, a budget of memory and a deadline. A thread that exceeds them is left
/// behind, stopped.
fn guarded<T: Send + 'static>(
    input_bytes: u64,
    work: impl FnOnce() -> Result<T, TextError> + Send + 'static,
) -> Result<T, TextError> {
    let budget = Budget::new(MEMORY_BYTES.saturating_add(MEMORY_PER_INPUT_BYTE.saturating_mul(input_bytes)));
    let (sender, receiver) = mpsc::sync_channel(1);
    let own = Arc::clone(&budget);
    let thread = std::thread::Builder::new().name("smoe-template".into()).stack_size(STACK_BYTES);
    let started = Instant::now();
    thread
        .spawn(move || {
            let result = own.within(work);
            let _ = sender.send(result);
        })
        .map_err(|error| TextError::Template(format!("no thread could be started for it: {error}")))?;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(TextError::Template("the renderer failed".into()));
            }
            Err(RecvTimeoutError::Timeout) if budget.is_exceeded() => {
                return Err(TextError::TemplateLimit("it needs too much memory".into()));
            }
            Err(RecvTimeoutError::Timeout) if started.elapsed() > DEADLINE => {
                budget.abandon();
                return Err(TextError::TemplateLimit(format!(
                    "it takes longer than {} s",
                    DEADLINE.as_secs()
                )));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

fn template_error(error: Error) -> TextError {
    let mut cause: &dyn std::error::Error = &error;
    loop {
        if let Some(inner) = cause.downcast_ref::<Error>() {
            if inner.kind() == ErrorKind::OutOfFuel {
                return TextError::TemplateLimit(error.to_string());
            }
            if let Some(message) = inner.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
                return TextError::Refused(message.to_owned());
            }
            if inner.detail().is_some_and(|detail| detail.contains("recursion limit")) {
                return TextError::TemplateLimit(error.to_string());
            }
        }
        match cause.source() {
            Some(source) => cause = source,
            None => return TextError::Template(error.to_string()),
        }
    }
}

fn count_text(value: &Value, count: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => count(text),
        Value::Array(values) => values.iter().for_each(|value| count_text(value, count)),
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            count(key);
            count_text(value, count);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_harmless() {
        let source = "a{%- generation -%}b{% endgeneration %}c{% if x %}{% endif %}{% generation";
        let expected = "a{%- if true -%}b{% endif %}c{% if x %}{% endif %}{% generation";
        assert_eq!(without_generation_tags(source), expected);
        for odd in ["", "{%", "{%}", "{%%}", "%}{%", "{%é%}", "{%-%}{%"] {
            assert_eq!(without_generation_tags(odd), odd);
        }
    }
}
