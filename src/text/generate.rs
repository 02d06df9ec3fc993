//! Prompt to text: prefill, then one token at a time until a stop, the limit or the end of the context.

use super::sampler::Sampler;
use super::stream::{StopMatcher, StreamDecoder};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use crate::model::Observer;
use crate::model::session::{Session, Synced};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop id or a stop string.
    Stop,
    /// The limit of tokens, or a full context.
    Length,
}

/// What to generate.
pub struct Request<'a> {
    /// Ids of the prompt.
    pub prompt: &'a [u32],
    /// The most ids to generate.
    pub max_tokens: usize,
    /// Ids that end the text.
    pub stop_ids: &'a [u32],
    /// Strings that end the text.
    pub stops: &'a [String],
    /// Tokens per prefill chunk.
    pub chunk: usize,
}

/// What happened so far; filled in as it happens, so that an interrupted run can still say what it reached.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Generated ids, a stop id included.
    pub ids: Vec<u32>,
    /// Their text, up to a stop.
    pub text: String,
    /// Why it ended; `None` while it has not.
    pub finish: Option<Finish>,
    /// Time until the prompt's last logits.
    pub prefill: Duration,
    /// Time after that.
    pub decode: Duration,
    /// Ids taken from the session instead of being generated anew; the first of `ids`.
    pub restored: usize,
}

/// Who listens to a generation.
pub trait Listener {
    /// The prompt has been fed.
    fn prefilled(&mut self, _synced: Synced) -> Result<()> {
        Ok(())
    }
    /// An id was generated; `text` is what it released.
    fn token(&mut self, id: u32, text: &str) -> Result<()>;
    /// A step is whole. `pending` was chosen but not fed yet.
    fn whole_step(&mut self, _session: &Session, _pending: Option<u32>) -> Result<()> {
        Ok(())
    }
}

/// Runs `request` on `session`. Ids that the session already holds after the prompt count as generated: a run that was
/// interrupted goes on as if it had not been.
///
/// # Errors
/// Whatever a step, the sampler or the listener reports; `outcome` then holds what was reached.
pub fn generate(
    session: &mut Session,
    tokenizer: Option<&Tokenizer>,
    sampler: &mut Sampler,
    request: &Request<'_>,
    seen: &mut dyn Observer,
    listener: &mut dyn Listener,
    outcome: &mut Outcome,
) -> Result<()> {
    let context = session.model().context();
    if request.prompt.len() > context {
        return Err(Error::usage(format!(
            "the prompt's {} tokens do not fit a context of {context}",
            request.prompt.len()
        ))
        .hint("raise --context"));
    }
    let start = Instant::now();
    let held = session.tokens();
    let restored = match held.strip_prefix(request.prompt) {
        Some(after) => after[..after.len().min(request.max_tokens)].to_vec(),
        None => Vec::new(),
    };
    let synced = if restored.is_empty() {
        session.sync(request.prompt, request.chunk, seen, &mut |s| listener.whole_step(s, None))?
    } else {
        Synced { reused: held.len(), fed: 0, restarted: false }
    };
    outcome.prefill = start.elapsed();
    outcome.restored = restored.len();
    listener.prefilled(synced)?;
    let start = Instant::now();
    let result = decode(session, tokenizer, sampler, request, &restored, seen, listener, outcome);
    outcome.decode = start.elapsed();
    result
}

#[allow(clippy::too_many_arguments)]
fn decode(
    session: &mut Session,
    tokenizer: Option<&Tokenizer>,
    sampler: &mut Sampler,
    request: &Request<'_>,
    restored: &[u32],
    seen: &mut dyn Observer,
    listener: &mut dyn Listener,
    outcome: &mut Outcome,
) -> Result<()> {
    let context = session.model().context();
    let mut decoder = StreamDecoder::new();
    let mut matcher = StopMatcher::new(request.stops)?;
    loop {
        let made = outcome.ids.len();
        if made == request.max_tokens {
            outcome.finish = Some(Finish::Length);
            return Ok(());
        }
        let id = match restored.get(made) {
            Some(id) => *id,
            None => sampler.sample(session.logits(), session.tokens().len())?,
        };
        outcome.ids.push(id);
        let stopped = request.stop_ids.contains(&id);
        let full =
            outcome.ids.len() == request.max_tokens || request.prompt.len() + outcome.ids.len() > context;
        let mut text = String::new();
        let mut matched = false;
        if let Some(tokenizer) = tokenizer {
            let fresh = if stopped { String::new() } else { decoder.push(tokenizer, id) };
            let step = matcher.push(&fresh);
            text = step.text;
            matched = step.stopped.is_some();
            if !matched && (stopped || full) {
                let step = matcher.push(&decoder.finish());
                text.push_str(&step.text);
                matched = step.stopped.is_some();
                if !matched {
                    text.push_str(&matcher.finish());
                }
            }
        }
        outcome.text.push_str(&text);
        listener.token(id, &text)?;
        if stopped || matched || full {
            outcome.finish = Some(if stopped || matched { Finish::Stop } else { Finish::Length });
            let fed = restored.len() > made;
            return listener.whole_step(session, (!fed).then_some(id));
        }
        if made >= restored.len() {
            session.step(id, seen)?;
            listener.whole_step(session, None)?;
        }
    }
}
