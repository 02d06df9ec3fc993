//! K3's chat format, read back: the ids of an answer as reasoning, content and tool calls.
//!
//! It reads ids, not text. A tag is what stands between the special ids, so nothing has to be held back
//! beyond an unfinished character, and an answer that spells a marker in ordinary tokens is only text.

use super::chat_render::{CLOSE, END_OF_MSG, OPEN, SEP};
use super::json::{Json, set};
use super::stream::StreamDecoder;
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Ends of a turn besides `<|end_of_msg|>`, where the vocabulary has them: the release is said to end with
/// the first at times, and the second is of the same kind.
const OTHER_ENDS: [&str; 2] = ["[EOS]", "[EOT]"];

/// The special ids of the chat format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatIds {
    open: u32,
    close: u32,
    sep: u32,
    stops: Vec<u32>,
}

impl ChatIds {
    /// From the vocabulary's names.
    ///
    /// # Errors
    /// `Refused`, naming the special that the vocabulary lacks: it is not K3's, or came without its
    /// `tokenizer_config.json`.
    pub fn new(tokenizer: &Tokenizer) -> Result<ChatIds> {
        let id = |name: &str| {
            tokenizer.special_id(name).ok_or_else(|| {
                Error::refused("the vocabulary has not the specials of the chat format")
                    .key("added_tokens_decoder")
                    .expected(format_args!("a special named {name}"), "none")
                    .hint("tokenizer_config.json names the specials; it must lie beside the checkpoint")
            })
        };
        let others = OTHER_ENDS.iter().filter_map(|name| tokenizer.special_id(name));
        Ok(ChatIds {
            open: id(OPEN)?,
            close: id(CLOSE)?,
            sep: id(SEP)?,
            stops: std::iter::once(id(END_OF_MSG)?).chain(others).collect(),
        })
    }

    /// The ids that end a turn; generation stops after any of them.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }
}

/// The channel in which a prompt ends, so that the answer starts inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// Thinking is on.
    Think,
    /// Thinking is off.
    Response,
}

/// A call that the answer makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallMade {
    /// Zero-based place among the calls of this answer.
    pub index: usize,
    /// The tool.
    pub name: String,
    /// The arguments: JSON of an object, or whatever the model wrote as that.
    pub arguments: String,
}

/// What an id added to an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChatEvent {
    /// More of the reasoning; never empty.
    Reasoning(String),
    /// More of the content; never empty.
    Content(String),
    /// A call, complete.
    Call(CallMade),
    /// All the reasoning so far, given here again, was the content: the model left the thinking out.
    ReasoningWasContent(String),
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Completion {
    /// The text of the think channel.
    pub reasoning: String,
    /// The text of the response.
    pub content: String,
    /// The calls in order.
    pub calls: Vec<CallMade>,
}

impl Completion {
    /// Adds what a parser has read.
    pub fn add(&mut self, event: ChatEvent) {
        match event {
            ChatEvent::Reasoning(text) => self.reasoning.push_str(&text),
            ChatEvent::Content(text) => self.content.push_str(&text),
            ChatEvent::Call(call) => self.calls.push(call),
            ChatEvent::ReasoningWasContent(text) => {
                self.reasoning.clear();
                self.content.push_str(&text);
            }
        }
    }
}

/// Where the text between tags goes.
#[derive(Debug)]
enum Place {
    /// Before anything was opened: content.
    Start,
    Think,
    Response,
    /// Between channels: nowhere.
    Between,
    /// Between calls: nowhere.
    Tools,
    /// In a call, between its arguments: nowhere.
    Call(Call),
    /// In an argument of a call, with its key, whether it is a string, and its text so far.
    Argument(Call, String, bool, String),
    /// In a block of JSON that holds all the arguments of a call.
    Block(Call, String),
    /// After the message: nowhere, and nothing more is read.
    Done,
}

/// A call that has begun.
#[derive(Debug, Default)]
struct Call {
    name: Option<String>,
    named: Vec<(String, Json)>,
    block: Option<String>,
}

impl Call {
    fn argument(mut self, key: String, is_string: bool, text: String) -> Call {
        let value = match is_string {
            true => Json::String(text),
            false => Json::parse(&text).unwrap_or(Json::String(text)),
        };
        set(&mut self.named, key, value);
        self
    }

    fn block(mut self, text: String) -> Call {
        self.block = Some(text);
        self
    }
}

/// A tag being read: from its marker on.
#[derive(Debug)]
struct Tag {
    closing: bool,
    bytes: Vec<u8>,
}

/// Reads the ids of one answer as they come.
#[derive(Debug)]
pub struct CompletionParser<'t> {
    tokenizer: &'t Tokenizer,
    ids: ChatIds,
    place: Place,
    tag: Option<Tag>,
    decoder: StreamDecoder,
    /// The reasoning so far, as long as it may turn out to be the content.
    unsure: Option<String>,
    calls: usize,
    ended: bool,
}

impl<'t> CompletionParser<'t> {
    /// A parser for an answer to a prompt that ends inside `channel`, or outside any.
    ///
    /// # Errors
    /// As [`ChatIds::new`].
    pub fn new(tokenizer: &'t Tokenizer, channel: Option<Channel>) -> Result<CompletionParser<'t>> {
        let place = match channel {
            None => Place::Start,
            Some(Channel::Think) => Place::Think,
            Some(Channel::Response) => Place::Response,
        };
        Ok(CompletionParser {
            tokenizer,
            ids: ChatIds::new(tokenizer)?,
            place,
            tag: None,
            decoder: StreamDecoder::new(),
            unsure: Some(String::new()),
            calls: 0,
            ended: false,
        })
    }

    /// Whether an id that ends the turn has been read.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Reads one id. Nothing is read after the end of the turn.
    pub fn push(&mut self, id: u32) -> Vec<ChatEvent> {
        let mut events = Vec::new();
        if self.ended {
            return events;
        }
        if self.ids.stops.contains(&id) {
            self.flush(&mut events);
            self.tag = None;
            self.place = Place::Done;
            self.ended = true;
        } else if id == self.ids.open || id == self.ids.close {
            // A tag that was not finished before is dropped.
            self.flush(&mut events);
            self.tag = Some(Tag { closing: id == self.ids.close, bytes: Vec::new() });
        } else if id == self.ids.sep {
            self.flush(&mut events);
            if let Some(tag) = self.tag.take() {
                self.read_tag(&tag, &mut events);
            }
        } else if let Some(tag) = &mut self.tag {
            tag.bytes.extend_from_slice(self.tokenizer.lossy_bytes(id));
        } else {
            let text = self.decoder.push(self.tokenizer, id);
            self.text(text, &mut events);
        }
        events
    }

    /// Ends an answer that may have been cut anywhere: an unfinished character becomes U+FFFD, an unfinished
    /// tag or call is dropped.
    pub fn finish(&mut self) -> Vec<ChatEvent> {
        let mut events = Vec::new();
        self.flush(&mut events);
        self.tag = None;
        self.place = Place::Done;
        events
    }

    fn flush(&mut self, events: &mut Vec<ChatEvent>) {
        let text = self.decoder.finish();
        self.text(text, events);
    }

    fn text(&mut self, text: String, events: &mut Vec<ChatEvent>) {
        if text.is_empty() {
            return;
        }
        match &mut self.place {
            Place::Think => {
                if let Some(unsure) = &mut self.unsure {
                    unsure.push_str(&text);
                }
                events.push(ChatEvent::Reasoning(text));
            }
            Place::Start | Place::Response => events.push(ChatEvent::Content(text)),
            Place::Argument(_, _, _, so_far) | Place::Block(_, so_far) => so_far.push_str(&text),
            Place::Between | Place::Tools | Place::Call(_) | Place::Done => {}
        }
    }

    fn read_tag(&mut self, tag: &Tag, events: &mut Vec<ChatEvent>) {
        let text = String::from_utf8_lossy(&tag.bytes);
        let (name, attributes) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
        let place = std::mem::replace(&mut self.place, Place::Done);
        self.place = match tag.closing {
            false => self.opened(place, name, attributes),
            true => self.closed(place, name, events),
        };
    }

    fn opened(&mut self, place: Place, name: &str, attributes: &str) -> Place {
        let start = |attributes| Call { name: attribute(attributes, "tool"), ..Call::default() };
        match (name, place) {
            (_, Place::Done) => Place::Done,
            ("message", _) => Place::Between,
            ("think", _) => Place::Think,
            ("response", _) => {
                self.unsure = None;
                Place::Response
            }
            ("tools", _) => {
                self.unsure = None;
                Place::Tools
            }
            // Inside a call too: one that was not closed is not a call.
            ("call", Place::Tools | Place::Call(_) | Place::Argument(..) | Place::Block(..)) => {
                Place::Call(start(attributes))
            }
            ("argument", Place::Call(call)) => {
                let key = attribute(attributes, "key").unwrap_or_default();
                let is_string = attribute(attributes, "type").as_deref() == Some("string");
                Place::Argument(call, key, is_string, String::new())
            }
            ("json", Place::Call(call)) => Place::Block(call, String::new()),
            (_, Place::Start) => Place::Between,
            (_, place) => place,
        }
    }

    fn closed(&mut self, place: Place, name: &str, events: &mut Vec<ChatEvent>) -> Place {
        match (name, place) {
            ("message", _) | (_, Place::Done) => Place::Done,
            ("think", Place::Think) => {
                self.unsure = None;
                Place::Between
            }
            ("response", Place::Response) => Place::Between,
            // The response ends where only thoughts were: they were the response.
            ("response", Place::Think) => {
                if let Some(text) = self.unsure.take().filter(|text| !text.is_empty()) {
                    events.push(ChatEvent::ReasoningWasContent(text));
                }
                Place::Between
            }
            ("tools", _) => Place::Between,
            ("argument", Place::Argument(call, key, is_string, text)) => {
                Place::Call(call.argument(key, is_string, text))
            }
            ("json", Place::Block(call, text)) => Place::Call(call.block(text)),
            ("call", Place::Call(call)) => self.made(call, events),
            ("call", Place::Argument(call, key, is_string, text)) => {
                self.made(call.argument(key, is_string, text), events)
            }
            ("call", Place::Block(call, text)) => self.made(call.block(text), events),
            (_, Place::Start) => Place::Between,
            (_, place) => place,
        }
    }

    /// A call is complete; one without a name is dropped.
    fn made(&mut self, call: Call, events: &mut Vec<ChatEvent>) -> Place {
        if let Some(name) = call.name {
            let arguments = call.block.unwrap_or_else(|| Json::Object(call.named).spaced());
            events.push(ChatEvent::Call(CallMade { index: self.calls, name, arguments }));
            self.calls += 1;
        }
        Place::Tools
    }
}

/// The value of `key` among ` key="value"`s; empty as missing.
fn attribute(mut attributes: &str, key: &str) -> Option<String> {
    while let Some((name, rest)) = attributes.split_once("=\"") {
        let (value, rest) = rest.split_once('"')?;
        if name.trim() == key {
            return Some(value.replace("&quot;", "\"").replace("&amp;", "&")).filter(|v| !v.is_empty());
        }
        attributes = rest;
    }
    None
}
