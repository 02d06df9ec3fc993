//! `trunkline eval`

use super::generate::read_text;
use super::{Global, RunFlags, model, output};
use crate::error::{Error, Kind, Result};
use crate::model::session::Session;
use crate::report::progress::Progress;
use crate::report::target;
use crate::report::trace::{self, Trace};
use crate::text::sampler::log_softmax_at;
use clap::Args;
use serde_json::json;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

#[derive(Args)]
#[command(group = clap::ArgGroup::new("input").required(true))]
pub struct Flags {
    #[command(flatten)]
    run: RunFlags,
    /// File with the text to measure; - is stdin
    #[arg(long, value_name = "FILE", group = "input")]
    text: Option<PathBuf>,
    /// Ids to measure
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', group = "input")]
    ids: Option<Vec<u32>>,
    /// Writes the logits of every position: a safetensors file with `logits` F32 [n, vocab]
    #[arg(long, value_name = "OUT.safetensors")]
    logits: Option<PathBuf>,
}

/// A safetensors file with one F32 tensor whose rows arrive one by one.
struct LogitsFile {
    out: BufWriter<tempfile::NamedTempFile>,
    path: PathBuf,
}

impl LogitsFile {
    fn create(path: &Path, rows: usize, cols: usize) -> Result<LogitsFile> {
        let path = target::resolve(path)?;
        let fail = |e| Error::io("cannot write the logits", e).file(&path);
        let file = target::unfinished(&path, ".trunkline-logits-").map_err(fail)?;
        let header =
            json!({"logits": {"dtype": "F32", "shape": [rows, cols], "data_offsets": [0, 4 * rows * cols]}});
        // The format aligns the data to 8 bytes by spaces after the header.
        let mut text = header.to_string();
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        let mut out = BufWriter::new(file);
        out.write_all(&(text.len() as u64).to_le_bytes())
            .and_then(|()| out.write_all(text.as_bytes()))
            .map_err(fail)?;
        Ok(LogitsFile { out, path })
    }

    fn row(&mut self, logits: &[f32]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(logits);
        self.out.write_all(bytes).map_err(|e| Error::io("cannot write the logits", e).file(&self.path))
    }

    fn finish(self) -> Result<()> {
        let fail = |e: std::io::Error| Error::io("cannot write the logits", e).file(&self.path);
        let file = self.out.into_inner().map_err(|e| fail(e.into_error()))?;
        file.persist(&self.path).map(|_| ()).map_err(|e| fail(e.error))
    }
}

pub fn run(f: &Flags, global: &Global) -> Result<()> {
    trace::recorded(f.run.trace.as_deref(), |trace| measured(f, global, trace))
}

fn measured(f: &Flags, global: &Global, trace: Option<Arc<Trace>>) -> Result<()> {
    let start = Instant::now();
    let cancel = model::interruptible()?;
    let progress = Progress::start(global.quiet);
    let checkpoint = model::checkpoint(&f.run.model, &progress)?;
    let ids = match (&f.ids, &f.text) {
        (Some(ids), _) => ids.clone(),
        (None, Some(path)) => {
            let tokenizer = model::tokenizer(&checkpoint)?.ok_or_else(|| model::no_tokenizer(&checkpoint))?;
            tokenizer.encode(&read_text(path)?, false)?
        }
        (None, None) => return Err(Error::usage("there is nothing to evaluate")),
    };
    if ids.len() < 2 {
        return Err(Error::usage("eval needs at least 2 tokens").expected("2 or more", ids.len()));
    }
    let context = f.run.machine.context.unwrap_or(ids.len());
    if ids.len() > context {
        return Err(Error::usage(format!(
            "the text's {} tokens do not fit a context of {context}",
            ids.len()
        ))
        .hint("raise --context"));
    }
    let purpose = model::Purpose { context, all_logits: true, cancel, trace };
    let loaded = model::open(checkpoint, &f.run, global, purpose, &progress)?;
    let vocab = loaded.config().vocab_size;
    let mut file = match &f.logits {
        Some(path) => Some(LogitsFile::create(path, ids.len(), vocab)?),
        None => None,
    };
    let load = start.elapsed();
    let start = Instant::now();
    progress.phase(format!("evaluating {} tokens", ids.len()));
    let mut session = Session::new(loaded.clone())?;
    let mut sum = 0.0f64;
    let mut done = 0;
    let result: Result<()> = ids.chunks(f.run.machine.prefill_chunk).try_for_each(|part| {
        session.feed_all(part, &mut &progress, &mut |position, logits| {
            if let Some(next) = ids.get(position + 1) {
                sum -= log_softmax_at(logits, *next);
            }
            file.as_mut().map_or(Ok(()), |file| file.row(logits))
        })?;
        done += part.len();
        Ok(())
    });
    if let Err(e) = result {
        if global.json && e.kind() != Kind::ClosedPipe {
            output::json(
                &json!({"event": "error", "exit": e.kind().exit_code(), "message": e.to_string(), "ids": &ids[..done]}),
            )?;
        }
        return Err(e);
    }
    super::device::keep_pipelines(loaded.gpu());
    if let Some(file) = file {
        file.finish()?;
    }
    let nll = sum / (ids.len() - 1) as f64;
    let eval = start.elapsed().as_secs_f64();
    if global.json {
        return output::json(&json!({
            "event": "done",
            "tokens": ids.len(),
            "predicted": ids.len() - 1,
            "nll": nll,
            "perplexity": nll.exp(),
            "device": loaded.device_name(),
            "adapter": loaded.gpu().map(|g| g.name()),
            "timings": {"load_s": load.as_secs_f64(), "eval_s": eval, "tokens_per_s": ids.len() as f64 / eval.max(1e-9)},
            "bytes": loaded.counters().bytes(),
            "experts": loaded.counters().experts(),
            "peak": model::peak(&progress, &loaded),
        }));
    }
    drop(progress);
    output::text(&format!(
        "tokens {}\nnll {nll:.6} (nats a token, over {} predicted)\nperplexity {:.4}\n",
        ids.len(),
        ids.len() - 1,
        nll.exp()
    ))
}
