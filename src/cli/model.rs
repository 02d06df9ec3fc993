//! From flags to an opened model.

use super::{Global, MachineFlags, ModelFlags, RunFlags, device};
use crate::checkpoint::demo;
use crate::checkpoint::shards::Checkpoint;
pub use crate::checkpoint::verify::tokenizer;
use crate::error::{Error, Result};
use crate::memory::machine;
use crate::model::{GpuPlan, Model, Options};
use crate::report::progress::{Progress, human};
use crate::report::trace::Trace;
use crate::text::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Left to the rest of the system by default: a tenth of what is free, at least this.
const MARGIN: u64 = 512 << 20;

/// Set by the first Ctrl-C (or SIGTERM); the second ends the process at once.
pub fn interruptible() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // Registered first, so that it acts on the signal after the one that set the flag.
        signal_hook::flag::register_conditional_shutdown(signal, 130, flag.clone())
            .and_then(|_| signal_hook::flag::register(signal, flag.clone()))
            .map_err(|e| Error::io("cannot watch for Ctrl-C", e))?;
    }
    Ok(flag)
}

/// Opens the checkpoint that was named, or the embedded demo.
pub fn checkpoint(flags: &ModelFlags, progress: &Progress) -> Result<Arc<Checkpoint>> {
    if flags.model.is_empty() {
        progress.say(
            "no --model: running the embedded demo checkpoint (small, synthetic weights: its text is noise)",
        );
        return Ok(Arc::new(demo::open()?));
    }
    progress.phase("opening");
    Ok(Arc::new(Checkpoint::open(&flags.model)?))
}

/// What is missing for text to become ids.
pub fn no_tokenizer(checkpoint: &Checkpoint) -> Error {
    Error::refused("the checkpoint has no tokenizer")
        .file(checkpoint.root())
        .expected("tiktoken.model or tokenizer.json", "neither")
        .hint("give ids with --ids")
}

/// Ids that end a text: the configuration's, the generation configuration's, and the two end markers of the format.
pub fn stop_ids(checkpoint: &Checkpoint, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    let mut ids = vec![checkpoint.config().eos_token_id];
    if let Some(file) = &checkpoint.tokenizer_files()?.generation_config {
        let value: Value = serde_json::from_slice(file.bytes()).map_err(|e| {
            Error::refused("cannot read the generation configuration").file(&file.path).cause(e)
        })?;
        let eos = &value["eos_token_id"];
        let listed = eos.as_array().map_or(std::slice::from_ref(eos), Vec::as_slice);
        for id in listed.iter().filter(|v| !v.is_null()) {
            ids.push(id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                Error::refused("cannot read the generation configuration")
                    .file(&file.path)
                    .key("eos_token_id")
                    .expected("a token id or a list of them", eos)
            })?);
        }
    }
    if let Some(t) = tokenizer {
        ids.extend(["[EOS]", "[EOT]"].iter().filter_map(|name| t.special_id(name)));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// What a model is opened for.
pub struct Purpose {
    /// Positions to plan for.
    pub context: usize,
    /// Whether the logits of every position are wanted.
    pub all_logits: bool,
    /// Set when the user wants to stop.
    pub cancel: Arc<AtomicBool>,
    /// Where the run is recorded, if it is.
    pub trace: Option<Arc<Trace>>,
}

/// Plans and opens the model; prints the plan, then reads what stays in memory.
pub fn open(
    checkpoint: Arc<Checkpoint>,
    flags: &RunFlags,
    global: &Global,
    purpose: Purpose,
    progress: &Progress,
) -> Result<Arc<Model>> {
    check_context(&checkpoint, purpose.context)?;
    let gpu = device::open(&flags.device, progress)?;
    let context = purpose.context;
    let model = prepare(checkpoint, &flags.machine, gpu, purpose, progress)?;
    if global.json {
        super::output::json(&plan(&model, context))?;
    }
    load(model, progress)
}

/// Refuses a context that the model was not made for.
pub fn check_context(checkpoint: &Checkpoint, context: usize) -> Result<()> {
    let most = checkpoint.config().max_position_embeddings;
    if context > most {
        return Err(Error::usage(format!("a context of {context} is more than the model's {most}")));
    }
    Ok(())
}

/// Plans the model and says the plan; reads no weight yet.
pub fn prepare(
    checkpoint: Arc<Checkpoint>,
    flags: &MachineFlags,
    gpu: Option<GpuPlan>,
    purpose: Purpose,
    progress: &Progress,
) -> Result<Model> {
    let Purpose { context, all_logits, cancel, trace } = purpose;
    let memory = machine::memory();
    let budget = match (flags.ram, memory) {
        (Some(ram), _) => ram,
        (None, Some(m)) => m.available.saturating_sub(MARGIN.max(m.available / 10)),
        (None, None) => {
            return Err(Error::machine("cannot find out how much memory is free").hint("give --ram SIZE"));
        }
    };
    progress.phase("planning");
    let model = Model::open(
        checkpoint,
        Options {
            threads: flags.threads.unwrap_or_else(machine::default_threads),
            context,
            chunk: flags.prefill_chunk.min(context),
            all_logits,
            budget,
            io_depth: flags.io_depth,
            cancel,
            gpu,
            trace,
            ..Options::default()
        },
    )?;
    let p = model.placement();
    let layers = model.config().layers.len();
    let on_gpu = match model.gpu() {
        Some(gpu) => format!(
            " + {} ({}/{layers} layers in {} of GPU memory)",
            gpu.name(),
            model.gpu_layers(),
            human(model.gpu_budget())
        ),
        None => String::new(),
    };
    progress.say(&format!(
        "plan: {}: cpu ({}, {} threads){on_gpu}, context {context}; state {}, scratch {}, trunk {} in memory ({}/{layers} layers), {} streamed per pass through {}, {} experts cached in {}; {} of {}",
        model.device_name(),
        model.cpu.isa.name(),
        model.cpu.threads(),
        human(p.state),
        human(p.scratch),
        human(p.trunk),
        model.resident_layers(),
        human(p.streamed),
        human(p.ring),
        p.expert_slots,
        human(p.expert_cache),
        human(p.total()),
        human(p.budget),
    ));
    Ok(model)
}

/// Reads what stays in memory.
pub fn load(model: Model, progress: &Progress) -> Result<Arc<Model>> {
    progress.watch(model.counters().clone());
    progress.phase("loading");
    model.load(&mut &*progress)?;
    Ok(Arc::new(model))
}

/// The plan event.
fn plan(model: &Model, context: usize) -> Value {
    let p = model.placement();
    json!({
        "event": "plan",
        "device": model.device_name(),
        "adapter": model.gpu().map(|g| g.name()),
        "gpu_layers": model.gpu_layers(),
        "vram": model.gpu_budget(),
        "isa": model.cpu.isa.name(),
        "threads": model.cpu.threads(),
        "context": context,
        "layers": model.config().layers.len(),
        "resident_layers": model.resident_layers(),
        "memory": p,
    })
}

/// The `peak` object of a report.
pub fn peak(progress: &Progress, model: &Model) -> Value {
    json!({ "rss": progress.peak(), "vram": model.gpu().map_or(0, |g| g.bytes_peak()) })
}
