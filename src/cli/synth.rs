//! `trunkline synth`

use super::{Global, model, output, positive};
use crate::checkpoint::synth::{Preset, SynthOptions, synth};
use crate::error::{Error, Result};
use crate::report::progress::{Progress, human};
use clap::{Args, ValueEnum};
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

#[derive(Clone, Copy, ValueEnum)]
enum Widths {
    /// The whole graph at toy width, with a tokenizer (4 MB)
    Tiny,
    /// The released widths with 5 layers and 64 experts (11.5 GB)
    Slice,
    /// The release's layout in full (1.56 TB; with --sparse a few hundred MB)
    Released,
}

#[derive(Args)]
pub struct Flags {
    /// Folder to write: empty, or not there yet
    dir: PathBuf,
    /// Where the widths come from
    #[arg(long, value_enum, default_value = "tiny")]
    preset: Widths,
    /// Layers, in the release's pattern
    #[arg(long, value_name = "N", value_parser = positive)]
    layers: Option<usize>,
    /// Routed experts of a layer
    #[arg(long, value_name = "N", value_parser = positive)]
    experts: Option<usize>,
    /// Experts chosen per token
    #[arg(long, value_name = "N", value_parser = positive)]
    experts_per_token: Option<usize>,
    /// hidden_size
    #[arg(long, value_name = "N", value_parser = positive)]
    hidden: Option<usize>,
    /// vocab_size; 2048 comes with a tokenizer
    #[arg(long, value_name = "N", value_parser = positive)]
    vocab: Option<usize>,
    /// Width of the dense MLP
    #[arg(long, value_name = "N", value_parser = positive)]
    intermediate: Option<usize>,
    /// Width of an expert
    #[arg(long, value_name = "N", value_parser = positive)]
    moe_intermediate: Option<usize>,
    /// Latent width of the experts
    #[arg(long, value_name = "N", value_parser = positive)]
    latent: Option<usize>,
    /// Heads of both kinds of attention
    #[arg(long, value_name = "N", value_parser = positive)]
    heads: Option<usize>,
    /// Chooses the values
    #[arg(long, value_name = "N", default_value = "0")]
    seed: u64,
    /// Holes instead of large tensors: they read as zeros and take no space
    #[arg(long)]
    sparse: bool,
}

pub fn run(flags: &Flags, global: &Global) -> Result<()> {
    let cancel = model::interruptible()?;
    let progress = Progress::start(global.quiet || global.json);
    progress.phase("preparing");
    let options = SynthOptions {
        preset: match flags.preset {
            Widths::Tiny => Preset::Tiny,
            Widths::Slice => Preset::Slice,
            Widths::Released => Preset::Released,
        },
        layers: flags.layers,
        experts: flags.experts,
        experts_per_token: flags.experts_per_token,
        hidden: flags.hidden,
        vocab: flags.vocab,
        intermediate: flags.intermediate,
        moe_intermediate: flags.moe_intermediate,
        latent: flags.latent,
        heads: flags.heads,
        seed: flags.seed,
        sparse: flags.sparse,
    };
    let begun = Instant::now();
    let report = synth(&flags.dir, &options, &|done, total| {
        progress.phase(format!("writing {}", human(total)));
        progress.bytes(done);
        if cancel.load(Ordering::Relaxed) { Err(Error::interrupted()) } else { Ok(()) }
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    drop(progress);
    if global.json {
        return output::json(&json!({
            "dir": flags.dir,
            "files": report.files,
            "bytes": report.bytes,
            "apparent_bytes": report.apparent_bytes,
            "seconds": seconds,
            "bytes_per_s": report.bytes as f64 / seconds.max(1e-9),
        }));
    }
    let holes = match report.apparent_bytes == report.bytes {
        true => String::new(),
        false => format!(" of {}, the rest holes", human(report.apparent_bytes)),
    };
    output::text(&format!(
        "{}: {} files, {} written{holes}, in {seconds:.1} s ({}/s)\n",
        flags.dir.display(),
        report.files,
        human(report.bytes),
        human((report.bytes as f64 / seconds.max(1e-9)) as u64),
    ))
}
