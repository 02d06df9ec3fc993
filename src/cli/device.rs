//! Which device computes.

use crate::compute::gpu::{AdapterEntry, AdapterKind, Faults, Gpu, GpuOptions, adapter, self_test};
use crate::error::{Error, Kind, Result};
use crate::model::GpuPlan;
use crate::report::progress::{Progress, human};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Where the layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// Whole layers on the GPU as far as its memory goes, the others on the CPU; the CPU alone without a GPU
    Auto,
    /// Everything on the GPU
    Gpu,
    /// Everything on the CPU; no adapter is opened
    Cpu,
}

/// The flags that choose a device.
#[derive(Args, Clone)]
pub struct DeviceFlags {
    /// Where the layers are computed
    #[arg(long, value_enum, default_value = "auto", value_name = "DEVICE")]
    pub device: Device,
    #[command(flatten)]
    pub adapter: AdapterFlags,
}

/// The flags that choose an adapter.
#[derive(Args, Clone)]
pub struct AdapterFlags {
    /// GPU adapter by name or index
    #[arg(long, value_name = "NAME|INDEX")]
    pub adapter: Option<String>,
    /// Accept a software adapter (lavapipe, SwiftShader, WARP)
    #[arg(long)]
    pub allow_software: bool,
    /// GPU memory to use, e.g. 20GB [default: what is free, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = super::size::parse)]
    pub vram: Option<u64>,
    /// Send labels and debug groups to the driver, for a vendor's profiler
    #[arg(long)]
    pub gpu_debug: bool,
}

/// The user's folder for what can be made again, where there is one.
pub fn cache_folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|h| h.join(".cache"))).map(|c| c.join("trunkline"))
}

/// Opens the GPU that the flags ask for, after its operations have been checked once against the CPU's.
/// `None` when the CPU is to do everything.
pub fn open(flags: &DeviceFlags, progress: &Progress) -> Result<Option<GpuPlan>> {
    if flags.device == Device::Cpu {
        return match flags.adapter.given() {
            Some(flag) => Err(Error::usage(format!("{flag} does nothing under --device cpu"))
                .hint("leave it out, or choose --device auto or gpu")),
            None => Ok(None),
        };
    }
    if flags.device == Device::Auto && flags.adapter.vram == Some(0) {
        return Ok(None);
    }
    let gpu = match flags.adapter.open(progress) {
        Ok(gpu) => gpu,
        // A named adapter that is not there is a mistake to be told, not to be passed over.
        Err(e)
            if flags.device == Device::Auto
                && flags.adapter.adapter.is_none()
                && e.kind() == Kind::Machine =>
        {
            progress.say(&format!("no GPU: {e}; computing on the CPU"));
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    check_once(&gpu, progress)?;
    flags.adapter.plan(gpu, flags.device == Device::Gpu).map(Some)
}

impl AdapterFlags {
    /// The first of these flags that was given and asks for something.
    pub fn given(&self) -> Option<&'static str> {
        let asked = [
            (self.adapter.is_some(), "--adapter"),
            (self.allow_software, "--allow-software"),
            (self.gpu_debug, "--gpu-debug"),
            (self.vram.is_some_and(|v| v > 0), "--vram"),
        ];
        asked.iter().find(|(given, _)| *given).map(|(_, flag)| *flag)
    }

    /// Opens the adapter; its operations are not checked.
    pub fn open(&self, progress: &Progress) -> Result<Gpu> {
        progress.phase("opening the GPU");
        let adapters = adapter::list();
        let chosen = adapter::choose(&adapters, self.adapter.as_deref(), self.allow_software)?;
        Gpu::open(GpuOptions {
            // A software adapter is there to judge the kernels that every adapter can run.
            subgroups: adapters[chosen].kind != AdapterKind::Software,
            adapter: self.adapter.clone(),
            allow_software: self.allow_software,
            gpu_debug: self.gpu_debug,
            pipeline_cache: cache_folder(),
            vram_budget: self.vram,
            faults: Faults { lose_after_submits: lose_after()?, ..Faults::default() },
            ..GpuOptions::default()
        })
    }

    /// What is to be done with an opened adapter.
    pub fn plan(&self, gpu: Gpu, everything: bool) -> Result<GpuPlan> {
        let budget = match (self.vram, gpu.vram()) {
            (Some(vram), _) => vram,
            (None, Some(v)) => v.free - v.free / 10,
            (None, None) => {
                return Err(Error::machine("cannot find out how much GPU memory is free")
                    .device(gpu.name())
                    .hint("give --vram SIZE"));
            }
        };
        log::info!("adapter {}, {} of GPU memory", gpu.name(), human(budget));
        Ok(GpuPlan { gpu, budget, everything })
    }
}

/// `TRUNKLINE_LOSE_GPU_AFTER=N` loses the device on purpose after N submissions: how the tests see what a run does then.
fn lose_after() -> Result<Option<u64>> {
    let name = "TRUNKLINE_LOSE_GPU_AFTER";
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let number = value.to_str().and_then(|v| v.parse().ok());
    number.map(Some).ok_or_else(|| Error::usage(format!("{name} is not a number")))
}

/// Keeps the driver's compiled pipelines for the next start, where the driver has them to give.
pub fn keep_pipelines(gpu: Option<&Gpu>) {
    if let Some(Err(e)) = gpu.map(Gpu::save_pipeline_cache) {
        log::warn!("{e}");
    }
}

/// What identifies an adapter whose operations were found right, and the version of the operations.
fn verdict_name(a: &AdapterEntry) -> String {
    let plain =
        |s: &str| -> String { s.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect() };
    format!("ops-{}-{}-{}.ok", env!("CARGO_PKG_VERSION"), plain(&a.name), plain(&a.driver))
}

/// Runs the operation table on first use of an adapter and driver. A wrong operation refuses the adapter.
fn check_once(gpu: &Gpu, progress: &Progress) -> Result<()> {
    let file = cache_folder().map(|c| c.join(verdict_name(gpu.adapter())));
    if file.as_ref().is_some_and(|f| f.exists()) {
        return Ok(());
    }
    progress.phase("first use of this adapter: checking its operations");
    self_test(gpu)?;
    let Some(file) = file else { return Ok(()) };
    let kept =
        file.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::write(&file, b"ok\n"));
    if let Err(e) = kept {
        log::warn!("the check of the adapter cannot be remembered ({}): {e}", file.display());
    }
    Ok(())
}
