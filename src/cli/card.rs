//! `trunkline compare --card`

use super::Global;
use super::compare::{Flags, compare, finish};
use super::device::Device;
use crate::checkpoint::shards::Checkpoint;
use crate::checkpoint::synth::{Preset, SynthOptions, synth};
use crate::compute::gpu::rates::{Sizes, copy_rate, kernel_rates};
use crate::error::{Error, Result};
use crate::report::card::{CardReport, RateReport, SliceReport, SystemReport};
use crate::report::compare::AdapterReport;
use crate::report::progress::{Progress, human};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Tokens fed to the slice.
const TOKENS: u32 = 24;

/// Two layers, one of each kind of attention and of each kind of feed-forward. On a card the hidden and expert widths are
/// the release's, and heads, dense MLP, experts and vocabulary are fewer, so that it is 1.7 GB.
fn options(software: bool) -> SynthOptions {
    let layers = Some(2);
    match software {
        true => SynthOptions { layers, ..SynthOptions::default() },
        false => SynthOptions {
            preset: Preset::Slice,
            layers,
            experts: Some(32),
            heads: Some(24),
            intermediate: Some(8448),
            vocab: Some(2048),
            ..SynthOptions::default()
        },
    }
}

/// Writes the slice.
fn slice(
    dir: &Path,
    software: bool,
    cancel: &AtomicBool,
    progress: &Progress,
) -> Result<(Arc<Checkpoint>, SliceReport)> {
    let begun = Instant::now();
    let report = synth(dir, &options(software), &|done, total| {
        progress.phase(format!("writing {}", human(total)));
        progress.bytes(done);
        if cancel.load(Ordering::Relaxed) { Err(Error::interrupted()) } else { Ok(()) }
    })?;
    let write_s = begun.elapsed().as_secs_f64();
    let checkpoint = Arc::new(Checkpoint::open(&[dir.to_path_buf()])?);
    let c = checkpoint.config();
    let slice = SliceReport {
        widths: if software { "tiny" } else { "released" },
        layers: c.layers.len(),
        experts: c.moe.experts,
        heads: c.kda.heads,
        bytes: report.bytes,
        write_s,
    };
    Ok((checkpoint, slice))
}

/// Measures the card and runs the slice on it.
pub fn run(f: &Flags, global: &Global, cancel: &Arc<AtomicBool>, progress: Progress) -> Result<()> {
    let begun = Instant::now();
    let stopped = || if cancel.load(Ordering::Relaxed) { Err(Error::interrupted()) } else { Ok(()) };
    let gpu = f.adapter.open(&progress)?;
    let (adapter, software) = (AdapterReport::of(gpu.adapter()), gpu.is_software());
    let sizes = if software { Sizes::SMALL } else { Sizes::RELEASED };
    progress.phase("measuring copies");
    let copy = copy_rate(&gpu, &sizes)?;
    progress.phase("measuring kernels");
    let mut kernels = Vec::new();
    for rate in kernel_rates(&gpu, &sizes, &mut |r| progress.phase(format!("measured {}", r.name)))? {
        kernels.push(RateReport::of(&rate, &copy));
    }
    // Its memory is the slice's now.
    drop(gpu);
    stopped()?;
    let folder = tempfile::Builder::new()
        .prefix("trunkline-card-")
        .tempdir()
        .map_err(|e| Error::io("cannot make a temporary folder", e).file(std::env::temp_dir()))?;
    let (checkpoint, slice) = slice(folder.path(), software, cancel, &progress)?;
    progress.bytes(0);
    let vocab = checkpoint.config().vocab_size as u32;
    let ids: Vec<u32> = (0..TOKENS).map(|i| (i * 97 + 11) % vocab).collect();
    let parity = compare(f, [Device::Cpu, Device::Gpu], checkpoint, &ids, cancel, &progress)?;
    progress.phase("removing the slice");
    folder.close().map_err(|e| Error::io("cannot remove the temporary folder", e))?;
    let cpu = crate::compute::cpu::Isa::detect()?;
    let report = CardReport {
        passed: parity.passed,
        failures: parity.failures.clone(),
        trunkline: env!("CARGO_PKG_VERSION"),
        system: SystemReport {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            isa: cpu.name(),
            threads: f.machine.threads.unwrap_or_else(crate::memory::machine::default_threads),
        },
        adapter,
        slice,
        decode_tokens_per_s: parity.devices[1].decode.tokens_per_s,
        parity,
        copy: RateReport::of(&copy, &copy),
        kernels,
        seconds: begun.elapsed().as_secs_f64(),
    };
    finish(global, progress, &report, &report.text(), &report.failures)
}
