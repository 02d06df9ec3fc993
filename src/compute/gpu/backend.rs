//! The GPU as a [`Backend`]: operations are recorded, and handed over when something is read back or a layer ends.

use super::buffer::{GpuSlots, GpuTensor};
use super::device::Gpu;
use super::matrix::GpuMatrix;
use super::ops::kda::{Decay, KdaGate, KdaStep};
use super::ops::mla::{AttendScratch, LatentCache, MlaAttend, MlaShape};
use super::ops::moe::Route;
use super::recorder::{Readback, Recorder, Submission};
use super::timeline::{self, SubmissionTrace};
use crate::compute::backend::{Backend, Recurrence, Section};
use crate::compute::device::{Tensor, Weight};
use crate::compute::ops::mla::Shape;
use crate::compute::ops::moe::{Router, Routing};
use crate::error::{Error, Kind, Result};
use crate::report::trace::{Details, Trace, Track, begin};
use std::sync::Arc;
use std::time::Instant;

/// Added to the sum of the chosen scores before they are divided by it.
const ROUTER_EPS: f32 = 1e-20;
/// Checks of a pass that share one flag buffer.
const CHECKS: usize = 512;

/// A tensor whose shape changes from pass to pass: an allocation, and what of it is in use.
#[derive(Debug, Default)]
pub struct GpuBuf {
    whole: Option<GpuTensor>,
    view: Option<GpuTensor>,
}

impl GpuBuf {
    /// What is in use.
    pub fn get(&self) -> Result<&GpuTensor> {
        self.view.as_ref().ok_or_else(|| Error::run("a device tensor is used before it is written"))
    }

    fn of(tensor: GpuTensor) -> GpuBuf {
        GpuBuf { view: Some(tensor.clone()), whole: Some(tensor) }
    }

    /// Takes the shape `[rows, cols]`, in a larger allocation where the present one is too small.
    fn shape(&mut self, gpu: &Gpu, rows: usize, cols: usize) -> Result<&GpuTensor> {
        let fits = self.whole.as_ref().filter(|w| w.len() >= rows * cols);
        let whole = match fits {
            Some(w) => w,
            None => self.whole.insert(GpuTensor::new(gpu, rows, cols, "activations")?),
        };
        let view = whole.prefix(rows, cols)?;
        Ok(self.view.insert(view))
    }
}

/// Sources of the residual mix: slots of one buffer.
#[derive(Debug, Default)]
pub struct GpuSources {
    slots: Option<GpuSlots>,
    each: Vec<GpuBuf>,
}

/// What is kept between passes beside the buffers of the forward pass.
#[derive(Debug, Default)]
pub struct GpuWork {
    /// Results that replace their input.
    spare: GpuBuf,
    spare_small: GpuBuf,
    attend: Option<(usize, usize, AttendScratch)>,
    routing: GpuBuf,
}

/// One pass on the GPU.
pub struct GpuBackend<'g> {
    gpu: &'g Gpu,
    work: &'g mut GpuWork,
    recorder: Option<Recorder<'g>>,
    section: Section,
    /// Flags of the finite checks, and what each flag stands for.
    flags: Option<GpuTensor>,
    checks: Vec<(usize, usize)>,
    /// Where times go, and the submissions whose times are still to come.
    trace: Option<Arc<Trace>>,
    waiting: Vec<Waiting>,
}

/// A submission that was not seen complete yet.
struct Waiting {
    section: Section,
    submitted: Instant,
    submission: Submission,
}

impl<'g> GpuBackend<'g> {
    /// A pass that begins now. With a trace every operation is timed where the adapter can, and whole submissions
    /// where it cannot.
    pub fn new(gpu: &'g Gpu, work: &'g mut GpuWork, trace: Option<Arc<Trace>>) -> GpuBackend<'g> {
        GpuBackend {
            gpu,
            work,
            recorder: None,
            section: Section::default(),
            flags: None,
            checks: Vec::new(),
            trace,
            waiting: Vec::new(),
        }
    }

    fn recorder(&mut self) -> &mut Recorder<'g> {
        let (gpu, timed, section) = (self.gpu, self.trace.is_some(), self.section);
        self.recorder.get_or_insert_with(|| {
            let section = section.to_string();
            let mut r = gpu.record(&section);
            if timed {
                r.time_passes();
            }
            if !section.is_empty() {
                r.enter(&section);
            }
            r
        })
    }

    /// Hands over what was recorded, without waiting.
    pub fn submit(&mut self) -> Result<()> {
        if let Some(mut r) = self.recorder.take() {
            r.leave();
            let submitted = Instant::now();
            let submission = r.submit()?;
            if self.trace.is_some() {
                self.waiting.push(Waiting { section: self.section, submitted, submission });
            }
        }
        Ok(())
    }

    /// Submits, then waits for what `read` copies.
    fn finish_reads(&mut self, read: Readback) -> Result<Vec<u32>> {
        let flags = match self.flags.take() {
            Some(flags) => Some(self.recorder().read(&flags)?),
            None => None,
        };
        self.submit()?;
        let words = read.words(self.gpu)?;
        if let Some(flags) = flags {
            let flags = flags.words(self.gpu)?;
            let bad = flags.iter().zip(&self.checks).find(|(f, _)| **f != u32::MAX);
            if let Some((_, (layer, position))) = bad {
                return Err(Error::new(Kind::NonFinite, "a hidden value is not finite")
                    .layer(*layer)
                    .position(*position)
                    .device(self.gpu.name()));
            }
        }
        self.checks.clear();
        self.collect_traces()?;
        Ok(words)
    }

    /// Hands the times of what was submitted to the trace, if there is one. Waits for it to complete.
    pub fn collect_traces(&mut self) -> Result<()> {
        let Some(trace) = &self.trace else { return Ok(()) };
        if let Some(last) = self.waiting.last() {
            last.submission.wait(self.gpu)?;
        }
        let completed = Instant::now();
        let mut done = Vec::with_capacity(self.waiting.len());
        for w in self.waiting.drain(..) {
            done.push(SubmissionTrace {
                layer: w.section.layer,
                label: w.section.to_string(),
                submitted: w.submitted,
                completed,
                passes: w.submission.pass_times(self.gpu)?,
            });
        }
        timeline::record(trace, self.gpu.name(), &done);
        Ok(())
    }

    /// Replaces `x` by what `op` makes of it: kernels do not write what they read.
    fn replace(
        &mut self,
        x: &mut GpuBuf,
        op: impl FnOnce(&mut Recorder<'g>, &GpuTensor, &GpuTensor) -> Result<()>,
    ) -> Result<()> {
        let (rows, cols) = (x.get()?.rows, x.get()?.cols);
        let out = self.work.spare.shape(self.gpu, rows, cols)?.clone();
        op(self.recorder(), x.get()?, &out)?;
        std::mem::swap(x, &mut self.work.spare);
        Ok(())
    }
}

fn mla_shape(s: Shape) -> MlaShape {
    MlaShape { heads: s.heads, rank: s.rank, nope: s.nope, rope: s.rope, value: s.value }
}

impl<'g> Backend for GpuBackend<'g> {
    type Tensor = GpuBuf;
    type Weight = GpuMatrix;
    type Sources = GpuSources;
    type Cache = LatentCache;

    fn rows(t: &GpuBuf) -> usize {
        t.view.as_ref().map_or(0, |t| t.rows)
    }
    fn upload(&mut self, from: &Tensor, to: &mut GpuBuf) -> Result<()> {
        // A write comes before all that is submitted after it: what still waits to be submitted must not see it.
        self.submit()?;
        let span = begin(&self.trace);
        to.shape(self.gpu, from.rows(), from.cols())?.write(self.gpu, from.host())?;
        if let Some(span) = span {
            let bytes = Some(4 * from.host().len() as u64);
            let details = Details { layer: self.section.layer, bytes, ..Details::default() };
            span.end(Track::Uploads, self.section.to_string(), details);
        }
        Ok(())
    }
    fn download(&mut self, from: &GpuBuf) -> Result<Tensor> {
        let t = from.get()?;
        let read = self.recorder().read(t)?;
        let words = self.finish_reads(read)?;
        Ok(Tensor::from_vec(t.rows, t.cols, words.into_iter().map(f32::from_bits).collect()))
    }
    fn weight(&mut self, from: &Weight, row_multiple: usize, label: &str) -> Result<GpuMatrix> {
        let span = begin(&self.trace);
        let rows = from.whole()?;
        let matrix = GpuMatrix::upload(self.gpu, &rows.matrix(), row_multiple, label)?;
        if let Some(span) = span {
            let bytes = Some(rows.matrix().bytes() as u64);
            let shape = Some([from.rows(), from.cols()]);
            let details = Details { layer: self.section.layer, bytes, shape, ..Details::default() };
            span.end(Track::Uploads, label.to_owned(), details);
        }
        Ok(matrix)
    }
    fn taps(&mut self, w: &Tensor) -> Result<GpuBuf> {
        let (taps, channels) = (w.rows(), w.cols());
        let mut values = Vec::with_capacity(taps * channels);
        for c in 0..channels {
            values.extend((0..taps).map(|j| w.row(j)[c]));
        }
        Ok(GpuBuf::of(GpuTensor::from_slice(self.gpu, channels, taps, &values, "convolution taps")?))
    }
    fn cache(&mut self, shape: Shape, capacity: usize) -> Result<LatentCache> {
        let mut cache = LatentCache::new(self.gpu, mla_shape(shape), capacity)?;
        cache.reserve(self.gpu, capacity)?;
        Ok(cache)
    }
    fn shape_sources(&mut self, s: &mut GpuSources, count: usize, rows: usize, cols: usize) -> Result<()> {
        let fits = |s: &&GpuSlots| s.count >= count && s.cols == cols && s.rows * s.cols >= rows * cols;
        let slots = match s.slots.as_ref().filter(fits) {
            Some(slots) => slots,
            None => s.slots.insert(GpuSlots::new(self.gpu, count, rows, cols, "mix sources")?),
        };
        let shaped = slots.with_rows(rows)?;
        s.each = (0..count).map(|i| Ok(GpuBuf::of(shaped.slot(i)?))).collect::<Result<_>>()?;
        Ok(())
    }
    fn source(s: &GpuSources, i: usize) -> &GpuBuf {
        &s.each[i]
    }
    fn source_mut(s: &mut GpuSources, i: usize) -> &mut GpuBuf {
        &mut s.each[i]
    }
    fn shape(&mut self, t: &mut GpuBuf, rows: usize, cols: usize) -> Result<()> {
        t.shape(self.gpu, rows, cols).map(|_| ())
    }
    fn section(&mut self, section: Section) -> Result<()> {
        if let Some(r) = &mut self.recorder {
            r.leave();
            r.enter(&section.to_string());
        }
        self.section = section;
        Ok(())
    }
    fn end_layer(&mut self) -> Result<()> {
        self.submit()
    }

    fn copy(&mut self, from: &GpuBuf, to: &mut GpuBuf) -> Result<()> {
        let from = from.get()?;
        let to = to.shape(self.gpu, from.rows, from.cols)?;
        self.recorder().copy(from, to)
    }
    fn gather(&mut self, from: &GpuBuf, rows: &[u32], to: &mut GpuBuf) -> Result<()> {
        let from = from.get()?;
        let to = to.shape(self.gpu, rows.len(), from.cols)?;
        match rows {
            [row] => {
                let at = *row as usize * from.cols;
                self.recorder().move_rows(from, (from.cols, at), to, (from.cols, 0), 1, from.cols)
            }
            _ => {
                let ids = GpuTensor::from_words(self.gpu, 1, rows.len(), rows, "gathered rows")?;
                self.recorder().gather_rows(from, &ids, to)
            }
        }
    }
    fn scatter(&mut self, from: &GpuBuf, rows: &[u32], to: &mut GpuBuf) -> Result<()> {
        let (from, to) = (from.get()?, to.get()?);
        match rows {
            [row] => {
                let at = *row as usize * from.cols;
                self.recorder().move_rows(from, (from.cols, 0), to, (from.cols, at), 1, from.cols)
            }
            _ => {
                let ids = GpuTensor::from_words(self.gpu, 1, rows.len(), rows, "scattered rows")?;
                self.recorder().scatter_rows(from, &ids, to)
            }
        }
    }
    fn add(&mut self, a: &mut GpuBuf, b: &GpuBuf) -> Result<()> {
        self.recorder().add(b.get()?, a.get()?)
    }
    fn check_finite(&mut self, x: &GpuBuf, layer: usize, position: usize) -> Result<()> {
        let slot = self.checks.len().min(CHECKS - 1);
        if slot == self.checks.len() {
            self.checks.push((layer, position));
        }
        let flags = match &self.flags {
            Some(f) => f.clone(),
            None => self.flags.insert(self.gpu.finite_flags(CHECKS)?).clone(),
        };
        self.recorder().check_finite(x.get()?, &flags, slot)
    }

    fn rmsnorm(&mut self, x: &GpuBuf, w: &GpuBuf, eps: f32, y: &mut GpuBuf) -> Result<()> {
        let x = x.get()?;
        let y = y.shape(self.gpu, x.rows, x.cols)?;
        self.recorder().rmsnorm(x, w.get()?, eps, y)
    }
    fn l2norm(&mut self, x: &mut GpuBuf, dim: usize, eps: f32, scale: f32) -> Result<()> {
        self.replace(x, |r, x, y| {
            let heads = x.len() / dim;
            r.l2norm(&x.reshape(heads, dim)?, eps, scale, &y.reshape(heads, dim)?)
        })
    }
    fn matmul(&mut self, x: &GpuBuf, w: &GpuMatrix, y: &mut GpuBuf) -> Result<()> {
        let x = x.get()?;
        let y = y.shape(self.gpu, x.rows, w.rows)?;
        self.recorder().matmul(w, x, y)
    }
    fn situ(&mut self, gate: &mut GpuBuf, up: &GpuBuf, beta: f32, linear_beta: f32) -> Result<()> {
        let up = up.get()?;
        self.replace(gate, |r, gate, y| r.situ_glu(gate, up, beta, linear_beta, y))
    }
    fn short_conv(
        &mut self,
        u: &GpuBuf,
        w: &GpuBuf,
        history: &GpuBuf,
        y: &mut GpuBuf,
        next: &mut GpuBuf,
    ) -> Result<()> {
        let (u, h) = (u.get()?, history.get()?);
        let y = y.shape(self.gpu, u.rows, u.cols)?;
        let next = next.shape(self.gpu, h.rows, h.cols)?;
        self.recorder().short_conv(u, h, w.get()?, y, next)
    }
    fn kda_gates(
        &mut self,
        z: &mut GpuBuf,
        beta: &mut GpuBuf,
        a_log: &GpuBuf,
        dt_bias: &GpuBuf,
        lower_bound: f32,
    ) -> Result<()> {
        let (zt, bt) = (z.get()?, beta.get()?);
        let g = self.work.spare.shape(self.gpu, zt.rows, zt.cols)?.clone();
        let b = self.work.spare_small.shape(self.gpu, bt.rows, bt.cols)?.clone();
        let gate =
            KdaGate { z: zt, a_log: a_log.get()?, dt_bias: dt_bias.get()?, beta_logit: bt, lower_bound };
        self.recorder().kda_gate(&gate, &g, &b)?;
        std::mem::swap(z, &mut self.work.spare);
        std::mem::swap(beta, &mut self.work.spare_small);
        Ok(())
    }
    fn recurrence(
        &mut self,
        r: &Recurrence<'_, GpuBuf>,
        state: &GpuBuf,
        next: &mut GpuBuf,
        o: &mut GpuBuf,
    ) -> Result<()> {
        let s_in = state.get()?;
        let next = next.shape(self.gpu, s_in.rows, s_in.cols)?;
        let v = r.v.get()?;
        let o = o.shape(self.gpu, v.rows, v.cols)?;
        let step = KdaStep {
            heads: r.beta.get()?.cols,
            q: r.q.get()?,
            k: r.k.get()?,
            v,
            // The gate kernel leaves logarithms; the recurrence takes their exponential.
            decay: Decay::Log(r.decay.get()?),
            beta: r.beta.get()?,
            s_in,
        };
        self.recorder().kda_step(&step, next, o)
    }
    fn norm_gate(&mut self, o: &mut GpuBuf, w: &GpuBuf, eps: f32, gate: &GpuBuf) -> Result<()> {
        let (w, gate) = (w.get()?, gate.get()?);
        self.replace(o, |r, o, y| r.head_norm_gate(o, w, gate, eps, y))
    }
    fn append(
        &mut self,
        c: &GpuBuf,
        w: &GpuBuf,
        eps: f32,
        pos: usize,
        cache: &mut LatentCache,
    ) -> Result<()> {
        self.recorder().cache_append(cache, c.get()?, w.get()?, eps, pos)
    }
    fn attend(
        &mut self,
        q: &GpuBuf,
        kv_b: &GpuMatrix,
        cache: &LatentCache,
        pos: usize,
        gate: Option<&GpuBuf>,
        o: &mut GpuBuf,
    ) -> Result<()> {
        let q = q.get()?;
        let shape = cache.shape();
        let keys = (pos + q.rows).next_power_of_two();
        let fits = self.work.attend.as_ref().is_some_and(|(t, k, _)| *t >= q.rows && *k >= pos + q.rows);
        if !fits {
            let tokens = self.work.attend.as_ref().map_or(0, |(t, _, _)| *t).max(q.rows);
            let scratch = AttendScratch::new(self.gpu, shape, cache, tokens, keys)?;
            self.work.attend = Some((tokens, keys, scratch));
        }
        let out = o.shape(self.gpu, q.rows, shape.heads * shape.value)?;
        let gate = gate.map(GpuBuf::get).transpose()?;
        let scale = ((shape.nope + shape.rope) as f32).sqrt().recip();
        let a = MlaAttend { q, kv_b, cache, position: pos, gate, scale };
        // The scratch leaves its place for the call: recording borrows the whole pass.
        let Some(held) = self.work.attend.take() else { return Err(Error::run("no room to attend in")) };
        let result = self.recorder().mla_attend(&a, &held.2, out);
        self.work.attend = Some(held);
        result
    }
    fn route(&mut self, logits: &mut GpuBuf, bias: &GpuBuf, r: Router, out: &mut Routing) -> Result<()> {
        let logits = logits.get()?;
        let words = self.work.routing.shape(self.gpu, logits.rows, 2 * r.chosen)?.clone();
        let route =
            Route { chosen: r.chosen, renormalize: r.renormalize, norm_eps: ROUTER_EPS, scale: r.scale };
        self.recorder().router(logits, bias.get()?, &route, &words)?;
        let read = self.recorder().read(&words)?;
        let words = self.finish_reads(read)?;
        let routing = super::ops::moe::Routing::from_words(&words, r.chosen)?;
        out.chosen = r.chosen;
        out.experts.clear();
        out.weights.clear();
        out.experts.extend(routing.experts.iter().flatten());
        out.weights.extend(routing.weights.iter().flatten());
        Ok(())
    }
    fn combine(&mut self, parts: &GpuBuf, routing: &Routing, sum: &mut GpuBuf) -> Result<()> {
        let parts = parts.get()?;
        let sum = sum.shape(self.gpu, parts.rows / routing.chosen.max(1), parts.cols)?;
        // The device's own copy of the routing, as the router left it.
        let words = self.work.routing.get()?.clone();
        self.recorder().combine(parts, &words, sum)
    }
    fn mix(
        &mut self,
        sources: &GpuSources,
        count: usize,
        w: &GpuBuf,
        eps: f32,
        out: &mut GpuBuf,
        probs: &mut GpuBuf,
    ) -> Result<()> {
        let first = sources.each.first().ok_or_else(|| Error::run("a mix without sources"))?.get()?;
        let slots = sources.slots.as_ref().ok_or_else(|| Error::run("a mix without sources"))?;
        let slots = slots.with_rows(first.rows)?;
        let out = out.shape(self.gpu, first.rows, first.cols)?;
        let probs = probs.shape(self.gpu, first.rows, count)?;
        self.recorder().residual_mix(&slots, count, w.get()?, eps, out, probs)
    }
}
