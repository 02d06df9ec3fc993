//! `trunkline compare`

use super::device::{AdapterFlags, Device};
use super::generate::read_text;
use super::{Global, MachineFlags, ModelFlags, card, model, output};
use crate::checkpoint::shards::Checkpoint;
use crate::compute::gpu::Gpu;
use crate::error::{Error, Result};
use crate::model::forward::Scratch;
use crate::report::compare::{Comparison, First, OpsReport};
use crate::report::progress::Progress;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// What is fed to the embedded demo when nothing is given.
const DEMO_PROMPT: &str =
    "The trunk is read once, the experts as they are chosen, and both devices answer alike.";

#[derive(Args)]
pub struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    pub(super) adapter: AdapterFlags,
    #[command(flatten)]
    pub(super) machine: MachineFlags,
    /// Ids to feed
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', group = "input")]
    ids: Option<Vec<u32>>,
    /// Text to feed
    #[arg(long, value_name = "TEXT", group = "input")]
    prompt: Option<String>,
    /// File with the text to feed; - is stdin
    #[arg(long, value_name = "FILE", group = "input")]
    text: Option<PathBuf>,
    /// The two devices, in the order in which they run; errors are relative to the first
    #[arg(long, value_enum, value_name = "A,B", value_delimiter = ',', num_args = 1.., default_value = "cpu,gpu")]
    devices: Vec<Device>,
    /// Runs the table of operations on the adapter alone, and names a wrong one
    #[arg(long, group = "input",
        conflicts_with_all = ["devices", "context", "ram", "threads", "prefill_chunk", "io_depth", "vram"])]
    ops: bool,
    /// Reports on a card: a slice of the network (1.7 GB, written to the folder for temporary files and removed) on the CPU
    /// and on the card, the rate of each kernel beside the card's own copy rate, and tokens/s
    #[arg(long, group = "input", conflicts_with_all = ["devices", "context"])]
    card: bool,
}

pub fn run(f: &Flags, global: &Global) -> Result<()> {
    // The environment's model is a default and may stand; one that was typed would be ignored.
    let typed = |a: std::ffi::OsString| a == "--model" || a.as_encoded_bytes().starts_with(b"--model=");
    if (f.card || f.ops) && std::env::args_os().any(typed) {
        return Err(Error::usage("--model does nothing beside --card or --ops").hint("leave it out"));
    }
    let cancel = model::interruptible()?;
    let progress = Progress::start(global.quiet);
    if f.card {
        return card::run(f, global, &cancel, progress);
    }
    if f.ops {
        let gpu = f.adapter.open(&progress)?;
        progress.phase("checking the adapter's operations");
        let report = OpsReport::run(&gpu)?;
        return finish(global, progress, &report, &report.text(), &report.failures);
    }
    let &[first, second] = f.devices.as_slice() else {
        return Err(Error::usage("--devices takes two devices").expected("two, as cpu,gpu", f.devices.len()));
    };
    let devices = [first, second];
    if let (true, Some(flag)) = (devices == [Device::Cpu; 2], f.adapter.given()) {
        return Err(Error::usage(format!("{flag} does nothing when both devices are the CPU")));
    }
    let checkpoint = model::checkpoint(&f.model, &progress)?;
    let ids = ids(f, &checkpoint)?;
    let report = compare(f, devices, checkpoint, &ids, &cancel, &progress)?;
    finish(global, progress, &report, &report.text(), &report.failures)
}

/// Prints a report; what it found wrong is the error of the run.
pub(super) fn finish(
    global: &Global,
    progress: Progress,
    report: &impl Serialize,
    text: &str,
    failures: &[String],
) -> Result<()> {
    drop(progress);
    match global.json {
        true => output::json(report)?,
        false => output::text(text)?,
    }
    match failures {
        [] => Ok(()),
        some => Err(Error::run("the comparison failed").cause(some.join("; "))),
    }
}

fn ids(f: &Flags, checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    let text = match (&f.ids, &f.prompt, &f.text) {
        (Some(ids), _, _) => return Ok(ids.clone()),
        (_, Some(text), _) => text.clone(),
        (_, _, Some(path)) => read_text(path)?,
        _ if f.model.model.is_empty() => DEMO_PROMPT.to_owned(),
        _ => {
            return Err(Error::usage("there is nothing to feed")
                .hint("give --ids 1,2,3, --prompt TEXT or --text FILE"));
        }
    };
    model::tokenizer(checkpoint)?.ok_or_else(|| model::no_tokenizer(checkpoint))?.encode(&text, false)
}

/// Runs `ids` on both devices, one after the other.
pub(super) fn compare(
    f: &Flags,
    devices: [Device; 2],
    checkpoint: Arc<Checkpoint>,
    ids: &[u32],
    cancel: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Comparison> {
    if ids.len() < 2 {
        return Err(Error::usage("compare needs at least 2 tokens").expected("2 or more", ids.len()));
    }
    let context = f.machine.context.unwrap_or(ids.len());
    if ids.len() > context {
        return Err(Error::usage(format!("{} tokens do not fit a context of {context}", ids.len()))
            .hint("raise --context"));
    }
    model::check_context(&checkpoint, context)?;
    // Opened before anything is computed: a missing adapter is said at once, and its limits bound the passes of both.
    let mut gpu = match devices == [Device::Cpu; 2] {
        true => None,
        false => Some(f.adapter.open(progress)?),
    };
    let mut chunk = f.machine.prefill_chunk.min(ids.len());
    let mut ops = None;
    if let Some(gpu) = &gpu {
        chunk = chunk.min(Scratch::most_tokens(checkpoint.config(), gpu.binding_limit(), true));
        progress.phase("checking the adapter's operations");
        ops = Some(OpsReport::run(gpu)?);
    }
    let open = |device: Device, gpu: &mut Option<Gpu>| {
        let begun = Instant::now();
        let plan = match device {
            Device::Cpu => None,
            other => {
                let gpu = gpu.take().map_or_else(|| f.adapter.open(progress), Ok)?;
                Some(f.adapter.plan(gpu, other == Device::Gpu)?)
            }
        };
        let purpose = model::Purpose { context, all_logits: true, cancel: cancel.clone(), trace: None };
        let model = model::prepare(checkpoint.clone(), &f.machine, plan, purpose, progress)?;
        let model = model::load(model, progress)?;
        progress.phase(format!("feeding {} tokens to the {}", ids.len(), model.device_name()));
        Ok::<_, Error>((model, begun.elapsed().as_secs_f64()))
    };
    let first = {
        let (model, load_s) = open(devices[0], &mut gpu)?;
        First::run(&model, ids, chunk, load_s, &mut &*progress)?
    };
    let (model, load_s) = open(devices[1], &mut gpu)?;
    first.against(&model, load_s, ops, &mut &*progress)
}
