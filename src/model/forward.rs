//! One pass: T tokens through every layer, each on its device.

use super::gpu::{GpuSide, ResidentExperts};
use super::layer::{Buffers, DeviceState, Experts, Pass, UseExpert};
use super::state::{AnyState, LayerState, State};
use super::weights::{Expert, Layer};
use super::{Model, Observer, Point, transfer};
use crate::checkpoint::config::Config;
use crate::checkpoint::names;
use crate::compute::backend::{Backend, Section};
use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor};
use crate::compute::gpu::backend::{GpuBackend, GpuBuf, GpuSources, GpuWork};
use crate::compute::gpu::mla;
use crate::error::{Error, Kind, Result};
use crate::memory::experts::Request;
use crate::report::trace::{Details, Track, begin};
use std::sync::Arc;

/// Which logits a pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Those of the last position `[1,V]`.
    Last,
    /// Those of every position `[T,V]`.
    All,
}

/// Buffers of a pass, kept between passes.
#[derive(Default)]
pub struct Scratch {
    cpu: Buffers<Tensor, Vec<Tensor>>,
    gpu: Buffers<GpuBuf, GpuSources>,
    gpu_logits: GpuBuf,
    work: GpuWork,
    /// `[T,V]` or `[1,V]`
    logits: Tensor,
}

/// Values of f32 per token that a pass needs, roughly, without the logits.
fn values_per_token(c: &Config) -> usize {
    let p = c.kda.heads * c.kda.head_dim;
    c.hidden_size * (sources(c) + 3)
        + 8 * p
        + 2 * c.intermediate_size
        + c.moe.experts
        + c.expert_width() * (c.moe.experts_per_token + 5)
}

/// Sources of the last residual mix.
fn sources(c: &Config) -> usize {
    1 + (0..c.layers.len()).filter(|i| c.is_block_boundary(*i)).count()
}

impl Scratch {
    /// Bytes that a pass of `tokens` tokens needs, roughly: the figure of the plan.
    pub fn bytes(c: &Config, tokens: usize, all_logits: bool) -> u64 {
        let logits = if all_logits { tokens } else { 1 } * c.vocab_size;
        4 * (tokens * values_per_token(c) + logits) as u64
    }

    /// Bytes that a pass of `tokens` tokens at up to `context` positions needs on a GPU: the buffers of a pass, those that
    /// results replace their input in, and the room that attention works in.
    pub fn device_bytes(c: &Config, tokens: usize, context: usize, all_logits: bool) -> u64 {
        let splits = mla::splits(context);
        let attend = tokens * c.mla.heads * (2 * c.mla.kv_lora_rank + splits * (c.mla.kv_lora_rank + 2));
        // Flags, routing and row numbers are small, but there are many of them.
        let small = 256 << 10;
        2 * Scratch::bytes(c, tokens, all_logits) + 4 * attend as u64 + small
    }

    /// Tokens of a pass whose widest buffer stays within `limit` bytes.
    pub fn most_tokens(c: &Config, limit: u64, all_logits: bool) -> usize {
        let widest = (c.hidden_size * sources(c))
            .max(c.intermediate_size)
            .max(c.moe.shared_experts * c.moe.intermediate_size)
            .max(c.expert_width() * c.moe.experts_per_token)
            .max(c.mla.heads * c.mla.kv_lora_rank)
            .max(if all_logits { c.vocab_size } else { 0 });
        usize::try_from(limit / (4 * widest as u64)).unwrap_or(usize::MAX).max(1)
    }
}

/// Experts from the store in host memory.
struct HostExperts<'a> {
    model: &'a Model,
    request: Option<Request>,
}

impl<'a> HostExperts<'a> {
    fn new(model: &'a Model) -> HostExperts<'a> {
        HostExperts { model, request: None }
    }
}

impl<'c> Experts<&'c Cpu> for HostExperts<'_> {
    fn request(&mut self, layer: usize, experts: &[u32], pass: u64) -> Result<()> {
        self.request = Some(self.model.experts.request(layer, experts, pass)?);
        Ok(())
    }

    fn for_each(
        &mut self,
        device: &mut &'c Cpu,
        layer: usize,
        experts: &[u32],
        pass: u64,
        f: &mut UseExpert<'_, &'c Cpu>,
    ) -> Result<()> {
        let model = self.model;
        let request = match self.request.take() {
            Some(request) => request,
            None => model.experts.request(layer, experts, pass)?,
        };
        model.experts.deliver(request, |e, slab| {
            model.check_cancelled()?;
            f(device, e, &Expert::bind(model.config(), slab)?)?;
            model.counters.ram_bytes.add(model.expert_bytes);
            Ok(())
        })
    }
}

/// What a pass works on.
struct Run<'a> {
    model: &'a Model,
    number: u64,
    pos: usize,
    seen: &'a mut dyn Observer,
}

impl Run<'_> {
    fn cpu_layer(
        &mut self,
        i: usize,
        state: &mut DeviceState<&Cpu>,
        s: &mut Buffers<Tensor, Vec<Tensor>>,
    ) -> Result<()> {
        let m = self.model;
        let layer = m.layer(i)?;
        let pass = Pass {
            device: &mut &m.cpu,
            config: m.config(),
            number: self.number,
            pos: self.pos,
            experts: &mut HostExperts::new(m),
            seen: self.seen,
        };
        { pass }.layer(i, &layer, state, s)?;
        m.counters.ram_bytes.add(m.trunk.unit(i).bytes());
        Ok(())
    }

    fn gpu_layer(
        &mut self,
        i: usize,
        side: &GpuSide,
        device: &mut GpuBackend<'_>,
        state: &mut LayerState<GpuBuf, crate::compute::gpu::LatentCache>,
        s: &mut Buffers<GpuBuf, GpuSources>,
    ) -> Result<()> {
        let m = self.model;
        let layer = side.layer(i)?;
        let mut experts = Counted { inner: ResidentExperts(layer), model: m };
        let pass = Pass {
            device,
            config: m.config(),
            number: self.number,
            pos: self.pos,
            experts: &mut experts,
            seen: self.seen,
        };
        { pass }.layer(i, &layer.trunk, state, s)?;
        m.counters.vram_bytes.add(m.trunk.unit(i).bytes());
        Ok(())
    }
}

/// Counts what the GPU takes from its own memory.
struct Counted<'a> {
    inner: ResidentExperts<'a>,
    model: &'a Model,
}

impl<'g> Experts<GpuBackend<'g>> for Counted<'_> {
    fn for_each(
        &mut self,
        device: &mut GpuBackend<'g>,
        layer: usize,
        experts: &[u32],
        pass: u64,
        f: &mut UseExpert<'_, GpuBackend<'g>>,
    ) -> Result<()> {
        self.model.check_cancelled()?;
        let (c, n) = (&self.model.counters, experts.len() as u64);
        c.expert_requests.add(n);
        c.expert_vram_hits.add(n);
        c.vram_bytes.add(n * self.model.expert_bytes);
        self.inner.for_each(device, layer, experts, pass, f)
    }
}

/// Where the activations of a pass are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Cpu,
    Gpu,
}

/// Carries the sources of the residual mix to the GPU.
fn to_gpu(device: &mut GpuBackend<'_>, s: &mut Scratch, count: usize) -> Result<()> {
    let first = &s.cpu.sources[0];
    device.shape_sources(&mut s.gpu.sources, count, first.rows(), first.cols())?;
    s.gpu.blocks = s.cpu.blocks;
    for i in 0..=s.cpu.blocks {
        device.upload(&s.cpu.sources[i], GpuBackend::source_mut(&mut s.gpu.sources, i))?;
    }
    Ok(())
}

/// Carries them back.
fn to_cpu(device: &mut GpuBackend<'_>, s: &mut Scratch) -> Result<()> {
    s.cpu.blocks = s.gpu.blocks;
    for i in 0..=s.gpu.blocks {
        s.cpu.sources[i] = device.download(GpuBackend::source(&s.gpu.sources, i))?;
    }
    Ok(())
}

impl Model {
    /// The state before the first token, each layer's where the layer is computed.
    pub fn new_state(&self) -> Result<State> {
        let config = self.config();
        let mut layers = Vec::with_capacity(config.layers.len());
        let mut work = GpuWork::default();
        for i in 0..config.layers.len() {
            layers.push(match &self.gpu {
                Some(side) if self.on_gpu[i] => {
                    let mut device = GpuBackend::new(&side.gpu, &mut work, self.trace.clone());
                    AnyState::Gpu(transfer::state(&mut device, config, i, self.context)?)
                }
                _ => AnyState::Cpu(transfer::state(&mut &self.cpu, config, i, self.context)?),
            });
        }
        Ok(State { layers, len: 0, capacity: self.context })
    }

    /// The most tokens that one pass takes.
    pub fn most_tokens(&self) -> usize {
        self.most_tokens
    }

    /// Feeds `ids` at the state's end. On success the state has advanced by all of them; on any error, a
    /// cancelled run among them, it is that of the last whole step.
    pub fn forward<'s>(
        &self,
        state: &mut State,
        s: &'s mut Scratch,
        ids: &[u32],
        want: Logits,
        seen: &mut dyn Observer,
    ) -> Result<&'s Tensor> {
        let end = state.len() + ids.len();
        if end > state.capacity() {
            return Err(Error::usage(format!(
                "{end} positions do not fit the planned context of {}",
                state.capacity()
            ))
            .hint("raise --context"));
        }
        if ids.is_empty() || ids.len() > self.most_tokens {
            return Err(Error::usage("a pass has another number of tokens")
                .expected(format_args!("1 to {}", self.most_tokens), ids.len()));
        }
        let run = Run { model: self, number: self.next_pass(), pos: state.len(), seen };
        self.cpu.run(|| self.pass(run, state, s, ids, want))?;
        state.commit(ids.len())?;
        Ok(&s.logits)
    }

    fn pass(
        &self,
        mut run: Run<'_>,
        state: &mut State,
        s: &mut Scratch,
        ids: &[u32],
        want: Logits,
    ) -> Result<()> {
        let config = self.config();
        let count = sources(config);
        s.cpu.blocks = 0;
        (&mut &self.cpu).shape_sources(&mut s.cpu.sources, count, ids.len(), config.hidden_size)?;
        self.embed(ids, &mut s.cpu.sources[0])?;
        let mut work = std::mem::take(&mut s.work);
        let mut device =
            self.gpu.as_ref().map(|side| GpuBackend::new(&side.gpu, &mut work, self.trace.clone()));
        let result = self.layers(&mut run, device.as_mut(), state, s, want);
        // What was on its way when a pass ended early belongs to the trace too.
        let traced = device.as_mut().map_or(Ok(()), GpuBackend::collect_traces);
        drop(device);
        s.work = work;
        result.and(traced)?;
        let first = run.pos + ids.len() - s.logits.rows();
        for t in 0..s.logits.rows() {
            if !vector::all_finite(s.logits.row(t)) {
                return Err(Error::new(Kind::NonFinite, "a logit is not finite").position(first + t));
            }
        }
        Ok(())
    }

    /// Every layer and the output head, each on its device; what they need beside it is carried over.
    fn layers(
        &self,
        run: &mut Run<'_>,
        mut device: Option<&mut GpuBackend<'_>>,
        state: &mut State,
        s: &mut Scratch,
        want: Logits,
    ) -> Result<()> {
        let n = self.config().layers.len();
        let count = sources(self.config());
        let mut at = At::Cpu;
        for i in 0..=n {
            run.seen.layer(i, n);
            self.check_cancelled()?;
            let span = begin(&self.trace);
            if let Some(device) = &mut device {
                let goal = if self.on_gpu[i] { At::Gpu } else { At::Cpu };
                let layer = (i < n).then_some(i);
                if at != goal {
                    device.section(Section { layer, part: "activations" })?;
                }
                match (at, goal) {
                    (At::Cpu, At::Gpu) => to_gpu(device, s, count)?,
                    (At::Gpu, At::Cpu) => to_cpu(device, s)?,
                    _ => {}
                }
                at = goal;
            }
            if i == n {
                self.head(run, at, device.as_deref_mut(), s, want)?;
            } else {
                match (&mut state.layers[i], &self.gpu, &mut device) {
                    (AnyState::Cpu(state), _, _) => run.cpu_layer(i, state, &mut s.cpu),
                    (AnyState::Gpu(state), Some(side), Some(device)) => {
                        run.gpu_layer(i, side, device, state, &mut s.gpu)
                    }
                    _ => Err(Error::run("the state is of another model")),
                }
                .map_err(|e| e.layer(i))?;
            }
            if let Some(span) = span {
                let name = if i == n { "output head".to_string() } else { format!("layer {i}") };
                let (layer, pass) = ((i < n).then_some(i), Some(run.number));
                span.end(Track::Layers, name, Details { layer, pass, ..Details::default() });
            }
        }
        Ok(())
    }

    fn head(
        &self,
        run: &mut Run<'_>,
        at: At,
        device: Option<&mut GpuBackend<'_>>,
        s: &mut Scratch,
        want: Logits,
    ) -> Result<()> {
        let (config, all) = (self.config(), want == Logits::All);
        let (number, pos) = (run.number, run.pos);
        let unit = self.trunk.unit(config.layers.len()).bytes();
        match (at, device, &self.gpu) {
            (At::Gpu, Some(device), Some(side)) => {
                let experts = &mut NoExperts;
                let mut pass = Pass { device, config, number, pos, experts, seen: run.seen };
                pass.head(side.head()?, all, &mut s.gpu, &mut s.gpu_logits)?;
                s.logits = pass.device.download(&s.gpu_logits)?;
                self.counters.vram_bytes.add(unit);
            }
            _ => {
                let head = self.output()?;
                let experts = &mut HostExperts::new(self);
                let mut pass = Pass { device: &mut &self.cpu, config, number, pos, experts, seen: run.seen };
                pass.head(&head, all, &mut s.cpu, &mut s.logits)?;
                self.counters.ram_bytes.add(unit);
            }
        }
        Ok(())
    }

    /// One sublayer of layer `i` alone, on its normed input x `[T,H]`: the attention (`Point::AttnOut`) or the
    /// feed-forward (`Point::FfnOut`). The state advances by T.
    pub fn block(
        &self,
        i: usize,
        point: Point,
        x: &Tensor,
        state: &mut State,
        s: &mut Scratch,
    ) -> Result<Tensor> {
        let (config, number, pos) = (self.config(), self.next_pass(), state.len());
        let seen = &mut super::Unobserved;
        let out = match (&mut state.layers[i], &self.gpu) {
            (AnyState::Gpu(state), Some(side)) => {
                let layer = side.layer(i)?;
                let mut device = GpuBackend::new(&side.gpu, &mut s.work, self.trace.clone());
                let mut input = GpuBuf::default();
                device.upload(x, &mut input)?;
                let experts = &mut ResidentExperts(layer);
                let mut pass = Pass { device: &mut device, config, number, pos, experts, seen };
                let out = pass.block(i, point, &input, &layer.trunk, state, &mut s.gpu)?;
                device.download(out)?
            }
            (AnyState::Cpu(state), _) => {
                let layer = self.layer(i)?;
                let experts = &mut HostExperts::new(self);
                let mut pass = Pass { device: &mut &self.cpu, config, number, pos, experts, seen };
                pass.block(i, point, x, &layer, state, &mut s.cpu)?.clone()
            }
            _ => return Err(Error::run("the state is of another model")),
        };
        state.commit(x.rows())?;
        Ok(out)
    }

    /// `h = embed[ids]`: one row of the table a token, read from its file.
    fn embed(&self, ids: &[u32], h: &mut Tensor) -> Result<()> {
        h.reshape(ids.len(), self.config().hidden_size);
        for (t, id) in ids.iter().enumerate() {
            let span = begin(&self.trace);
            self.embedding.row(*id, h.row_mut(t))?;
            let bytes = self.embedding.row_bytes();
            self.counters.nvme_bytes.add(bytes);
            if let Some(span) = span {
                let (bytes, shard) = (Some(bytes), Some(self.embedding.table.shard));
                span.end(Track::Reads, names::EMBED, Details { bytes, shard, ..Details::default() });
            }
        }
        Ok(())
    }

    fn layer(&self, i: usize) -> Result<Arc<Layer>> {
        self.bound.layer(self, i)
    }
}

/// The output head routes nothing.
struct NoExperts;

impl<B: Backend> Experts<B> for NoExperts {
    fn for_each(
        &mut self,
        _device: &mut B,
        layer: usize,
        _experts: &[u32],
        _pass: u64,
        _f: &mut UseExpert<'_, B>,
    ) -> Result<()> {
        Err(Error::run("the output head has no experts").layer(layer))
    }
}
