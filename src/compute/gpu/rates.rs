//! How fast an adapter moves bytes: a plain copy, and the kernels that carry a token, in the same units.

use super::buffer::GpuTensor;
use super::device::Gpu;
use super::matrix::{Format, GpuMatrix};
use super::ops::kda::{Decay, KdaStep};
use super::ops::mla::{AttendScratch, LatentCache, MlaAttend, MlaShape};
use super::recorder::Recorder;
use super::reference::{Stored, noise};
use crate::error::{Error, Result};
use std::time::Instant;

/// Submissions a figure is the median of, after one that does not count.
const REPEATS: usize = 5;
/// Calls of a submission at least, so that the cost of submitting is a small part.
const CALLS: usize = 16;
/// Random values that fill a weight over and over: what they are does not matter, how many there are would cost minutes.
const BLOCK: usize = 1 << 16;

/// Sizes at which the kernels are measured.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// H
    pub hidden: usize,
    /// N of both kinds of attention.
    pub heads: usize,
    /// Key and value width D of a head.
    pub head_dim: usize,
    /// L
    pub latent: usize,
    /// I
    pub intermediate: usize,
    /// E
    pub experts: usize,
    /// R
    pub rank: usize,
    /// Rope width of a key.
    pub rope: usize,
    /// Positions in the cache.
    pub keys: usize,
    /// Tokens of the norm, a prefill chunk.
    pub tokens: usize,
    /// Bytes over which calls take turns, so that caches of the adapter do not serve them.
    pub spread: u64,
}

impl Sizes {
    /// Those of the release, over more bytes than an adapter caches.
    pub const RELEASED: Sizes = Sizes {
        hidden: 7168,
        heads: 96,
        head_dim: 128,
        latent: 3584,
        intermediate: 3072,
        experts: 896,
        rank: 512,
        rope: 64,
        keys: 16 << 10,
        tokens: 256,
        spread: 384 << 20,
    };
    /// Small ones, for a software adapter.
    pub const SMALL: Sizes = Sizes {
        hidden: 512,
        heads: 4,
        head_dim: 32,
        latent: 256,
        intermediate: 192,
        experts: 64,
        rank: 64,
        rope: 16,
        keys: 512,
        tokens: 16,
        spread: 8 << 20,
    };
}

/// How a time was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Between timestamps of the device, around each call.
    Device,
    /// On the host, from the submission to its end, divided by the calls.
    Host,
}

/// A measured rate.
#[derive(Debug, Clone)]
pub struct Rate {
    /// Kernel, with the form of its weight.
    pub name: &'static str,
    /// Its shape.
    pub shape: String,
    /// Bytes that one call has to read and write.
    pub bytes: u64,
    /// Calls that were timed.
    pub calls: usize,
    /// Seconds a call: fastest, median, slowest.
    pub seconds: [f64; 3],
    /// How they were taken.
    pub clock: Clock,
}

impl Rate {
    /// Bytes a second at the median.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds[1].max(1e-12)
    }
}

/// Fastest, median and slowest.
fn spread(mut samples: Vec<f64>) -> Result<[f64; 3]> {
    samples.sort_by(f64::total_cmp);
    match (samples.first(), samples.get(samples.len() / 2), samples.last()) {
        (Some(a), Some(b), Some(c)) => Ok([*a, *b, *c]),
        _ => Err(Error::run("nothing was measured")),
    }
}

/// Distinct operands of `bytes` that calls take turns over.
fn turns(gpu: &Gpu, sizes: &Sizes, bytes: u64) -> usize {
    let room = gpu.vram().map_or(u64::MAX, |v| v.free / 8);
    (sizes.spread.min(room) / bytes.max(1)).clamp(1, 64) as usize
}

/// What is measured: `call` records the call with this number.
struct Measured<'a> {
    name: &'static str,
    shape: String,
    bytes: u64,
    turns: usize,
    call: &'a dyn Fn(&mut Recorder, usize) -> Result<()>,
}

impl Measured<'_> {
    fn host(&self, gpu: &Gpu, calls: usize) -> Result<Rate> {
        let mut samples = Vec::with_capacity(REPEATS);
        for repeat in 0..=REPEATS {
            let mut rec = gpu.record(self.name);
            (0..calls).try_for_each(|i| (self.call)(&mut rec, i % self.turns))?;
            let begun = Instant::now();
            rec.submit()?.wait(gpu)?;
            if repeat > 0 {
                samples.push(begun.elapsed().as_secs_f64() / calls as f64);
            }
        }
        let seconds = spread(samples)?;
        let (name, shape, bytes) = (self.name, self.shape.clone(), self.bytes);
        Ok(Rate { name, shape, bytes, calls: calls * REPEATS, seconds, clock: Clock::Host })
    }

    fn run(&self, gpu: &Gpu) -> Result<Rate> {
        let calls = self.turns.max(CALLS);
        // Also warms up what follows.
        let host = self.host(gpu, calls)?;
        if !gpu.has_timestamps() {
            return Ok(host);
        }
        let mut samples = Vec::with_capacity(calls * REPEATS);
        for _ in 0..REPEATS {
            let mut rec = gpu.record(self.name);
            rec.time_passes();
            (0..calls).try_for_each(|i| (self.call)(&mut rec, i % self.turns))?;
            let submitted = rec.submit()?;
            submitted.wait(gpu)?;
            let times = submitted.pass_times(gpu)?;
            // A call may be several passes.
            let passes = (times.len() / calls).max(1);
            samples.extend(times.chunks(passes).map(|c| c.iter().map(|p| p.ns as f64).sum::<f64>() / 1e9));
        }
        let seconds = spread(samples)?;
        // A driver may have timestamps that do not tick while a pass runs.
        if seconds[1] <= 0.0 {
            return Ok(host);
        }
        Ok(Rate { seconds, clock: Clock::Device, calls: calls * REPEATS, ..host })
    }
}

/// The rate of a copy from buffer to buffer; what is read and what is written both count.
///
/// # Errors
/// `Machine` when the buffers do not fit, `Device` when the device fails.
pub fn copy_rate(gpu: &Gpu, sizes: &Sizes) -> Result<Rate> {
    let room = gpu.vram().map_or(u64::MAX, |v| v.free / 8);
    let bytes = (sizes.spread / 2).min(gpu.binding_limit()).min(room) / 4096 * 4096;
    let rows = (bytes / 4096).max(1) as usize;
    let from = GpuTensor::new(gpu, rows, 1024, "copy source")?;
    let to = GpuTensor::new(gpu, rows, 1024, "copy target")?;
    let call = |r: &mut Recorder, _: usize| r.copy(&from, &to);
    let shape = format!("{} bytes", 4096 * rows);
    // Copies lie outside the passes that timestamps are taken around.
    Measured { name: "copy", shape, bytes: 8192 * rows as u64, turns: 1, call: &call }.host(gpu, CALLS)
}

/// The rates of the kernels that move most of a token's bytes.
///
/// # Errors
/// As [`copy_rate`].
pub fn kernel_rates(gpu: &Gpu, sizes: &Sizes, each: &mut dyn FnMut(&Rate)) -> Result<Vec<Rate>> {
    let kernels: [fn(&Gpu, &Sizes) -> Result<Rate>; 6] = [
        |g, s| matvec(g, s, "matvec bf16", Format::Bf16, s.heads * s.head_dim, s.hidden),
        |g, s| matvec(g, s, "matvec mxfp4", Format::Mxfp4, s.intermediate, s.latent),
        |g, s| matvec(g, s, "matvec f32", Format::F32, s.experts, s.hidden),
        rmsnorm,
        kda_step,
        mla_attend,
    ];
    let mut out = Vec::with_capacity(kernels.len());
    for kernel in kernels {
        let rate = kernel(gpu, sizes)?;
        each(&rate);
        out.push(rate);
    }
    Ok(out)
}

/// Bytes of a weight: a block of random values, over and over.
fn weight(format: Format, rows: usize, cols: usize) -> Stored {
    let n = rows * cols;
    let fill = |block: &[u8], bytes: usize| block.iter().copied().cycle().take(bytes).collect::<Vec<u8>>();
    match format {
        Format::Mxfp4 => match Stored::mxfp4(1, BLOCK / 32, 32) {
            Stored::Mxfp4(packed, scale) => Stored::Mxfp4(fill(&packed, n / 2), fill(&scale, n / 32)),
            other => other,
        },
        Format::Bf16 => match Stored::bf16(&noise(2, BLOCK)) {
            Stored::Bf16(b) => Stored::Bf16(fill(&b, 2 * n)),
            other => other,
        },
        Format::F32 => match Stored::f32(&noise(3, BLOCK)) {
            Stored::F32(b) => Stored::F32(fill(&b, 4 * n)),
            other => other,
        },
    }
}

/// A tensor of random values.
fn random(gpu: &Gpu, seed: u64, rows: usize, cols: usize) -> Result<GpuTensor> {
    GpuTensor::from_slice(gpu, rows, cols, &noise(seed, rows * cols), "operand")
}

fn matvec(
    gpu: &Gpu,
    sizes: &Sizes,
    name: &'static str,
    format: Format,
    rows: usize,
    cols: usize,
) -> Result<Rate> {
    let stored = weight(format, rows, cols);
    let matrix = stored.matrix(rows, cols);
    let one = GpuMatrix::upload(gpu, &matrix, 1, "weight")?;
    let bytes = one.bytes();
    let mut weights = vec![one];
    for _ in 1..turns(gpu, sizes, bytes) {
        weights.push(GpuMatrix::upload(gpu, &matrix, 1, "weight")?);
    }
    let (x, out) = (random(gpu, 4, 1, cols)?, GpuTensor::new(gpu, 1, rows, "result")?);
    let call = |r: &mut Recorder, i: usize| r.matmul(&weights[i], &x, &out);
    let bytes = bytes + 4 * (rows + cols) as u64;
    Measured { name, shape: format!("{rows} x {cols}"), bytes, turns: weights.len(), call: &call }.run(gpu)
}

fn rmsnorm(gpu: &Gpu, sizes: &Sizes) -> Result<Rate> {
    let (rows, cols) = (sizes.tokens, sizes.hidden);
    let bytes = 8 * (rows * cols) as u64;
    let tensors = (0..turns(gpu, sizes, bytes))
        .map(|_| Ok((random(gpu, 5, rows, cols)?, GpuTensor::new(gpu, rows, cols, "result")?)))
        .collect::<Result<Vec<_>>>()?;
    let w = random(gpu, 6, 1, cols)?;
    let call = |r: &mut Recorder, i: usize| r.rmsnorm(&tensors[i].0, &w, 1e-5, &tensors[i].1);
    let (shape, bytes) = (format!("{rows} x {cols}"), bytes + 4 * cols as u64);
    Measured { name: "rmsnorm", shape, bytes, turns: tensors.len(), call: &call }.run(gpu)
}

fn kda_step(gpu: &Gpu, sizes: &Sizes) -> Result<Rate> {
    let (heads, d) = (sizes.heads, sizes.head_dim);
    let p = heads * d;
    let state = 4 * (p * d) as u64;
    let states = (0..turns(gpu, sizes, 2 * state))
        .map(|_| Ok((random(gpu, 7, heads, d * d)?, GpuTensor::new(gpu, heads, d * d, "next state")?)))
        .collect::<Result<Vec<_>>>()?;
    let (q, k, v) = (random(gpu, 8, 1, p)?, random(gpu, 9, 1, p)?, random(gpu, 10, 1, p)?);
    let factors: Vec<f32> = noise(11, p).iter().map(|x| 0.5 + 0.5 * x.abs()).collect();
    let decay = GpuTensor::from_slice(gpu, 1, p, &factors, "operand")?;
    let (beta, o) = (random(gpu, 12, 1, heads)?, GpuTensor::new(gpu, 1, p, "result")?);
    let call = |r: &mut Recorder, i: usize| {
        let (s_in, s_out) = &states[i];
        let step = KdaStep { heads, q: &q, k: &k, v: &v, decay: Decay::Factor(&decay), beta: &beta, s_in };
        r.kda_step(&step, s_out, &o)
    };
    let (shape, bytes) = (format!("{heads} heads of {d} x {d}"), 2 * state + 4 * (5 * p + heads) as u64);
    Measured { name: "kda_step", shape, bytes, turns: states.len(), call: &call }.run(gpu)
}

fn mla_attend(gpu: &Gpu, sizes: &Sizes) -> Result<Rate> {
    let Sizes { heads, head_dim: d, rank, rope, keys, .. } = *sizes;
    let shape = MlaShape { heads, rank, nope: d, rope, value: d };
    let stored = weight(Format::Bf16, heads * 2 * d, rank);
    let kv_b = GpuMatrix::upload(gpu, &stored.matrix(heads * 2 * d, rank), 2 * d, "kv_b")?;
    let held = 4 * (keys * (rank + rope)) as u64;
    let (content, norm) = (random(gpu, 13, keys, rank + rope)?, random(gpu, 14, 1, rank)?);
    let caches = (0..turns(gpu, sizes, held + kv_b.bytes()))
        .map(|_| {
            let mut cache = LatentCache::new(gpu, shape, keys)?;
            cache.reserve(gpu, keys)?;
            let mut rec = gpu.record("mla_attend");
            rec.cache_append(&cache, &content, &norm, 1e-5, 0)?;
            rec.submit()?;
            Ok(cache)
        })
        .collect::<Result<Vec<_>>>()?;
    let Some(first) = caches.first() else { return Err(Error::run("nothing was measured")) };
    let q = random(gpu, 15, 1, heads * (d + rope))?;
    let out = GpuTensor::new(gpu, 1, heads * d, "result")?;
    let scratch = AttendScratch::new(gpu, shape, first, 1, keys)?;
    let scale = 1.0 / ((d + rope) as f32).sqrt();
    let call = |r: &mut Recorder, i: usize| {
        let a = MlaAttend { q: &q, kv_b: &kv_b, cache: &caches[i], position: keys - 1, gate: None, scale };
        r.mla_attend(&a, &scratch, &out)
    };
    let bytes = held + kv_b.bytes() + 4 * (q.len() + out.len()) as u64;
    let label = format!("{heads} heads over {keys} keys of {rank} + {rope}");
    Measured { name: "mla_attend", shape: label, bytes, turns: caches.len(), call: &call }.run(gpu)
}
