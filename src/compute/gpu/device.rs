//! The device: opening it, its memory, submitting and waiting, and every way it can fail.
//!
//! wgpu reports most failures through callbacks, some of them after the call that caused them. [`Gpu`] keeps the first one;
//! from then on every allocation, submission and read is refused with it, so nothing runs on after a failure.

use super::adapter::{self, AdapterEntry, AdapterKind, OPTIONAL, Vram};
use super::buffer::Staging;
use super::pipelines::{Pipelines, one_line};
use crate::error::{Error, Kind, Result};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A mutex whose guard is taken also after a panic elsewhere: what it protects here is always whole.
#[derive(Default)]
pub(super) struct Mutex<T>(StdMutex<T>);

impl<T> Mutex<T> {
    pub(super) fn new(value: T) -> Mutex<T> {
        Mutex(StdMutex::new(value))
    }
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Failures made on purpose, to see what the program does with them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// The allocation with this number (from 0) fails as if memory were out.
    pub fail_allocation: Option<u64>,
    /// The device is lost after this many submissions.
    pub lose_after_submits: Option<u64>,
}

/// How to open a device.
#[derive(Debug, Clone, Default)]
pub struct GpuOptions {
    /// Index or name of the adapter (`--adapter`).
    pub adapter: Option<String>,
    /// Accept a software adapter (`--allow-software`).
    pub allow_software: bool,
    /// Send labels and debug groups to the driver (`--gpu-debug`).
    pub gpu_debug: bool,
    /// Compile kernels with wgpu's run-time checks (bounds, loop bounds, zeroed shared memory).
    pub checked: bool,
    /// A binding limit below the adapter's own, in bytes.
    pub binding_limit: Option<u64>,
    /// Bytes of device memory this program may hold (`--vram`); without it, what the adapter gives.
    pub vram_budget: Option<u64>,
    /// Fill every new activation buffer with NaN, so that a kernel that misses a value is seen.
    pub poison: bool,
    /// Use the subgroup variants of kernels where the adapter has subgroups.
    pub subgroups: bool,
    /// Folder for the driver's compiled pipelines, where the adapter supports that.
    pub pipeline_cache: Option<PathBuf>,
    /// Failures made on purpose.
    pub faults: Faults,
    /// Kernels by name with a source that replaces their own file: for checking that a wrong kernel is found.
    pub replaced_shaders: Vec<(String, String)>,
}

/// Bytes held on the device, shared by the allocations so that each gives its own back.
#[derive(Debug, Default)]
pub(super) struct Account {
    used: AtomicU64,
    peak: AtomicU64,
}

/// A device buffer that gives its bytes back to the account when dropped.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) buffer: wgpu::Buffer,
    account: Arc<Account>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.buffer.size(), Ordering::Relaxed);
    }
}

/// An open device with its adapter and queue.
pub struct Gpu {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) options: GpuOptions,
    pub(super) limits: wgpu::Limits,
    pub(super) features: wgpu::Features,
    pub(super) pipelines: Mutex<Pipelines>,
    pub(super) pipeline_cache: Option<wgpu::PipelineCache>,
    pub(super) staging: Mutex<Staging>,
    /// Uniform buffers for parameters that no recorder holds at present.
    pub(super) parameters: Mutex<Vec<wgpu::Buffer>>,
    cache_file: Option<PathBuf>,
    info: AdapterEntry,
    binding_limit: u64,
    failure: Arc<Mutex<Option<String>>>,
    account: Arc<Account>,
    allocations: AtomicU64,
    submissions: AtomicU64,
}

impl Gpu {
    /// Chooses an adapter and opens it with its own limits.
    ///
    /// # Errors
    /// `Machine` when no adapter is acceptable or it does not open.
    pub fn open(options: GpuOptions) -> Result<Gpu> {
        let instance = adapter::instance(options.gpu_debug);
        let found = adapter::enumerate(&instance);
        let entries: Vec<AdapterEntry> = found.iter().map(|(e, _)| e.clone()).collect();
        let chosen = adapter::choose(&entries, options.adapter.as_deref(), options.allow_software)?;
        let Some((info, handle)) = found.into_iter().nth(chosen) else {
            return Err(Error::machine("no such adapter"));
        };
        let optional = OPTIONAL.iter().fold(wgpu::Features::empty(), |f, (one, _)| f | *one);
        let features = handle.features() & optional;
        let limits = handle.limits();
        let request = handle.request_device(&wgpu::DeviceDescriptor {
            label: Some("trunkline"),
            required_features: features,
            required_limits: limits.clone(),
            ..Default::default()
        });
        let (device, queue) = pollster::block_on(request)
            .map_err(|e| Error::machine("the adapter does not open").device(&info.name).cause(e))?;
        let failure: Arc<Mutex<Option<String>>> = Arc::default();
        let keep = failure.clone();
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
            keep.lock().get_or_insert_with(|| one_line(&e.to_string()));
        }));
        let keep = failure.clone();
        device.set_device_lost_callback(move |reason, message| {
            let why = format!("the device was lost ({reason:?}): {message}");
            keep.lock().get_or_insert_with(|| one_line(&why));
        });
        let cache_file = options
            .pipeline_cache
            .as_ref()
            .filter(|_| features.contains(wgpu::Features::PIPELINE_CACHE))
            .and_then(|folder| Some(folder.join(wgpu::util::pipeline_cache_key(&handle.get_info())?)));
        let pipeline_cache = cache_file.as_ref().map(|file| {
            let data = std::fs::read(file).ok();
            let descriptor = wgpu::PipelineCacheDescriptor {
                label: Some("pipelines"),
                data: data.as_deref(),
                fallback: true,
            };
            // SAFETY: the file is the one `save_pipeline_cache` wrote for this adapter and driver; wgpu checks its
            // header, and data of another driver is dropped (`fallback`).
            unsafe { device.create_pipeline_cache(&descriptor) }
        });
        let binding = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let binding_limit = options.binding_limit.map_or(binding, |l| l.min(binding)) / 256 * 256;
        let gpu = Gpu {
            device,
            queue,
            limits,
            features,
            pipelines: Mutex::default(),
            pipeline_cache,
            staging: Mutex::new(Staging::default()),
            parameters: Mutex::default(),
            cache_file,
            info,
            binding_limit,
            failure,
            account: Arc::default(),
            allocations: AtomicU64::new(0),
            submissions: AtomicU64::new(0),
            options,
        };
        Ok(gpu)
    }

    /// The adapter's name.
    pub fn name(&self) -> &str {
        &self.info.name
    }
    /// The adapter.
    pub fn adapter(&self) -> &AdapterEntry {
        &self.info
    }
    /// Whether the adapter is a software renderer.
    pub fn is_software(&self) -> bool {
        self.info.kind == AdapterKind::Software
    }
    /// The adapter's memory as found when it was opened.
    pub fn vram(&self) -> Option<Vram> {
        self.info.vram
    }
    /// Largest storage binding in bytes: the adapter's, or the lower one asked for.
    pub fn binding_limit(&self) -> u64 {
        self.binding_limit
    }
    /// Bytes of device memory held in buffers now.
    pub fn bytes_used(&self) -> u64 {
        self.account.used.load(Ordering::Relaxed)
    }
    /// The most [`Gpu::bytes_used`] has been.
    pub fn bytes_peak(&self) -> u64 {
        self.account.peak.load(Ordering::Relaxed)
    }
    /// Whether the subgroup variants of kernels run: asked for, and the adapter has subgroups of at least 4 lanes.
    pub fn uses_subgroups(&self) -> bool {
        let has = self.features.contains(wgpu::Features::SUBGROUP) && self.info.subgroup.0 >= 4;
        self.options.subgroups && has
    }
    /// Whether passes can be timed.
    pub fn has_timestamps(&self) -> bool {
        self.features.contains(wgpu::Features::TIMESTAMP_QUERY)
    }

    /// The first failure, if there was one. Everything that touches the device asks this first.
    ///
    /// # Errors
    /// `Device`, with the adapter and the cause.
    pub fn check(&self) -> Result<()> {
        match self.failure.lock().as_deref() {
            None => Ok(()),
            Some(cause) => Err(Error::new(Kind::Device, "the GPU failed")
                .device(self.name())
                .cause(cause)
                .hint("--device cpu goes on without it")),
        }
    }

    /// A device buffer of `bytes` (a multiple of 4) for storage and copies.
    ///
    /// # Errors
    /// `Machine` when it exceeds the binding limit or the budget, `Device` when the driver is out of memory or the
    /// device has failed.
    pub(super) fn allocate(&self, bytes: u64, label: &str) -> Result<Arc<Allocation>> {
        self.check()?;
        let bytes = bytes.max(16).next_multiple_of(4);
        let place = |e: Error| e.tensor(label).device(self.name());
        if bytes > self.binding_limit {
            return Err(place(Error::machine(format!(
                "a buffer of {bytes} bytes exceeds the adapter's limit"
            )))
            .expected(format_args!("at most {}", self.binding_limit), bytes));
        }
        if let Some(budget) = self.options.vram_budget {
            let used = self.bytes_used();
            if used + bytes > budget {
                return Err(place(Error::machine("does not fit in the GPU memory budget"))
                    .cause(format_args!("{bytes} bytes wanted, {used} of {budget} in use"))
                    .hint("raise --vram, or let --device auto keep part of the model in RAM"));
            }
        }
        let out_of_memory = |cause: &str| {
            let used = self.bytes_used();
            place(Error::new(Kind::Device, format!("out of GPU memory for {bytes} bytes")))
                .cause(format_args!("{cause} ({used} bytes in use)"))
                .hint("lower --vram, or close what else uses the GPU")
        };
        let number = self.allocations.fetch_add(1, Ordering::Relaxed);
        if self.options.faults.fail_allocation == Some(number) {
            return Err(out_of_memory("injected failure"));
        }
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let invalid = pollster::block_on(validation.pop());
        if let Some(e) = pollster::block_on(memory.pop()) {
            return Err(out_of_memory(&one_line(&e.to_string())));
        }
        if let Some(e) = invalid {
            return Err(place(Error::new(Kind::Device, format!("cannot make a buffer of {bytes} bytes")))
                .cause(one_line(&e.to_string())));
        }
        self.check()?;
        let used = self.account.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.account.peak.fetch_max(used, Ordering::Relaxed);
        Ok(Arc::new(Allocation { buffer, account: self.account.clone() }))
    }

    /// A buffer the host maps: for staging, read-backs and query results. Not counted against the budget.
    pub(super) fn host_buffer(
        &self,
        bytes: u64,
        usage: wgpu::BufferUsages,
        label: &str,
    ) -> Result<wgpu::Buffer> {
        self.check()?;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let mapped = usage.contains(wgpu::BufferUsages::MAP_WRITE);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes.next_multiple_of(4),
            usage,
            mapped_at_creation: mapped,
        });
        match pollster::block_on(scope.pop()) {
            None => Ok(buffer),
            Some(e) => Err(Error::new(Kind::Device, format!("out of memory for {bytes} bytes of {label}"))
                .device(self.name())
                .cause(one_line(&e.to_string()))),
        }
    }

    /// Hands commands to the device.
    ///
    /// # Errors
    /// `Device` when it has failed, before or in this call.
    pub(super) fn submit(&self, commands: wgpu::CommandBuffer) -> Result<wgpu::SubmissionIndex> {
        self.check()?;
        let index = self.queue.submit([commands]);
        let count = self.submissions.fetch_add(1, Ordering::Relaxed) + 1;
        if self.options.faults.lose_after_submits == Some(count) {
            self.device.destroy();
            // The callback runs in a poll.
            let _ = self.device.poll(wgpu::PollType::Poll);
        }
        self.check()?;
        Ok(index)
    }

    /// Waits until a submission is done.
    ///
    /// # Errors
    /// `Device` when the device fails or does not answer for ten minutes.
    pub(super) fn wait(&self, index: &wgpu::SubmissionIndex) -> Result<()> {
        let begun = Instant::now();
        loop {
            self.check()?;
            let slice = wgpu::PollType::Wait {
                submission_index: Some(index.clone()),
                timeout: Some(Duration::from_secs(1)),
            };
            match self.device.poll(slice) {
                Ok(_) => return self.check(),
                Err(wgpu::PollError::Timeout) if begun.elapsed() < Duration::from_secs(600) => {}
                Err(e) => {
                    self.check()?;
                    return Err(Error::new(Kind::Device, "the GPU does not answer")
                        .device(self.name())
                        .cause(e)
                        .hint("--device cpu goes on without it"));
                }
            }
        }
    }

    /// Writes the driver's compiled pipelines, for the next start. Does nothing without a cache folder.
    ///
    /// # Errors
    /// `Io` when the file cannot be written.
    pub fn save_pipeline_cache(&self) -> Result<()> {
        let (Some(file), Some(cache)) = (&self.cache_file, &self.pipeline_cache) else {
            return Ok(());
        };
        let Some(data) = cache.get_data() else {
            return Ok(());
        };
        let fail = |e| Error::io("cannot write the pipeline cache", e).file(file);
        // Beside it first: an interrupted write must not leave half a file under the name.
        let beside = file.with_extension("new");
        std::fs::write(&beside, data).and_then(|()| std::fs::rename(&beside, file)).map_err(fail)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("adapter", &self.info.name)
            .field("bytes_used", &self.bytes_used())
            .finish()
    }
}
