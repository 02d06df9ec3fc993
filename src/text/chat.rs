//! K3's chat format: what a conversation is, and how a request gives one. `chat_render` turns it into a
//! prompt, `chat_parse` reads the answer.

use super::json::Json;
use crate::{Error, Result};

/// How much the model is told to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// `low`
    Low,
    /// `high`
    High,
    /// `max`
    Max,
}

impl Effort {
    /// The word in the prompt.
    pub fn as_str(self) -> &'static str {
        match self {
            Effort::Low => "low",
            Effort::High => "high",
            Effort::Max => "max",
        }
    }

    /// From its word.
    ///
    /// # Errors
    /// `Usage` for another word; `medium` is one, though the prompt text mentions it.
    pub fn parse(word: &str) -> Result<Effort> {
        [Effort::Low, Effort::High, Effort::Max].into_iter().find(|e| e.as_str() == word).ok_or_else(|| {
            Error::usage("not a thinking effort of this model").expected("low, high or max", word)
        })
    }
}

/// Whether the model is told to call tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// It may.
    #[default]
    Auto,
    /// It must.
    Required,
    /// It must not.
    None,
}

/// What form the model is told to answer in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ResponseFormat {
    /// Any.
    #[default]
    Text,
    /// JSON.
    JsonObject,
    /// JSON that satisfies this schema.
    JsonSchema(Json),
}

/// What surrounds the messages in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatOptions {
    /// Whether messages have a think channel and the answer starts in it.
    pub thinking: bool,
    /// The effort the prompt names when thinking; `None` leaves that message out.
    pub effort: Option<Effort>,
    /// Whether tools are to be called.
    pub tool_choice: ToolChoice,
    /// The form of the answer.
    pub response_format: ResponseFormat,
    /// Whether the prompt ends inside an assistant message that has begun.
    pub generation_prompt: bool,
}

impl Default for ChatOptions {
    /// The release's: thinking at `max`, ready to answer.
    fn default() -> ChatOptions {
        ChatOptions {
            thinking: true,
            effort: Some(Effort::Max),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            generation_prompt: true,
        }
    }
}

/// A piece of a message's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text.
    Text(String),
    /// The place of an image.
    Image,
}

/// What a call passes to its tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arguments {
    /// Values by name, in order.
    Named(Vec<(String, Json)>),
    /// Text that was meant to be JSON and is not.
    Raw(String),
}

/// A call in an assistant message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// What a result names it by.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// The arguments.
    pub arguments: Arguments,
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; any other renders nothing.
    pub role: String,
    /// The speaker's name, and of a tool result, the tool's.
    pub name: Option<String>,
    /// The content.
    pub content: Vec<Part>,
    /// An assistant's thoughts.
    pub reasoning: String,
    /// An assistant's calls.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool result answers.
    pub tool_call_id: Option<String>,
    /// Tools that a system message adds; the content is then left out.
    pub tools: Option<Json>,
}

/// A conversation and how to go on with it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chat {
    /// The messages in order.
    pub messages: Vec<Message>,
    /// The tools, an array in OpenAI's form.
    pub tools: Option<Json>,
    /// The rest.
    pub options: ChatOptions,
}

/// The string at `key`, empty as missing.
fn string(json: &Json, key: &str, place: &str) -> Result<Option<String>> {
    match json.get(key) {
        None => Ok(None),
        Some(Json::String(s)) => Ok(Some(s.clone()).filter(|s| !s.is_empty())),
        Some(other) => Err(wrong_kind(&format!("{place}{key}"), "a string", other)),
    }
}

/// The array at `key`, empty when missing.
fn array<'a>(json: &'a Json, key: &str, place: &str) -> Result<&'a [Json]> {
    match json.get(key) {
        None => Ok(&[]),
        Some(Json::Array(items)) => Ok(items),
        Some(other) => Err(wrong_kind(&format!("{place}{key}"), "an array", other)),
    }
}

/// The array at `key` as a value, `None` when missing or empty.
fn tools(json: &Json, place: &str) -> Result<Option<Json>> {
    let items = array(json, "tools", place)?;
    Ok((!items.is_empty()).then(|| Json::Array(items.to_vec())))
}

fn wrong_kind(key: &str, expected: &str, found: &Json) -> Error {
    Error::usage("a chat request cannot be read").key(key).expected(expected, found.kind())
}

impl Message {
    /// From a message in OpenAI's form; `place` is its path in the request, for errors. Content may be a
    /// string, null, missing, or a list of text and image parts.
    ///
    /// # Errors
    /// `Usage`, with the key: a field of another kind, a part that is neither text nor image, a call without
    /// a name or with arguments that are neither an object nor a string that could have held one.
    pub fn from_json(json: &Json, place: &str) -> Result<Message> {
        if !matches!(json, Json::Object(_)) {
            return Err(wrong_kind(place, "an object", json));
        }
        let prefix = format!("{place}.");
        let role = string(json, "role", &prefix)?.ok_or_else(|| {
            Error::usage("a message has no role").key(format!("{prefix}role")).expected("a role", "none")
        })?;
        let name = match role.as_str() {
            "tool" => string(json, "tool", &prefix)?,
            _ => None,
        };
        Ok(Message {
            name: match name {
                Some(name) => Some(name),
                None => string(json, "name", &prefix)?,
            },
            content: content(json.get("content"), &format!("{prefix}content"))?,
            reasoning: match string(json, "reasoning_content", &prefix)? {
                Some(text) => text,
                None => string(json, "reasoning", &prefix)?.unwrap_or_default(),
            },
            tool_calls: array(json, "tool_calls", &prefix)?
                .iter()
                .enumerate()
                .map(|(i, call)| ToolCall::from_json(call, &format!("{prefix}tool_calls[{i}]")))
                .collect::<Result<_>>()?,
            tool_call_id: string(json, "tool_call_id", &prefix)?,
            tools: tools(json, &prefix)?,
            role,
        })
    }
}

fn content(json: Option<&Json>, place: &str) -> Result<Vec<Part>> {
    let parts = match json {
        None => return Ok(Vec::new()),
        Some(Json::String(text)) => return Ok(vec![Part::Text(text.clone())]),
        Some(Json::Array(parts)) => parts,
        Some(other) => return Err(wrong_kind(place, "a string or an array of parts", other)),
    };
    let read = |(i, part): (usize, &Json)| match part.get("type").and_then(Json::as_str) {
        Some("image_url" | "image") => Ok(Part::Image),
        kind => match part.get("text") {
            Some(Json::String(text)) => Ok(Part::Text(text.clone())),
            _ => Err(Error::usage("a content part cannot be read")
                .key(format!("{place}[{i}]"))
                .expected("a part of type text or image_url", format_args!("{kind:?}"))),
        },
    };
    parts.iter().enumerate().map(read).collect()
}

impl ToolCall {
    fn from_json(json: &Json, place: &str) -> Result<ToolCall> {
        let function = json.get("function").unwrap_or(json);
        let name = string(function, "name", &format!("{place}.function."))?.ok_or_else(|| {
            Error::usage("a tool call has no name")
                .key(format!("{place}.function.name"))
                .expected("a name", "none")
        })?;
        let key = format!("{place}.function.arguments");
        let arguments = match function.get("arguments") {
            None => Arguments::Named(Vec::new()),
            Some(Json::Object(entries)) => Arguments::Named(entries.clone()),
            Some(Json::String(text)) if text.is_empty() => Arguments::Named(Vec::new()),
            Some(Json::String(text)) => match Json::parse(text) {
                Ok(Json::Object(entries)) => Arguments::Named(entries),
                Ok(other) => return Err(wrong_kind(&key, "JSON of an object", &other)),
                Err(_) => Arguments::Raw(text.clone()),
            },
            Some(other) => return Err(wrong_kind(&key, "an object or its JSON", other)),
        };
        Ok(ToolCall { id: string(json, "id", &format!("{place}."))?, name, arguments })
    }
}

impl Chat {
    /// From the body of an OpenAI-style chat request. Read are `messages` (the role `developer` is `system`),
    /// `tools`, `tool_choice`, `response_format`, and for thinking, the first of these that is there:
    /// `chat_template_kwargs` with `thinking` (a boolean) and `thinking_effort` (null leaves the effort
    /// unsaid), `thinking` with `type` (`disabled` is off) and `effort`, `reasoning_effort` (`none` is off).
    ///
    /// # Errors
    /// `Usage`, with the key, for what cannot be read or is not offered, as an effort of `medium` or a
    /// `tool_choice` of one function.
    pub fn from_request(body: &Json) -> Result<Chat> {
        if !matches!(body, Json::Object(_)) {
            return Err(wrong_kind("messages", "an object with messages", body));
        }
        let mut messages = Vec::new();
        for (i, json) in array(body, "messages", "")?.iter().enumerate() {
            let mut message = Message::from_json(json, &format!("messages[{i}]"))?;
            if message.role == "developer" {
                message.role = "system".to_owned();
            }
            messages.push(message);
        }
        let (thinking, effort) = thinking(body)?;
        let options = ChatOptions {
            thinking,
            effort,
            tool_choice: tool_choice(body.get("tool_choice"))?,
            response_format: response_format(body.get("response_format"))?,
            generation_prompt: true,
        };
        Ok(Chat { messages, tools: tools(body, "")?, options })
    }
}

fn thinking(body: &Json) -> Result<(bool, Option<Effort>)> {
    let at = |key: &'static str| move |e: Error| e.key(key);
    let (mut on, mut effort) = (true, Some(Effort::Max));
    if let Some(word) = string(body, "reasoning_effort", "")? {
        match word.as_str() {
            "none" => on = false,
            word => effort = Some(Effort::parse(word).map_err(at("reasoning_effort"))?),
        }
    }
    if let Some(control) = body.get("thinking") {
        if !matches!(control, Json::Object(_)) {
            return Err(wrong_kind("thinking", "an object", control));
        }
        if let Some(kind) = string(control, "type", "thinking.")? {
            on = kind != "disabled";
        }
        if let Some(word) = string(control, "effort", "thinking.")? {
            effort = Some(Effort::parse(&word).map_err(at("thinking.effort"))?);
        }
    }
    if let Some(kwargs) = body.get("chat_template_kwargs") {
        let Json::Object(entries) = kwargs else {
            return Err(wrong_kind("chat_template_kwargs", "an object", kwargs));
        };
        for (key, value) in entries {
            match (key.as_str(), value) {
                ("thinking", Json::Bool(b)) => on = *b,
                ("thinking", other) => {
                    return Err(wrong_kind("chat_template_kwargs.thinking", "a boolean", other));
                }
                ("thinking_effort", Json::Null) => effort = None,
                ("thinking_effort", Json::String(word)) => {
                    effort = Some(Effort::parse(word).map_err(at("chat_template_kwargs.thinking_effort"))?);
                }
                ("thinking_effort", other) => {
                    let key = "chat_template_kwargs.thinking_effort";
                    return Err(wrong_kind(key, "a string or null", other));
                }
                (key, _) => {
                    return Err(Error::usage("a template argument that the chat format does not have")
                        .key(format!("chat_template_kwargs.{key}"))
                        .expected("thinking or thinking_effort", key));
                }
            }
        }
    }
    Ok((on, effort))
}

fn tool_choice(json: Option<&Json>) -> Result<ToolChoice> {
    match json.map(|j| j.as_str().unwrap_or(j.kind())) {
        None | Some("auto") => Ok(ToolChoice::Auto),
        Some("required") => Ok(ToolChoice::Required),
        Some("none") => Ok(ToolChoice::None),
        Some(other) => Err(Error::usage("a tool choice that the chat format does not have")
            .key("tool_choice")
            .expected("auto, required or none", other)),
    }
}

fn response_format(json: Option<&Json>) -> Result<ResponseFormat> {
    let Some(json) = json else { return Ok(ResponseFormat::Text) };
    match string(json, "type", "response_format.")?.as_deref() {
        Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(ResponseFormat::JsonObject),
        Some("json_schema") => {
            let outer = json.get("json_schema").ok_or_else(|| {
                Error::usage("a response format has no schema")
                    .key("response_format.json_schema")
                    .expected("a schema", "none")
            })?;
            let schema = outer.get("schema").or_else(|| outer.get("json_schema")).unwrap_or(outer);
            Ok(ResponseFormat::JsonSchema(schema.clone()))
        }
        other => Err(Error::usage("a response format that the chat format does not have")
            .key("response_format.type")
            .expected("text, json_object or json_schema", format_args!("{other:?}"))),
    }
}
