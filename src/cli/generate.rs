//! `trunkline generate`

use super::output;
use super::{Global, RunFlags, model};
use crate::checkpoint::shards::Checkpoint;
use crate::error::{Error, Kind, Result};
use crate::model::session::{Session, Synced};
use crate::model::session_file::{self, Continuation};
use crate::report::progress::{Progress, human};
use crate::report::target;
use crate::report::trace::{self, Trace};
use crate::text::generate::{Listener, Outcome, Request, generate};
use crate::text::sampler::{Sampler, SamplerParams};
use crate::text::tokenizer::Tokenizer;
use clap::Args;
use serde_json::{Value, json};
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the embedded demo continues when no prompt is given.
const DEMO_PROMPT: &str = "Once upon a time";
/// Positions planned for by default.
const DEFAULT_CONTEXT: usize = 4096;

#[derive(Args)]
pub struct Flags {
    #[command(flatten)]
    run: RunFlags,
    /// Text to continue
    #[arg(long, value_name = "TEXT", group = "input")]
    prompt: Option<String>,
    /// File with the text to continue; - is stdin
    #[arg(long, value_name = "FILE", group = "input")]
    prompt_file: Option<PathBuf>,
    /// Ids to continue
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', group = "input")]
    ids: Option<Vec<u32>>,
    /// The most ids to generate
    #[arg(long, value_name = "N", default_value = "64", value_parser = super::positive, allow_negative_numbers = true)]
    max_tokens: usize,
    /// Divides the logits before sampling; 0 takes the likeliest id
    #[arg(long, value_name = "X", default_value = "0", allow_negative_numbers = true)]
    temperature: f32,
    /// Samples from the likeliest ids that make up this share
    #[arg(long, value_name = "X", default_value = "1", allow_negative_numbers = true)]
    top_p: f32,
    /// Samples from this many likeliest ids; 0 is all
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    top_k: usize,
    /// Samples from ids at least this likely compared with the likeliest
    #[arg(long, value_name = "X", default_value = "0", allow_negative_numbers = true)]
    min_p: f32,
    /// Seeds the sampling
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    seed: u64,
    /// Ends the text where this appears; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Ends the text at this id; may be given several times
    #[arg(long, value_name = "N")]
    stop_id: Vec<u32>,
    /// Goes on after the model's own end of text
    #[arg(long)]
    ignore_eos: bool,
    /// Keeps the state in this file, and goes on from it
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// How often the session is saved while generating, e.g. 60s, 5m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, requires = "session")]
    save_every: Duration,
}

/// A time such as `500ms`, `60s`, `5m`.
fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("expected a time such as 500ms, 60s or 5m, not {text:?}");
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let n: u64 = number.parse().map_err(|_| bad())?;
    let millis = match unit {
        "ms" => Some(n),
        "s" | "" => n.checked_mul(1000),
        "m" => n.checked_mul(60_000),
        _ => None,
    };
    millis.map(Duration::from_millis).ok_or_else(bad)
}

/// Ids of the prompt, or `None` when only the session says what to continue.
fn prompt(f: &Flags, checkpoint: &Checkpoint, tokenizer: Option<&Tokenizer>) -> Result<Option<Vec<u32>>> {
    let encode = |text: &str| tokenizer.ok_or_else(|| model::no_tokenizer(checkpoint))?.encode(text, false);
    if let Some(ids) = &f.ids {
        let vocab = checkpoint.config().vocab_size;
        if let Some(bad) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::usage("--ids holds an id outside the vocabulary")
                .expected(format_args!("0 to {}", vocab - 1), bad));
        }
        return Ok(Some(ids.clone()));
    }
    let text = match (&f.prompt, &f.prompt_file) {
        (Some(t), _) => t.clone(),
        (None, Some(path)) => read_text(path)?,
        (None, None) if f.session.as_ref().is_some_and(|s| s.exists()) => return Ok(None),
        (None, None) if f.run.model.model.is_empty() => DEMO_PROMPT.to_string(),
        (None, None) => {
            return Err(Error::usage("there is no prompt")
                .hint("give --prompt TEXT, --prompt-file FILE or --ids 1,2,3"));
        }
    };
    let ids = encode(&text)?;
    if ids.is_empty() { Err(Error::usage("the prompt is empty")) } else { Ok(Some(ids)) }
}

/// The text of a file, or of stdin for `-`.
pub fn read_text(path: &std::path::Path) -> Result<String> {
    let fail = |e| Error::usage("cannot read the text").file(path).cause(e);
    if path.as_os_str() == "-" {
        let mut text = String::new();
        return std::io::stdin().read_to_string(&mut text).map(|_| text).map_err(fail);
    }
    std::fs::read_to_string(path).map_err(fail)
}

/// Prints tokens as they come and keeps the session file fresh.
struct Printer<'a> {
    json: bool,
    ids_only: bool,
    first: bool,
    progress: &'a Progress,
    session: Option<&'a std::path::Path>,
    save_every: Duration,
    saved: Instant,
    more: Continuation,
    prefilling: bool,
}

impl Printer<'_> {
    fn save(&mut self, session: &Session, pending: Option<u32>) -> Result<()> {
        let Some(path) = self.session else { return Ok(()) };
        self.more.pending = pending;
        session_file::save(session, &self.more, path)?;
        self.saved = Instant::now();
        Ok(())
    }
}

impl Listener for Printer<'_> {
    fn prefilled(&mut self, synced: Synced) -> Result<()> {
        self.prefilling = false;
        if synced.restarted {
            self.progress.say("the session belongs to another prompt: recomputed from the start (a recurrent state cannot be rewound)");
        } else if synced.reused > 0 {
            self.progress
                .say(&format!("session: {} positions taken over, {} fed", synced.reused, synced.fed));
        }
        self.progress.phase("decoding");
        Ok(())
    }

    fn token(&mut self, id: u32, text: &str) -> Result<()> {
        if self.json {
            return output::json(
                &json!({"event": "token", "id": id, "text": if self.ids_only { Value::Null } else { text.into() }}),
            );
        }
        let first = std::mem::replace(&mut self.first, false);
        self.progress.suspend(|| match self.ids_only {
            true => output::text(&format!("{}{id}", if first { "" } else { " " })),
            false => output::text(text),
        })
    }

    fn whole_step(&mut self, session: &Session, pending: Option<u32>) -> Result<()> {
        // Prefill chunks are long and few: each is saved. Tokens are saved by the clock.
        if self.prefilling || self.saved.elapsed() >= self.save_every {
            self.save(session, pending)
        } else {
            Ok(())
        }
    }
}

pub fn run(f: &Flags, global: &Global) -> Result<()> {
    trace::recorded(f.run.trace.as_deref(), |trace| continued(f, global, trace))
}

fn continued(f: &Flags, global: &Global, trace: Option<Arc<Trace>>) -> Result<()> {
    let start = Instant::now();
    let params = SamplerParams {
        temperature: f.temperature,
        top_p: f.top_p,
        top_k: f.top_k,
        min_p: f.min_p,
        seed: f.seed,
    };
    let mut sampler = Sampler::new(params)?;
    if f.stop.iter().any(String::is_empty) {
        return Err(Error::usage("--stop is empty"));
    }
    if let Some(session) = &f.session {
        // Told before hours of work.
        target::resolve(session)?;
    }
    let cancel = model::interruptible()?;
    let progress = Progress::start(global.quiet);
    let checkpoint = model::checkpoint(&f.run.model, &progress)?;
    let tokenizer = model::tokenizer(&checkpoint)?;
    if tokenizer.is_none() && !f.stop.is_empty() {
        return Err(model::no_tokenizer(&checkpoint).hint("--stop needs text; use --stop-id"));
    }
    let given = prompt(f, &checkpoint, tokenizer.as_ref())?;
    let least = given.as_ref().map_or(0, Vec::len) + f.max_tokens;
    let context = match f.run.machine.context {
        Some(n) => n,
        None => least.max(DEFAULT_CONTEXT).min(checkpoint.config().max_position_embeddings),
    };
    if let Some(ids) = &given
        && ids.len() > context
    {
        return Err(Error::usage(format!(
            "the prompt's {} tokens do not fit a context of {context}",
            ids.len()
        ))
        .hint("raise --context"));
    }
    let stop_ids = match f.ignore_eos {
        true => f.stop_id.clone(),
        false => [f.stop_id.clone(), model::stop_ids(&checkpoint, tokenizer.as_ref())?].concat(),
    };
    let purpose = model::Purpose { context, all_logits: false, cancel, trace };
    let loaded = model::open(checkpoint, &f.run, global, purpose, &progress)?;
    // Draws depend on these alone, and on the position.
    let how = serde_json::to_string(&(f.temperature, f.top_p, f.top_k, f.min_p, f.seed))
        .map_err(|e| Error::run("cannot encode the sampler").cause(e))?;
    let mut session = Session::new(loaded.clone())?;
    let mut given = given;
    if let Some(path) = f.session.as_deref().filter(|p| p.exists()) {
        progress.phase("reading the session");
        let (held, more) = session_file::load(&loaded, path)?;
        match &given {
            None => {
                given = Some(held.tokens().iter().copied().chain(more.pending).collect());
                session = held;
            }
            Some(ids) => {
                // Tokens after the prompt are the same run's only when they were chosen the same way.
                let same_run = more.sampler == how && more.prompt_tokens == ids.len();
                if held.tokens().len() <= ids.len() || same_run || !held.tokens().starts_with(ids) {
                    session = held;
                } else {
                    progress.say("the session holds other tokens after this prompt: recomputed from the start (a recurrent state cannot be rewound)");
                }
            }
        }
    }
    let prompt = given.ok_or_else(|| Error::usage("there is no prompt"))?;
    let load = start.elapsed();
    let mut printer = Printer {
        json: global.json,
        ids_only: tokenizer.is_none(),
        first: true,
        progress: &progress,
        session: f.session.as_deref(),
        save_every: f.save_every,
        saved: Instant::now(),
        more: Continuation { prompt_tokens: prompt.len(), sampler: how, pending: None },
        prefilling: true,
    };
    progress.phase(format!("prefill of {} tokens", prompt.len()));
    let request = Request {
        prompt: &prompt,
        max_tokens: f.max_tokens,
        stop_ids: &stop_ids,
        stops: &f.stop,
        chunk: f.run.machine.prefill_chunk,
    };
    let mut outcome = Outcome::default();
    let result = generate(
        &mut session,
        tokenizer.as_ref(),
        &mut sampler,
        &request,
        &mut &progress,
        &mut printer,
        &mut outcome,
    );
    progress.phase("finishing");
    super::device::keep_pipelines(loaded.gpu());
    // A pending token is one that was chosen but not fed: it is found again by the run that goes on.
    let fed = session.tokens().len().saturating_sub(prompt.len());
    let pending = outcome.ids.get(fed).copied();
    let saved = match session.tokens().is_empty() {
        true => Ok(()),
        false => printer.save(&session, pending),
    };
    if !global.json && (!outcome.ids.is_empty()) {
        progress.suspend(|| output::text("\n"))?;
    }
    if let Err(e) = result.and(saved) {
        return Err(failed(e, global, &outcome, f, &progress)?);
    }
    finish(global, &progress, &loaded, &prompt, &outcome, tokenizer.is_some(), load)
}

/// Ends a run that failed or was interrupted: says what was reached, and where it is kept.
fn failed(e: Error, global: &Global, outcome: &Outcome, f: &Flags, progress: &Progress) -> Result<Error> {
    if global.json {
        output::error_event(&e, &outcome.ids)?;
    }
    if e.kind() == Kind::Interrupted {
        progress.say(&format!("stopped after {} generated tokens", outcome.ids.len()));
    }
    Ok(match (&f.session, e.kind()) {
        (_, Kind::ClosedPipe) => e,
        (Some(path), Kind::Device) => e.hint(format!(
            "go on without the GPU: the same command with --device cpu --session {}",
            path.display()
        )),
        (Some(path), _) if e.hint_text().is_none() => e.hint(format!(
            "the session is kept: the same command with --session {} goes on from it",
            path.display()
        )),
        _ => e,
    })
}

fn finish(
    global: &Global,
    progress: &Progress,
    model: &crate::model::Model,
    prompt: &[u32],
    outcome: &Outcome,
    has_text: bool,
    load: Duration,
) -> Result<()> {
    let seconds = |d: Duration| (d.as_secs_f64() * 1e4).round() / 1e4;
    let made = outcome.ids.len() - outcome.restored;
    // The first token comes with the prefill; each further one is a step.
    let rate = made.saturating_sub(1) as f64 / outcome.decode.as_secs_f64().max(1e-9);
    let bytes = model.counters().bytes();
    let experts = model.counters().experts();
    if global.json {
        return output::json(&json!({
            "event": "done",
            "prompt_ids": prompt,
            "ids": outcome.ids,
            "text": if has_text { Value::from(outcome.text.as_str()) } else { Value::Null },
            "finish_reason": outcome.finish,
            "device": model.device_name(),
            "adapter": model.gpu().map(|g| g.name()),
            "usage": {"prompt_tokens": prompt.len(), "completion_tokens": outcome.ids.len()},
            "timings": {
                "load_s": seconds(load),
                "prefill_s": seconds(outcome.prefill),
                "decode_s": seconds(outcome.decode),
                "tokens_per_s": (rate * 1e3).round() / 1e3,
            },
            "bytes": bytes,
            "experts": experts,
            "peak": super::model::peak(progress, model),
        }));
    }
    progress.say(&format!(
        "{} prompt tokens in {:.2} s, {made} generated in {:.2} s ({rate:.2} tokens/s); {} read, {} multiplied; experts: {} requests, {} hits, {} misses; peak memory {}",
        prompt.len(),
        outcome.prefill.as_secs_f64(),
        outcome.decode.as_secs_f64(),
        human(bytes.nvme),
        human(bytes.ram),
        experts.requests,
        experts.ram_hits,
        experts.misses,
        human(progress.peak()),
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::duration;
    use std::time::Duration;

    #[test]
    fn times() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        for bad in ["", "s", "1h", "-1s", "99999999999999999999s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
