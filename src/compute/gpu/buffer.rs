//! Activations on the device, and moving bytes to and from it.

use super::device::{Allocation, Gpu};
use crate::error::{Error, Kind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// A range of a device buffer, as it is bound.
#[derive(Debug, Clone)]
pub struct Region {
    pub(super) allocation: Arc<Allocation>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Region {
    pub(super) fn new(gpu: &Gpu, bytes: u64, label: &str) -> Result<Region> {
        Ok(Region {
            allocation: gpu.allocate(bytes, label)?,
            offset: 0,
            bytes: bytes.max(16).next_multiple_of(4),
        })
    }

    pub(super) fn binding(&self) -> wgpu::BindingResource<'_> {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: &self.allocation.buffer,
            offset: self.offset,
            size: std::num::NonZeroU64::new(self.bytes),
        })
    }
}

/// A row-major matrix of 32-bit words on the device: f32 activations, or integers where an operation says so.
#[derive(Debug, Clone)]
pub struct GpuTensor {
    /// Rows, one a token unless said otherwise.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    pub(super) region: Region,
}

impl GpuTensor {
    /// A new `[rows, cols]` tensor. Its content is undefined (zeros, or NaN in poison mode) until written.
    ///
    /// # Errors
    /// As for any allocation: `Machine` beyond the binding limit or the budget, `Device` when memory is out.
    pub fn new(gpu: &Gpu, rows: usize, cols: usize, label: &str) -> Result<GpuTensor> {
        let region = Region::new(gpu, 4 * rows as u64 * cols as u64, label)?;
        let tensor = GpuTensor { rows, cols, region };
        if gpu.options.poison {
            // A NaN with a payload that no kernel makes.
            let nan = vec![0x7fc0_deadu32; (tensor.region.bytes / 4) as usize];
            gpu.write(&tensor.region, bytemuck::cast_slice(&nan))?;
        }
        Ok(tensor)
    }

    /// A tensor that holds `values`.
    ///
    /// # Errors
    /// `Run` when `values` is not `rows * cols` long; as [`GpuTensor::new`].
    pub fn from_slice(gpu: &Gpu, rows: usize, cols: usize, values: &[f32], label: &str) -> Result<GpuTensor> {
        GpuTensor::from_words(gpu, rows, cols, bytemuck::cast_slice(values), label)
    }

    /// A tensor that holds integers.
    ///
    /// # Errors
    /// As [`GpuTensor::from_slice`].
    pub fn from_words(gpu: &Gpu, rows: usize, cols: usize, words: &[u32], label: &str) -> Result<GpuTensor> {
        let region = Region::new(gpu, 4 * rows as u64 * cols as u64, label)?;
        let tensor = GpuTensor { rows, cols, region };
        tensor.write_words(gpu, words)?;
        Ok(tensor)
    }

    /// The same values seen as `[rows, cols]`.
    ///
    /// # Errors
    /// `Run` when the number of values differs.
    pub fn reshape(&self, rows: usize, cols: usize) -> Result<GpuTensor> {
        if rows * cols != self.len() {
            return Err(Error::run("reshape").expected(self.len(), rows * cols));
        }
        Ok(GpuTensor { rows, cols, region: self.region.clone() })
    }

    /// The first `rows * cols` values seen as `[rows, cols]`.
    ///
    /// # Errors
    /// `Run` when there are fewer.
    pub fn prefix(&self, rows: usize, cols: usize) -> Result<GpuTensor> {
        if rows * cols > self.len() || rows * cols == 0 {
            return Err(
                Error::run("view of a tensor").expected(format_args!("1 to {}", self.len()), rows * cols)
            );
        }
        let mut region = self.region.clone();
        region.bytes = (4 * rows as u64 * cols as u64).max(16).min(region.bytes);
        Ok(GpuTensor { rows, cols, region })
    }

    /// The first `rows` rows.
    ///
    /// # Errors
    /// `Run` when there are fewer.
    pub fn first_rows(&self, rows: usize) -> Result<GpuTensor> {
        if rows == 0 || rows > self.rows {
            return Err(Error::run("too many rows").expected(format_args!("1 to {}", self.rows), rows));
        }
        let mut region = self.region.clone();
        region.bytes = (4 * rows as u64 * self.cols as u64).max(16).min(region.bytes);
        Ok(GpuTensor { rows, cols: self.cols, region })
    }

    /// Values in the tensor.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }
    /// Whether it holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces all values, before anything that is submitted after this call.
    ///
    /// # Errors
    /// `Run` on another length, `Device` when the device has failed.
    pub fn write(&self, gpu: &Gpu, values: &[f32]) -> Result<()> {
        self.write_words(gpu, bytemuck::cast_slice(values))
    }

    /// As [`GpuTensor::write`], for integers.
    ///
    /// # Errors
    /// As [`GpuTensor::write`].
    pub fn write_words(&self, gpu: &Gpu, words: &[u32]) -> Result<()> {
        if words.len() != self.len() {
            return Err(Error::run("upload of another size").expected(self.len(), words.len()));
        }
        gpu.write(&self.region, bytemuck::cast_slice(words))
    }
}

/// Equal tensors side by side in one buffer, each bindable alone: the sources of the residual mix.
#[derive(Debug, Clone)]
pub struct GpuSlots {
    /// How many.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
    /// Floats from one to the next.
    pub(super) stride: usize,
    pub(super) region: Region,
}

impl GpuSlots {
    /// `count` tensors `[rows, cols]`.
    ///
    /// # Errors
    /// As [`GpuTensor::new`].
    pub fn new(gpu: &Gpu, count: usize, rows: usize, cols: usize, label: &str) -> Result<GpuSlots> {
        // A binding begins at a multiple of the adapter's alignment, at most 256 bytes.
        let stride = (rows * cols).max(4).next_multiple_of(64);
        let whole = GpuTensor::new(gpu, count, stride, label)?;
        Ok(GpuSlots { count, rows, cols, stride, region: whole.region })
    }

    /// The same slots used for passes of `rows` tokens, packed from the start of each.
    ///
    /// # Errors
    /// `Run` when a slot has fewer rows.
    pub fn with_rows(&self, rows: usize) -> Result<GpuSlots> {
        if rows == 0 || rows * self.cols > self.stride {
            return Err(Error::run("too many rows for a slot").expected(self.rows, rows));
        }
        Ok(GpuSlots { rows, ..self.clone() })
    }

    /// Slot `i`.
    ///
    /// # Errors
    /// `Run` when there is no such slot.
    pub fn slot(&self, i: usize) -> Result<GpuTensor> {
        if i >= self.count {
            return Err(Error::run("no such slot").expected(format_args!("below {}", self.count), i));
        }
        let region = Region {
            allocation: self.region.allocation.clone(),
            offset: self.region.offset + 4 * (i * self.stride) as u64,
            bytes: (4 * self.rows as u64 * self.cols as u64).max(16),
        };
        Ok(GpuTensor { rows: self.rows, cols: self.cols, region })
    }
}

/// Bytes of one staging buffer; at most [`STAGING_BUFFERS`] exist.
const STAGING_BYTES: u64 = 4 << 20;
const STAGING_BUFFERS: usize = 3;
/// Below this, wgpu's own staging is used.
const SMALL: usize = 64 << 10;

const MAPPING: u8 = 0;
const MAPPED: u8 = 1;
const BROKEN: u8 = 2;

/// A mapped buffer that bytes pass through, and whether its mapping has come back.
struct StagingBuffer {
    buffer: wgpu::Buffer,
    state: Arc<AtomicU8>,
}

/// The staging buffers not in use. Their number is fixed, so host memory does not grow with what is uploaded.
#[derive(Default)]
pub(super) struct Staging {
    made: usize,
    free: Vec<StagingBuffer>,
}

impl Gpu {
    fn take_staging(&self) -> Result<StagingBuffer> {
        loop {
            self.check()?;
            {
                let mut pool = self.staging.lock();
                if pool.free.iter().any(|s| s.state.load(Ordering::Acquire) == BROKEN) {
                    // A device that was lost meanwhile says so itself.
                    drop(pool);
                    let _ = self.device.poll(wgpu::PollType::Poll);
                    self.check()?;
                    return Err(Error::new(Kind::Device, "a staging buffer does not map").device(self.name()));
                }
                if let Some(i) = pool.free.iter().position(|s| s.state.load(Ordering::Acquire) == MAPPED) {
                    return Ok(pool.free.swap_remove(i));
                }
                if pool.made < STAGING_BUFFERS {
                    let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
                    let buffer = self.host_buffer(STAGING_BYTES, usage, "staging")?;
                    pool.made += 1;
                    return Ok(StagingBuffer { buffer, state: Arc::new(AtomicU8::new(MAPPED)) });
                }
            }
            self.device
                .poll(wgpu::PollType::wait_indefinitely())
                .map_err(|e| Error::new(Kind::Device, "upload failed").device(self.name()).cause(e))?;
        }
    }

    /// Copies `bytes` (a multiple of 4) to the start of `region`, ahead of what is submitted later.
    pub(super) fn write(&self, region: &Region, bytes: &[u8]) -> Result<()> {
        if bytes.len() <= SMALL {
            self.check()?;
            if bytes.len() as u64 > region.bytes {
                return Err(Error::run("upload beyond the buffer").expected(region.bytes, bytes.len()));
            }
            self.queue.write_buffer(&region.allocation.buffer, region.offset, bytes);
            return self.check();
        }
        let mut upload = Upload::new(self, region);
        upload.push(bytes)?;
        upload.finish()
    }

    /// The values of `tensor`, once all submitted work is done.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn download(&self, tensor: &GpuTensor) -> Result<Vec<f32>> {
        let mut rec = self.record("download");
        let read = rec.read(tensor)?;
        rec.submit()?;
        read.values(self)
    }

    /// As [`Gpu::download`], for integers.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn download_words(&self, tensor: &GpuTensor) -> Result<Vec<u32>> {
        let mut rec = self.record("download");
        let read = rec.read(tensor)?;
        rec.submit()?;
        read.words(self)
    }
}

/// Bytes on their way into a region, in order, through the staging buffers.
pub(super) struct Upload<'g> {
    gpu: &'g Gpu,
    region: Region,
    /// Bytes of the region already handed over.
    done: u64,
    current: Option<(StagingBuffer, wgpu::BufferViewMut)>,
    filled: usize,
}

impl<'g> Upload<'g> {
    pub(super) fn new(gpu: &'g Gpu, region: &Region) -> Upload<'g> {
        Upload { gpu, region: region.clone(), done: 0, current: None, filled: 0 }
    }

    /// Appends `bytes`.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self.done + (self.filled + bytes.len()) as u64 > self.region.bytes {
            let wanted = self.done + (self.filled + bytes.len()) as u64;
            return Err(Error::run("upload beyond the buffer").expected(self.region.bytes, wanted));
        }
        while !bytes.is_empty() {
            if self.current.is_none() {
                let staging = self.gpu.take_staging()?;
                let view = staging.buffer.get_mapped_range_mut(..).map_err(|e| {
                    Error::new(Kind::Device, "staging is not mapped").device(self.gpu.name()).cause(e)
                })?;
                self.current = Some((staging, view));
            }
            let Some((_, view)) = &mut self.current else { continue };
            let n = bytes.len().min(STAGING_BYTES as usize - self.filled);
            view.slice(self.filled..self.filled + n).copy_from_slice(&bytes[..n]);
            self.filled += n;
            bytes = &bytes[n..];
            if self.filled == STAGING_BYTES as usize {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Hands over what is left, padded with zeros to a multiple of 4 bytes.
    pub(super) fn finish(mut self) -> Result<()> {
        let pad = self.filled.next_multiple_of(4) - self.filled;
        self.push(&[0; 3][..pad])?;
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        let Some((staging, view)) = self.current.take() else { return Ok(()) };
        drop(view);
        staging.buffer.unmap();
        let mut encoder =
            self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("upload") });
        let target = &self.region.allocation.buffer;
        let at = self.region.offset + self.done;
        encoder.copy_buffer_to_buffer(&staging.buffer, 0, target, at, self.filled as u64);
        self.gpu.submit(encoder.finish())?;
        self.done += self.filled as u64;
        self.filled = 0;
        staging.state.store(MAPPING, Ordering::Release);
        let state = staging.state.clone();
        staging.buffer.map_async(wgpu::MapMode::Write, .., move |r| {
            state.store(if r.is_ok() { MAPPED } else { BROKEN }, Ordering::Release);
        });
        self.gpu.staging.lock().free.push(staging);
        Ok(())
    }
}
