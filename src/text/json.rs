//! JSON as the chat format needs it: keys in the order written, integers of any size, and numbers and
//! separators spelled as Python's `json.dumps(…, ensure_ascii=False)` spells them, since those characters
//! become tokens of the prompt.

use crate::{Error, Result};

/// Deeper nesting is refused rather than risking the stack.
const MAX_DEPTH: usize = 128;

/// A JSON value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, already in the spelling that it is written with.
    Number(String),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object: its keys in order, each once.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads one JSON text. A key given twice has its last value, at its first place.
    ///
    /// # Errors
    /// `Usage`, with the byte offset: anything that is not JSON, or nesting beyond 128 levels.
    pub fn parse(text: &str) -> Result<Json> {
        let mut reader = Reader { text, at: 0 };
        let value = reader.value(0)?;
        reader.space();
        match reader.peek() {
            None => Ok(value),
            Some(_) => Err(reader.wrong("the end")),
        }
    }

    /// The value of `key` in an object; `None` for `null`, for a missing key and for anything but an object.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let Json::Object(entries) = self else { return None };
        entries.iter().find(|(k, _)| k == key).map(|(_, v)| v).filter(|v| **v != Json::Null)
    }

    /// The string, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::String(s) => Some(s),
            _ => None,
        }
    }

    /// What kind of value it is, in JSON Schema's words.
    pub fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "boolean",
            Json::Number(_) => "number",
            Json::String(_) => "string",
            Json::Array(_) => "array",
            Json::Object(_) => "object",
        }
    }

    /// The same value with the keys of every object in order of their code points.
    pub fn sorted(&self) -> Json {
        match self {
            Json::Array(items) => Json::Array(items.iter().map(Json::sorted).collect()),
            Json::Object(entries) => {
                let mut entries: Vec<_> = entries.iter().map(|(k, v)| (k.clone(), v.sorted())).collect();
                entries.sort_by(|a, b| a.0.cmp(&b.0));
                Json::Object(entries)
            }
            other => other.clone(),
        }
    }

    /// Written without spaces.
    pub fn compact(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, ",", ":");
        out
    }

    /// Written with a space after each comma and colon.
    pub fn spaced(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, ", ", ": ");
        out
    }

    fn write(&self, out: &mut String, comma: &str, colon: &str) {
        match self {
            Json::Null => out.push_str("null"),
            Json::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Json::Number(n) => out.push_str(n),
            Json::String(s) => write_string(s, out),
            Json::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i > 0 { comma } else { "" });
                    item.write(out, comma, colon);
                }
                out.push(']');
            }
            Json::Object(entries) => {
                out.push('{');
                for (i, (key, value)) in entries.iter().enumerate() {
                    out.push_str(if i > 0 { comma } else { "" });
                    write_string(key, out);
                    out.push_str(colon);
                    value.write(out, comma, colon);
                }
                out.push('}');
            }
        }
    }
}

fn write_string(s: &str, out: &mut String) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{C}' => out.push_str("\\f"),
            '\0'..='\u{1F}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            _ => out.push(c),
        }
    }
    out.push('"');
}

/// Sets `key` as a Python dict does: a new key at the end, a known one where it is.
pub(super) fn set(entries: &mut Vec<(String, Json)>, key: String, value: Json) {
    match entries.iter_mut().find(|(k, _)| *k == key) {
        Some((_, slot)) => *slot = value,
        None => entries.push((key, value)),
    }
}

struct Reader<'a> {
    text: &'a str,
    /// Byte offset of what is read next.
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn wrong(&self, expected: &str) -> Error {
        let found = match self.text.get(self.at..).and_then(|rest| rest.chars().next()) {
            Some(c) => format!("{c:?}"),
            None => "the end".to_owned(),
        };
        Error::usage("not valid JSON").expected(expected, format_args!("{found} at byte {}", self.at))
    }

    fn literal(&mut self, word: &str, value: Json) -> Result<Json> {
        if !self.text.get(self.at..).is_some_and(|rest| rest.starts_with(word)) {
            return Err(self.wrong("a value"));
        }
        self.at += word.len();
        Ok(value)
    }

    fn value(&mut self, depth: usize) -> Result<Json> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("at most 128 levels of nesting"));
        }
        self.space();
        match self.peek() {
            Some(b'n') => self.literal("null", Json::Null),
            Some(b't') => self.literal("true", Json::Bool(true)),
            Some(b'f') => self.literal("false", Json::Bool(false)),
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b'[') => {
                let mut items = Vec::new();
                self.sequence(b']', "`,` or `]`", |reader| {
                    items.push(reader.value(depth + 1)?);
                    Ok(())
                })?;
                Ok(Json::Array(items))
            }
            Some(b'{') => {
                let mut entries = Vec::new();
                // Where each key stands, so that an object of many keys stays linear.
                let mut places = std::collections::HashMap::new();
                self.sequence(b'}', "`,` or `}`", |reader| {
                    if reader.peek() != Some(b'"') {
                        return Err(reader.wrong("a key"));
                    }
                    let key = reader.string()?;
                    reader.space();
                    if reader.peek() != Some(b':') {
                        return Err(reader.wrong("`:`"));
                    }
                    reader.at += 1;
                    let value = reader.value(depth + 1)?;
                    let place = *places.entry(key.clone()).or_insert(entries.len());
                    match entries.get_mut(place) {
                        Some((_, slot)) => *slot = value,
                        None => entries.push((key, value)),
                    }
                    Ok(())
                })?;
                Ok(Json::Object(entries))
            }
            _ => Err(self.wrong("a value")),
        }
    }

    /// From the opening bracket through the closing one, `item` for each element.
    fn sequence(
        &mut self,
        close: u8,
        expected: &str,
        mut item: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.at += 1;
        self.space();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.space();
            item(self)?;
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b) if b == close => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(self.wrong(expected)),
            }
        }
    }

    /// From the opening quote through the closing one.
    fn string(&mut self) -> Result<String> {
        let start = self.at;
        let bytes = self.text.as_bytes();
        let mut end = start + 1;
        loop {
            match bytes.get(end) {
                Some(b'"') => break,
                Some(b'\\') => end += 2,
                Some(_) => end += 1,
                None => {
                    self.at = bytes.len();
                    return Err(self.wrong("`\"`"));
                }
            }
        }
        // Escapes, surrogates and control characters are judged by the JSON crate.
        let quoted = self.text.get(start..=end).unwrap_or_default();
        let string = serde_json::from_str(quoted).map_err(|_| self.wrong("a well-formed string"))?;
        self.at = end + 1;
        Ok(string)
    }

    fn digits(&mut self) -> Result<()> {
        if !matches!(self.peek(), Some(b'0'..=b'9')) {
            return Err(self.wrong("a digit"));
        }
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        Ok(())
    }

    fn number(&mut self) -> Result<Json> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        // A leading zero stands alone.
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        let mut whole = true;
        if self.peek() == Some(b'.') {
            whole = false;
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            whole = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        let text = self.text.get(start..self.at).unwrap_or_default();
        let spelled = match (whole, text) {
            (true, "-0") => "0".to_owned(),
            (true, _) => text.to_owned(),
            (false, _) => text.parse().map(python_float).map_err(|_| self.wrong("a number"))?,
        };
        Ok(Json::Number(spelled))
    }
}

/// The shortest decimal that reads back as `x`, laid out as Python's `repr` does: an exponent of two digits
/// at least below 1e-4 and from 1e16 on, else a point with a digit after it.
fn python_float(x: f64) -> String {
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(e) if !(-4..16).contains(&e) && x != 0.0 => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs())
        }
        _ => format!("{x:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_are_spelled_as_python_spells_them() {
        for (text, spelled) in [
            ("5", "5"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("0.0", "0.0"),
            ("1.0", "1.0"),
            ("1.50", "1.5"),
            ("1e5", "100000.0"),
            ("1E+15", "1000000000000000.0"),
            ("123456789012345678", "123456789012345678"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("1e16", "1e+16"),
            ("12345678901234567890.0", "1.2345678901234567e+19"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("-1.5e-7", "-1.5e-07"),
            ("1e300", "1e+300"),
            ("2.5e-300", "2.5e-300"),
            ("0.1", "0.1"),
            ("1e999", "Infinity"),
            ("-1e999", "-Infinity"),
        ] {
            assert_eq!(Json::parse(text).unwrap().compact(), spelled, "{text}");
        }
    }

    #[test]
    fn order_and_separators_are_kept() {
        let json =
            Json::parse(r#" {"b": [1, {"é": null}], "a":{}, "b": [true,"\u00e9\ud83d\ude80\n"]} "#).unwrap();
        assert_eq!(json.compact(), r#"{"b":[true,"é🚀\n"],"a":{}}"#);
        assert_eq!(json.spaced(), r#"{"b": [true, "é🚀\n"], "a": {}}"#);
        assert_eq!(json.sorted().compact(), r#"{"a":{},"b":[true,"é🚀\n"]}"#);
        assert_eq!(
            Json::String("\u{0}\u{8}\u{c}\r\t\u{1f}\u{7f}/\u{2028}".into()).compact(),
            "\"\\u0000\\b\\f\\r\\t\\u001f\u{7f}/\u{2028}\""
        );
    }

    #[test]
    fn what_is_not_json_is_refused_with_its_place() {
        for (text, expected) in [
            ("", "expected a value, found the end at byte 0"),
            ("{\"a\": 1", "expected `,` or `}`, found the end at byte 7"),
            ("[1,]", "expected a value, found ']' at byte 3"),
            ("{\"a\" 1}", "expected `:`, found '1' at byte 5"),
            ("{a: 1}", "expected a key, found 'a' at byte 1"),
            ("12abc", "expected the end, found 'a' at byte 2"),
            ("01", "expected the end, found '1' at byte 1"),
            ("\"ab", "expected `\"`, found the end at byte 3"),
            ("\"\\", "expected `\"`, found the end at byte 2"),
            ("\"\\x\"", "expected a well-formed string, found '\"' at byte 0"),
            ("nul", "expected a value, found 'n' at byte 0"),
            ("-", "expected a digit, found the end at byte 1"),
        ] {
            let e = Json::parse(text).expect_err(text).to_string();
            assert!(e.ends_with(expected), "{text}: {e}");
        }
        assert!(Json::parse(&"[".repeat(1_000_000)).is_err());
        assert!(Json::parse(&format!("{}{}", "[".repeat(100), "]".repeat(100))).is_ok());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_json_crate_agrees(text in "[\\[\\]{}:,\"\\\\a-e0-9.\\-+ eE\\ntrufalsn]{0,24}") {
            match (Json::parse(&text), serde_json::from_str::<serde_json::Value>(&text)) {
                (Ok(ours), Ok(theirs)) => {
                    let again: serde_json::Value = serde_json::from_str(&ours.compact()).unwrap();
                    prop_assert_eq!(again, theirs);
                }
                (Err(_), Err(_)) => {}
                // Only a number too large for a float may be judged otherwise.
                (ours, theirs) => prop_assert!(
                    theirs.is_err_and(|e| e.to_string().contains("out of range")) && ours.is_ok(),
                    "{}", text
                ),
            }
        }
    }
}
