//! Recording operations for one submission.
//!
//! A [`Recorder`] collects dispatches and copies without waiting for any; [`Recorder::submit`] hands them over. Names given by
//! [`Recorder::scope`] ("layer 12", "moe") become debug groups and pass labels, so that a vendor's profiler shows
//! `layer 12 / moe / matvec`.

use super::buffer::{GpuTensor, Region};
use super::device::Gpu;
use super::pipelines::{Constants, Kernel};
use crate::error::{Error, Kind, Result};
use std::num::NonZeroU64;
use std::sync::mpsc;

/// Bytes of parameters a kernel may take.
const PARAMETER_BYTES: usize = 64;
/// Dispatches whose parameters share one uniform buffer.
const PARAMETER_SLOTS: usize = 128;
/// Timed passes that share one query set (two queries a pass, at most 4096 a set).
const TIMED_PASSES: u32 = 1024;

/// Commands being recorded for one submission.
pub struct Recorder<'g> {
    gpu: &'g Gpu,
    encoder: wgpu::CommandEncoder,
    pass: Option<wgpu::ComputePass<'static>>,
    scopes: Vec<String>,
    /// Parameters recorded, a buffer and its bytes for each [`PARAMETER_SLOTS`] dispatches.
    parameters: Vec<(wgpu::Buffer, Vec<u8>)>,
    timing: Option<Vec<TimedSet>>,
    dispatches: usize,
}

/// Query results of up to [`TIMED_PASSES`] passes.
struct TimedSet {
    set: wgpu::QuerySet,
    labels: Vec<String>,
}

/// Duration of one pass.
#[derive(Debug, Clone, PartialEq)]
pub struct PassTime {
    /// Scopes and operation, `layer 12 / moe / matvec`.
    pub label: String,
    /// Begin, in nanoseconds of the device's clock.
    pub begin_ns: u64,
    /// Duration in nanoseconds.
    pub ns: u64,
}

/// Work handed to the device.
#[derive(Debug)]
pub struct Submission {
    index: wgpu::SubmissionIndex,
    timings: Option<(wgpu::Buffer, Vec<String>)>,
}

impl Submission {
    /// Waits until the work is done.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn wait(&self, gpu: &Gpu) -> Result<()> {
        gpu.wait(&self.index)
    }

    /// The time of each pass, after waiting; empty unless [`Recorder::time_passes`] was called and the adapter can.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn pass_times(&self, gpu: &Gpu) -> Result<Vec<PassTime>> {
        let Some((buffer, labels)) = &self.timings else { return Ok(Vec::new()) };
        let bytes = map_and_read(gpu, buffer)?;
        let period = f64::from(gpu.queue.get_timestamp_period());
        let ticks: Vec<u64> = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
        let times = labels.iter().zip(ticks.chunks_exact(2)).map(|(label, t)| PassTime {
            label: label.clone(),
            begin_ns: (t[0] as f64 * period) as u64,
            ns: (t[1].saturating_sub(t[0]) as f64 * period) as u64,
        });
        Ok(times.collect())
    }
}

/// A copy of a tensor that comes back with its submission.
#[derive(Debug)]
pub struct Readback {
    buffer: wgpu::Buffer,
    words: usize,
}

impl Readback {
    /// Waits for the values. The recorder must have been submitted.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn values(self, gpu: &Gpu) -> Result<Vec<f32>> {
        let bytes = map_and_read(gpu, &self.buffer)?;
        Ok(bytes.chunks_exact(4).take(self.words).map(bytemuck::pod_read_unaligned).collect())
    }

    /// As [`Readback::values`], for integers.
    ///
    /// # Errors
    /// As [`Readback::values`].
    pub fn words(self, gpu: &Gpu) -> Result<Vec<u32>> {
        let bytes = map_and_read(gpu, &self.buffer)?;
        Ok(bytes.chunks_exact(4).take(self.words).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// Maps a host buffer, waits for the work that writes it, and copies its bytes out.
fn map_and_read(gpu: &Gpu, buffer: &wgpu::Buffer) -> Result<Vec<u8>> {
    gpu.check()?;
    let fail = |cause: &str| Error::new(Kind::Device, "read-back failed").device(gpu.name()).cause(cause);
    let (done, result) = mpsc::channel();
    buffer.map_async(wgpu::MapMode::Read, .., move |r| {
        let _ = done.send(r);
    });
    loop {
        let slice =
            wgpu::PollType::Wait { submission_index: None, timeout: Some(std::time::Duration::from_secs(1)) };
        let polled = gpu.device.poll(slice);
        gpu.check()?;
        match result.try_recv() {
            Ok(Ok(())) => break,
            Ok(Err(e)) => return Err(fail(&e.to_string())),
            Err(mpsc::TryRecvError::Disconnected) => return Err(fail("the mapping was dropped")),
            Err(mpsc::TryRecvError::Empty) => {}
        }
        match polled {
            Ok(_) | Err(wgpu::PollError::Timeout) => {}
            Err(e) => return Err(fail(&e.to_string())),
        }
    }
    let bytes = buffer.get_mapped_range(..).map_err(|e| fail(&e.to_string()))?.to_vec();
    buffer.unmap();
    gpu.check()?;
    Ok(bytes)
}

impl Gpu {
    /// Begins recording. `label` names the submission.
    pub fn record(&self, label: &str) -> Recorder<'_> {
        let encoder =
            self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(label) });
        Recorder {
            gpu: self,
            encoder,
            pass: None,
            scopes: Vec::new(),
            parameters: Vec::new(),
            timing: None,
            dispatches: 0,
        }
    }
}

impl<'g> Recorder<'g> {
    /// The device recorded for.
    pub fn gpu(&self) -> &'g Gpu {
        self.gpu
    }

    /// Dispatches recorded so far.
    pub fn dispatches(&self) -> usize {
        self.dispatches
    }

    /// Gives every operation its own pass and times it, where the adapter can.
    pub fn time_passes(&mut self) {
        if self.gpu.has_timestamps() {
            self.timing = Some(Vec::new());
        }
    }

    /// Runs `body` under the name `label`.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn scope<T>(&mut self, label: &str, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.enter(label);
        let result = body(self);
        self.leave();
        result
    }

    /// Names what follows `label`, until the matching [`Recorder::leave`].
    pub fn enter(&mut self, label: &str) {
        self.end_pass();
        self.scopes.push(label.to_owned());
    }

    /// Ends the innermost name, if there is one.
    pub fn leave(&mut self) {
        self.end_pass();
        self.scopes.pop();
    }

    /// `a / b / c`: the scopes and the operation.
    fn path(&self, op: &str) -> String {
        let mut path = String::new();
        for s in &self.scopes {
            path.push_str(s);
            path.push_str(" / ");
        }
        path + op
    }

    /// Records one dispatch of `kernel` over `groups`. `bindings` pair binding numbers with buffers.
    pub(super) fn dispatch(
        &mut self,
        kernel: &'static Kernel,
        constants: Constants,
        parameters: &[u32],
        bindings: &[(u32, &Region)],
        groups: [u32; 3],
    ) -> Result<()> {
        let pipeline = self.gpu.pipeline(kernel, constants)?;
        let mut entries: Vec<wgpu::BindGroupEntry> = bindings
            .iter()
            .map(|(n, r)| wgpu::BindGroupEntry { binding: *n, resource: r.binding() })
            .collect();
        let uniform = if parameters.is_empty() { None } else { Some(self.store_parameters(parameters)?) };
        if let Some((buffer, offset)) = &uniform {
            entries.push(wgpu::BindGroupEntry {
                binding: 0,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer,
                    offset: *offset,
                    size: NonZeroU64::new(PARAMETER_BYTES as u64),
                }),
            });
        }
        let group = self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(kernel.name),
            layout: &pipeline.layout,
            entries: &entries,
        });
        if self.timing.is_some() || self.pass.is_none() {
            self.begin_pass(kernel.name);
        }
        if let Some(pass) = &mut self.pass {
            pass.push_debug_group(kernel.name);
            pass.set_pipeline(&pipeline.pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
            pass.pop_debug_group();
        }
        self.dispatches += 1;
        Ok(())
    }

    /// Closes the current pass and the groups it has open.
    fn end_pass(&mut self) {
        if let Some(mut pass) = self.pass.take() {
            self.scopes.iter().for_each(|_| pass.pop_debug_group());
        }
    }

    fn begin_pass(&mut self, op: &str) {
        self.end_pass();
        let timed = self.timing.is_some();
        let label = if timed || self.scopes.is_empty() { self.path(op) } else { self.scopes.join(" / ") };
        let mut writes = None;
        if let Some(sets) = &mut self.timing {
            if sets.last().is_none_or(|s| s.labels.len() == TIMED_PASSES as usize) {
                let set = self.gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("pass times"),
                    ty: wgpu::QueryType::Timestamp,
                    count: 2 * TIMED_PASSES,
                });
                sets.push(TimedSet { set, labels: Vec::new() });
            }
            if let Some(last) = sets.last_mut() {
                let n = 2 * last.labels.len() as u32;
                last.labels.push(label.clone());
                writes = Some(wgpu::ComputePassTimestampWrites {
                    query_set: &last.set,
                    beginning_of_pass_write_index: Some(n),
                    end_of_pass_write_index: Some(n + 1),
                });
            }
        }
        let pass = self.encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some(&label),
            timestamp_writes: writes,
        });
        let mut pass = pass.forget_lifetime();
        // Groups open and close within a pass: wgpu begins another command buffer for each, and a driver (Mesa 22.3) was
        // seen to crash on groups that span several.
        self.scopes.iter().for_each(|s| pass.push_debug_group(s));
        self.pass = Some(pass);
    }

    /// Puts a kernel's parameters aside until the submission; gives the place they will be read from.
    fn store_parameters(&mut self, parameters: &[u32]) -> Result<(wgpu::Buffer, u64)> {
        if parameters.len() * 4 > PARAMETER_BYTES {
            return Err(
                Error::run("too many kernel parameters").expected(PARAMETER_BYTES / 4, parameters.len())
            );
        }
        let stride = (self.gpu.limits.min_uniform_buffer_offset_alignment as usize).max(PARAMETER_BYTES);
        let full = |(_, bytes): &(wgpu::Buffer, Vec<u8>)| bytes.len() >= stride * PARAMETER_SLOTS;
        if self.parameters.last().is_none_or(full) {
            let spare = self.gpu.parameters.lock().pop();
            let buffer = match spare {
                Some(b) => b,
                None => self.gpu.host_buffer(
                    (stride * PARAMETER_SLOTS) as u64,
                    wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                    "parameters",
                )?,
            };
            self.parameters.push((buffer, Vec::with_capacity(stride * PARAMETER_SLOTS)));
        }
        let Some((buffer, bytes)) = self.parameters.last_mut() else {
            return Err(Error::run("no parameter buffer"));
        };
        let offset = bytes.len();
        bytes.extend_from_slice(bytemuck::cast_slice(parameters));
        bytes.resize(offset + stride, 0);
        Ok((buffer.clone(), offset as u64))
    }

    /// Copies all of `from` over the start of `to`.
    ///
    /// # Errors
    /// `Run` when `to` is smaller or they share a buffer.
    pub fn copy(&mut self, from: &GpuTensor, to: &GpuTensor) -> Result<()> {
        if from.len() > to.len() {
            return Err(Error::run("copy").expected(to.len(), from.len()));
        }
        if std::sync::Arc::ptr_eq(&from.region.allocation, &to.region.allocation) {
            return Err(Error::run("copy within one buffer"));
        }
        self.end_pass();
        let (a, b) = (&from.region, &to.region);
        let bytes = 4 * from.len() as u64;
        self.encoder.copy_buffer_to_buffer(
            &a.allocation.buffer,
            a.offset,
            &b.allocation.buffer,
            b.offset,
            bytes,
        );
        Ok(())
    }

    /// Fills `tensor` with zeros.
    pub fn clear(&mut self, tensor: &GpuTensor) {
        self.end_pass();
        let r = &tensor.region;
        self.encoder.clear_buffer(&r.allocation.buffer, r.offset, Some(r.bytes));
    }

    /// Copies `tensor` to the host with this submission.
    ///
    /// # Errors
    /// `Device` when the device has failed.
    pub fn read(&mut self, tensor: &GpuTensor) -> Result<Readback> {
        self.end_pass();
        let bytes = 4 * tensor.len() as u64;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let buffer = self.gpu.host_buffer(bytes.max(4), usage, "read-back")?;
        let from = &tensor.region;
        self.encoder.copy_buffer_to_buffer(&from.allocation.buffer, from.offset, &buffer, 0, bytes);
        Ok(Readback { buffer, words: tensor.len() })
    }

    /// Hands everything recorded to the device, without waiting.
    ///
    /// # Errors
    /// `Device` when the device has failed or refuses the commands; nothing of them has run then.
    pub fn submit(mut self) -> Result<Submission> {
        self.end_pass();
        self.gpu.check()?;
        let timings = self.resolve_timings()?;
        for (buffer, bytes) in &self.parameters {
            self.gpu.queue.write_buffer(buffer, 0, bytes);
        }
        let index = self.gpu.submit(self.encoder.finish())?;
        // Later writes to these buffers are ordered behind this submission by the queue.
        self.gpu.parameters.lock().extend(self.parameters.into_iter().map(|(b, _)| b));
        Ok(Submission { index, timings })
    }

    /// Collects the query results in one host buffer, in pass order.
    fn resolve_timings(&mut self) -> Result<Option<(wgpu::Buffer, Vec<String>)>> {
        let Some(sets) = self.timing.take() else { return Ok(None) };
        let total: usize = sets.iter().map(|s| s.labels.len()).sum();
        if total == 0 {
            return Ok(None);
        }
        let set_bytes = 16 * u64::from(TIMED_PASSES);
        let resolved = self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("pass times"),
            size: set_bytes * sets.len() as u64,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let host = self.gpu.host_buffer(16 * total as u64, usage, "pass times")?;
        let mut labels = Vec::with_capacity(total);
        for (i, s) in sets.into_iter().enumerate() {
            self.encoder.resolve_query_set(
                &s.set,
                0..2 * s.labels.len() as u32,
                &resolved,
                i as u64 * set_bytes,
            );
            labels.extend(s.labels);
        }
        // All sets but the last are full, so the results lie without gaps.
        self.encoder.copy_buffer_to_buffer(&resolved, 0, &host, 0, 16 * total as u64);
        Ok(Some((host, labels)))
    }
}
