//! The `tojson` filter as Hugging Face templates expect it: Python's `json.dumps` without HTML escapes.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deepest nesting that is written.
const DEPTH_LIMIT: usize = 128;

/// Bytes of output that a unit of fuel pays for.
const BYTES_PER_FUEL: usize = 16;

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(crate) fn tojson(state: &State<'_, '_>, value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get::<Option<usize>>("indent").ok().flatten();
    let indent = indent.map(|width| width.min(64));
    let separators: Option<Value> = kwargs.get("separators")?;
    let (item, key) = match separators.filter(|value| !value.is_none()) {
        Some(pair) => (separator(&pair, 0)?, separator(&pair, 1)?),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let mut writer = Writer {
        state,
        out: String::new(),
        paid: 0,
        item,
        key,
        indent,
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    writer.value(&value, 0)?;
    Ok(Value::from(writer.out))
}

fn separator(pair: &Value, index: usize) -> Result<String, Error> {
    let value = pair.get_item_by_index(index)?;
    value
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "separators must be two strings"))
}

struct Writer<'a, 'template, 'env> {
    state: &'a State<'template, 'env>,
    out: String,
    /// Bytes of `out` that have been paid for.
    paid: usize,
    item: String,
    key: String,
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_LIMIT {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
        }
        let bytes = self.out.len() - self.paid;
        self.paid = self.out.len();
        self.state.consume_fuel(1 + (bytes / BYTES_PER_FUEL) as u64)?;
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.container('[', ']', items, depth)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let entries = keys.into_iter().map(|key| {
                    let item = value.get_item(&key).unwrap_or_default();
                    (Some(key), item)
                });
                self.container('{', '}', entries, depth)?;
            }
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: {} is no JSON", value.kind()),
                ));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        entries: impl Iterator<Item = (Option<Value>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(open);
        let mut empty = true;
        for (key, item) in entries {
            if !empty {
                let separator = std::mem::take(&mut self.item);
                self.out.push_str(&separator);
                self.item = separator;
            }
            empty = false;
            self.new_line(depth + 1);
            if let Some(key) = key {
                match key.as_str() {
                    Some(text) => self.string(text),
                    None => {
                        let text = key.to_string();
                        self.string(&text);
                    }
                }
                let separator = std::mem::take(&mut self.key);
                self.out.push_str(&separator);
                self.key = separator;
            }
            self.value(&item, depth + 1)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if u32::from(control) < 0x20 || (self.ensure_ascii && !control.is_ascii()) => {
                    for unit in control.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                other => self.out.push(other),
            }
        }
        self.out.push('"');
    }

    /// Integers as they are, floats as Python's `repr` writes them.
    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
            return;
        }
        match f64::try_from(value.clone()) {
            Ok(number) => self.out.push_str(&python_float(number)),
            Err(_) => self.out.push_str(&value.to_string()),
        }
    }
}

/// The shortest digits that give the same float, in Python's choice of notation.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{number:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_are_those_of_python() {
        for (number, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }
}
