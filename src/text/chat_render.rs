//! K3's chat format: a conversation as the segments of a prompt.
//!
//! A tag is `<|open|>name key="value"<|sep|>` or `<|close|>name<|sep|>`, where only the three markers and
//! `<|end_of_msg|>` are special. What a user wrote goes into segments of its own with specials off, so a
//! marker in it stays text; attribute values are escaped.

use super::chat::{Arguments, Chat, Message, Part, ResponseFormat, ToolCall, ToolChoice};
use super::json::Json;
use super::tokenizer::{Segment, is_space};
use crate::{Error, Result};

pub(super) const OPEN: &str = "<|open|>";
pub(super) const CLOSE: &str = "<|close|>";
pub(super) const SEP: &str = "<|sep|>";
pub(super) const END_OF_MSG: &str = "<|end_of_msg|>";

impl Chat {
    /// The segments of the prompt. `images` are the prompt texts of the images in order, one for each
    /// [`Part::Image`].
    ///
    /// # Errors
    /// `Usage`: more or fewer images than their places, a tool result whose tool is not known.
    pub fn render(&self, images: &[String]) -> Result<Vec<Segment>> {
        let mut out = Renderer { segments: Vec::new(), images: images.iter() };
        if let Some(tools) = &self.tools {
            let json = tools.sorted().compact();
            out.system(
                "tool-declare",
                format!(
                    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{json}\n```"
                ),
            );
        }
        if let Some(effort) = self.options.effort.filter(|_| self.options.thinking) {
            out.system(
                "thinking-effort",
                format!(
                    "`thinking_effort` guides on how much to think in your thinking channel (not including \
                     the response channel), supported values include `low`, `medium`, `high`, and `max`.\n\
                     Now the system is invoked with `thinking_effort={}`.",
                    effort.as_str()
                ),
            );
        }
        out.messages(&in_call_order(&self.messages), self.options.thinking)?;
        match self.options.tool_choice {
            ToolChoice::Auto => {}
            ToolChoice::Required => out.system(
                "tool-choice",
                "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
                    .to_owned(),
            ),
            ToolChoice::None => out.system(
                "tool-choice",
                "The system is invoked with `tool_choice=none`.\n\
                 You MUST NOT call any tools in the next message."
                    .to_owned(),
            ),
        }
        out.response_format(&self.options.response_format);
        if self.options.generation_prompt {
            out.open("message", &[("role", "assistant")]);
            out.open(if self.options.thinking { "think" } else { "response" }, &[]);
        }
        match out.images.len() {
            0 => Ok(out.segments),
            left => Err(Error::usage("there are images that no message shows")
                .expected(format_args!("{} images", images.len() - left), images.len())),
        }
    }
}

/// The messages with each run of tool results in the order of the calls that it answers, each named after
/// its call; a run with a result that answers none of the last assistant's calls stays as it is.
fn in_call_order(messages: &[Message]) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    let mut calls: &[ToolCall] = &[];
    for run in messages.chunk_by(|a, b| a.role == "tool" && b.role == "tool") {
        let answered = |m: &Message| {
            let id = m.tool_call_id.as_deref()?;
            calls.iter().position(|call| call.id.as_deref() == Some(id))
        };
        let places: Option<Vec<usize>> = run.iter().map(answered).collect();
        match (run, places) {
            ([first, ..], Some(places)) if first.role == "tool" => {
                let mut placed: Vec<(usize, &Message)> = places.into_iter().zip(run).collect();
                placed.sort_by_key(|(place, _)| *place);
                out.extend(placed.into_iter().map(|(place, m)| Message {
                    name: calls.get(place).map(|call| call.name.clone()),
                    ..m.clone()
                }));
            }
            _ => out.extend_from_slice(run),
        }
        if let Some(last) = run.last().filter(|m| m.role == "assistant") {
            calls = &last.tool_calls;
        }
    }
    out
}

struct Renderer<'a> {
    segments: Vec<Segment>,
    /// Images not placed yet.
    images: std::slice::Iter<'a, String>,
}

impl Renderer<'_> {
    fn marker(&mut self, marker: &str) {
        self.segments.push(Segment { text: marker.to_owned(), special: true });
    }

    fn text(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !text.is_empty() {
            self.segments.push(Segment { text, special: false });
        }
    }

    fn open(&mut self, tag: &str, attributes: &[(&str, &str)]) {
        self.marker(OPEN);
        self.text(tag);
        for (key, value) in attributes {
            self.text(format!(" {key}"));
            self.text("=\"");
            self.text(value.replace('&', "&amp;").replace('"', "&quot;"));
            self.text("\"");
        }
        self.marker(SEP);
    }

    fn close(&mut self, tag: &str) {
        self.marker(CLOSE);
        self.text(tag);
        self.marker(SEP);
    }

    fn end_message(&mut self) {
        self.close("message");
        self.marker(END_OF_MSG);
    }

    fn system(&mut self, kind: &str, body: String) {
        self.open("message", &[("role", "system"), ("type", kind)]);
        self.text(body);
        self.end_message();
    }

    fn messages(&mut self, messages: &[Message], thinking: bool) -> Result<()> {
        // Results are counted, and named if they are not, within their assistant's turn.
        let (mut calls, mut results): (&[ToolCall], usize) = (&[], 0);
        for message in messages {
            let role = message.role.as_str();
            match role {
                "system" if message.tools.is_some() => {
                    let json = message.tools.as_ref().map(|t| t.sorted().compact()).unwrap_or_default();
                    self.system(
                        "tool-declare",
                        format!(
                            "## New Tools Available\n\
                             The system dynamically extends the toolset via lazy-loading.\n\
                             You have access to all existing and extended tools.\n\
                             Here are the specs for the extended tools.\n\n```json\n{json}\n```"
                        ),
                    );
                    continue;
                }
                "system" | "user" | "assistant" => {
                    let name = message.name.as_deref().map(|name| ("name", name));
                    let attributes: Vec<_> = std::iter::once(("role", role)).chain(name).collect();
                    self.open("message", &attributes);
                }
                "tool" => {
                    results += 1;
                    let called = || calls.get(results - 1).map(|call| call.name.as_str());
                    let tool = message.name.as_deref().or_else(called).ok_or_else(|| {
                        Error::usage("a tool result does not say which tool it is of").expected(
                            "a name, or a call before it",
                            format_args!("result {results} of its turn"),
                        )
                    })?;
                    let index = results.to_string();
                    self.open("message", &[("role", role), ("tool", tool), ("index", &index)]);
                }
                _ => continue,
            }
            if role == "assistant" {
                (calls, results) = (&message.tool_calls, 0);
                self.assistant(message, thinking)?;
            } else {
                self.content(&message.content)?;
            }
            self.end_message();
        }
        Ok(())
    }

    fn assistant(&mut self, message: &Message, thinking: bool) -> Result<()> {
        if thinking {
            self.open("think", &[]);
            if !message.reasoning.chars().all(is_space) {
                self.text(message.reasoning.as_str());
            }
            self.close("think");
        }
        self.open("response", &[]);
        self.content(&message.content)?;
        self.close("response");
        if message.tool_calls.is_empty() {
            return Ok(());
        }
        self.open("tools", &[]);
        for (call, index) in message.tool_calls.iter().zip(1..) {
            self.open("call", &[("tool", &call.name), ("index", &index.to_string())]);
            match &call.arguments {
                Arguments::Raw(text) => {
                    self.open("json", &[("type", "object")]);
                    self.text(text.as_str());
                    self.close("json");
                }
                Arguments::Named(entries) => {
                    for (key, value) in entries {
                        self.open("argument", &[("key", key), ("type", value.kind())]);
                        match value {
                            Json::String(text) => self.text(text.as_str()),
                            other => self.text(other.spaced()),
                        }
                        self.close("argument");
                    }
                }
            }
            self.close("call");
        }
        self.close("tools");
        Ok(())
    }

    fn content(&mut self, parts: &[Part]) -> Result<()> {
        for part in parts {
            match part {
                Part::Text(text) => self.text(text.as_str()),
                Part::Image => match self.images.next() {
                    Some(prompt) => self.marker(prompt),
                    None => {
                        return Err(Error::usage("a message shows an image that was not given")
                            .expected("text", "an image")
                            .hint("images are not supported; send text only"));
                    }
                },
            }
        }
        Ok(())
    }

    fn response_format(&mut self, format: &ResponseFormat) {
        let (name, schema) = match format {
            ResponseFormat::Text => return,
            ResponseFormat::JsonObject => ("json_object", None),
            ResponseFormat::JsonSchema(schema) => ("json_schema", Some(schema.sorted().compact())),
        };
        let mut body = format!(
            "The system is invoked with `response_format={name}`.\nYour response must be raw JSON data \
             without markdown code blocks (```json) or any additional formatting."
        );
        if let Some(schema) = schema {
            body.push_str("\nThe JSON data must match the following schema:\n```json\n");
            body.push_str(&schema);
            body.push_str("\n```");
        }
        self.system("response-format", body);
    }
}
