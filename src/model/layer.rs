//! One layer on one device. Reads as the network is defined; every buffer's shape is beside it.

use super::state::{KdaState, LayerState};
use super::weights::{AttentionWeights, Expert, FfnWeights, Gate, Head, Kda, Layer, Mla, Mlp, Moe, Query};
use super::{Observer, Point};
use crate::checkpoint::config::Config;
use crate::compute::backend::{Backend, Recurrence, Section};
use crate::compute::ops::moe;
use crate::error::{Error, Result};

/// The eps of the two low-rank norms of MLA, fixed in the release's code whatever the configuration says.
const MLA_NORM_EPS: f32 = 1e-6;
/// The eps inside the L2 norm of KDA's queries and keys, added to the sum of squares.
const L2_EPS: f32 = 1e-6;

/// Buffers of a pass, kept between passes so that decoding allocates nothing large.
#[derive(Default)]
pub struct Buffers<T, S> {
    /// Sums of finished blocks, the embedding first, and then the running sum of the current block: each `[T,H]`.
    pub sources: S,
    /// Finished blocks of this pass; the source of this number is the running sum.
    pub blocks: usize,
    /// A sublayer's input mix `[T,H]`, its normed input `[T,H]`, its output `[T,H]`
    mixed: T,
    x: T,
    out: T,
    /// Mix weights `[T,sources]`
    probs: T,
    /// q, k, v before and after the convolution `[T,P]`
    u: T,
    q: T,
    k: T,
    v: T,
    /// Decay `[T,P]`, a low-rank half `[T,D]`, write strength `[T,N]`, output gate `[T,P]`
    decay: T,
    low: T,
    beta: T,
    gate: T,
    /// Attention result before the output projection `[T,P]`
    heads: T,
    /// MLP halves `[T,width]`
    mlp_gate: T,
    mlp_up: T,
    /// Router scores `[T,E]`, latent input `[T,L]`, expert outputs `[T·K,L]`, their sum `[T,L]`, normed `[T,L]`
    scores: T,
    latent: T,
    parts: T,
    sum: T,
    sum_normed: T,
    /// Rows of the latent gathered for one expert `[n,L]`, and its output `[n,L]`
    gathered: T,
    expert_out: T,
    /// Last row of the normed output `[1,H]`
    last: T,
    routing: moe::Routing,
    /// Rows of `parts` by expert.
    groups: Vec<Vec<u32>>,
    rows: Vec<u32>,
}

/// Buffers of a pass on a device.
pub type Scratch<B> = Buffers<<B as Backend>::Tensor, <B as Backend>::Sources>;
/// Weights of a layer on a device.
pub type DeviceLayer<B> = Layer<<B as Backend>::Weight, <B as Backend>::Tensor>;
/// State of a layer on a device.
pub type DeviceState<B> = LayerState<<B as Backend>::Tensor, <B as Backend>::Cache>;

/// What is done with an expert at hand: the device, its number, its weights.
pub type UseExpert<'f, B> = dyn FnMut(&mut B, u32, &Expert<<B as Backend>::Weight>) -> Result<()> + 'f;

/// Where a device gets routed experts from.
pub trait Experts<B: Backend> {
    /// The router of `layer` has spoken: whatever of the distinct `experts` is not at hand is on its way from now on.
    fn request(&mut self, _layer: usize, _experts: &[u32], _pass: u64) -> Result<()> {
        Ok(())
    }
    /// Calls `f` once for each of the distinct `experts` of `layer`, in any order, as they are at hand. `pass` numbers
    /// the forward pass.
    fn for_each(
        &mut self,
        device: &mut B,
        layer: usize,
        experts: &[u32],
        pass: u64,
        f: &mut UseExpert<'_, B>,
    ) -> Result<()>;
}

/// One pass on one device.
pub struct Pass<'a, B: Backend> {
    /// The device.
    pub device: &'a mut B,
    /// The network.
    pub config: &'a Config,
    /// Number of the pass.
    pub number: u64,
    /// Position of its first token.
    pub pos: usize,
    /// Source of experts.
    pub experts: &'a mut dyn Experts<B>,
    /// Who watches.
    pub seen: &'a mut dyn Observer,
}

impl<B: Backend> Pass<'_, B> {
    fn show(&mut self, point: Point, i: usize, values: &B::Tensor) -> Result<()> {
        if self.seen.wants_tensors() {
            let host = self.device.download(values)?;
            self.seen.tensor(point, i, &host);
        }
        Ok(())
    }

    /// Layer `i` on the running sum and the blocks in `s`.
    pub fn layer(
        &mut self,
        i: usize,
        w: &DeviceLayer<B>,
        state: &mut DeviceState<B>,
        s: &mut Scratch<B>,
    ) -> Result<()> {
        let c = self.config;
        self.device.section(Section::of_layer(i, "attention"))?;
        self.mix(&w.attn_mix, s)?;
        self.show(Point::AttnRes, i, &s.mixed)?;
        self.show(Point::AttnProbs, i, &s.probs)?;
        let boundary = c.is_block_boundary(i);
        if boundary {
            // What was the running sum is a finished block now; the next source becomes the running sum.
            s.blocks += 1;
        }
        self.device.rmsnorm(&s.mixed, &w.input_norm, c.rms_norm_eps, &mut s.x)?;
        self.show(Point::AttnIn, i, &s.x)?;
        self.attention(w, state, s)?;
        self.show(Point::AttnOut, i, &s.out)?;
        let sum = B::source_mut(&mut s.sources, s.blocks);
        if boundary {
            self.device.copy(&s.out, sum)?;
        } else {
            self.device.add(sum, &s.out)?;
        }
        self.device.section(Section::of_layer(i, "feed-forward"))?;
        self.mix(&w.ffn_mix, s)?;
        self.show(Point::FfnRes, i, &s.mixed)?;
        self.show(Point::FfnProbs, i, &s.probs)?;
        self.device.rmsnorm(&s.mixed, &w.post_norm, c.rms_norm_eps, &mut s.x)?;
        self.show(Point::FfnIn, i, &s.x)?;
        self.feed_forward(i, w, s)?;
        self.show(Point::FfnOut, i, &s.out)?;
        self.device.add(B::source_mut(&mut s.sources, s.blocks), &s.out)?;
        let sum = B::source(&s.sources, s.blocks);
        self.show(Point::Out, i, sum)?;
        self.device.check_finite(sum, i, self.pos)?;
        self.device.end_layer()
    }

    /// `logits = RMSNorm(mix(blocks + [h]))·lm_headᵀ` of every position, or of the last alone: `[T,V]` or `[1,V]`.
    pub fn head(
        &mut self,
        w: &Head<B::Weight, B::Tensor>,
        all: bool,
        s: &mut Scratch<B>,
        logits: &mut B::Tensor,
    ) -> Result<()> {
        let (c, n) = (self.config, self.config.layers.len());
        self.device.section(Section { layer: None, part: "output head" })?;
        self.mix(&w.mix, s)?;
        self.show(Point::FinalRes, n, &s.mixed)?;
        self.show(Point::FinalProbs, n, &s.probs)?;
        self.device.rmsnorm(&s.mixed, &w.norm, c.rms_norm_eps, &mut s.x)?;
        self.show(Point::FinalNorm, n, &s.x)?;
        let rows = B::rows(&s.x);
        if all || rows == 1 {
            return self.device.matmul(&s.x, &w.lm_head, logits);
        }
        self.device.gather(&s.x, &[rows as u32 - 1], &mut s.last)?;
        self.device.matmul(&s.last, &w.lm_head, logits)
    }

    /// One sublayer alone, on its normed input x `[T,H]`: the attention (`Point::AttnOut`) or the feed-forward.
    pub fn block<'s>(
        &mut self,
        i: usize,
        point: Point,
        x: &B::Tensor,
        w: &DeviceLayer<B>,
        state: &mut DeviceState<B>,
        s: &'s mut Scratch<B>,
    ) -> Result<&'s B::Tensor> {
        self.device.section(Section::of_layer(i, "block"))?;
        self.device.copy(x, &mut s.x)?;
        match point {
            Point::AttnOut => self.attention(w, state, s)?,
            _ => self.feed_forward(i, w, s)?,
        }
        Ok(&s.out)
    }

    /// The mix over the stored blocks and the running sum into `mixed`; without blocks, the running sum itself.
    fn mix(&mut self, w: &B::Tensor, s: &mut Scratch<B>) -> Result<()> {
        self.device.mix(&s.sources, s.blocks + 1, w, self.config.rms_norm_eps, &mut s.mixed, &mut s.probs)
    }

    fn attention(
        &mut self,
        w: &DeviceLayer<B>,
        state: &mut DeviceState<B>,
        s: &mut Scratch<B>,
    ) -> Result<()> {
        match (&w.attention, state) {
            (AttentionWeights::Kda(w), LayerState::Kda { now, next }) => self.kda(w, now, next, s),
            (AttentionWeights::Mla(w), LayerState::Mla(cache)) => self.mla(w, cache, s),
            _ => Err(Error::run("the state is of another model")),
        }
    }

    fn feed_forward(&mut self, i: usize, w: &DeviceLayer<B>, s: &mut Scratch<B>) -> Result<()> {
        match &w.ffn {
            FfnWeights::Dense(w) => self.mlp(w, &s.x, &mut s.mlp_gate, &mut s.mlp_up, &mut s.out),
            FfnWeights::Moe(w) => self.moe(i, w, s),
        }
    }

    fn mlp(
        &mut self,
        w: &Mlp<B::Weight>,
        x: &B::Tensor,
        gate: &mut B::Tensor,
        up: &mut B::Tensor,
        out: &mut B::Tensor,
    ) -> Result<()> {
        let (d, c) = (&mut *self.device, self.config);
        d.matmul(x, &w.gate, gate)?;
        d.matmul(x, &w.up, up)?;
        d.situ(gate, up, c.situ_beta, c.situ_linear_beta)?;
        d.matmul(gate, &w.down, out)
    }

    /// Kimi Delta Attention of `s.x` into `s.out`.
    fn kda(
        &mut self,
        w: &Kda<B::Weight, B::Tensor>,
        now: &KdaState<B::Tensor>,
        next: &mut KdaState<B::Tensor>,
        s: &mut Scratch<B>,
    ) -> Result<()> {
        let (d, c) = (&mut *self.device, self.config);
        for (n, y) in [&mut s.q, &mut s.k, &mut s.v].into_iter().enumerate() {
            d.matmul(&s.x, &w.qkv[n], &mut s.u)?;
            d.short_conv(&s.u, &w.conv[n], &now.conv[n], y, &mut next.conv[n])?;
        }
        d.matmul(&s.x, &w.f_a, &mut s.low)?;
        d.matmul(&s.low, &w.f_b, &mut s.decay)?;
        d.matmul(&s.x, &w.b, &mut s.beta)?;
        d.kda_gates(&mut s.decay, &mut s.beta, &w.a_log, &w.dt_bias, c.kda.gate_lower_bound)?;
        let dim = c.kda.head_dim;
        d.l2norm(&mut s.q, dim, L2_EPS, (dim as f32).sqrt().recip())?;
        d.l2norm(&mut s.k, dim, L2_EPS, 1.0)?;
        let r = Recurrence { q: &s.q, k: &s.k, v: &s.v, decay: &s.decay, beta: &s.beta };
        d.recurrence(&r, &now.s, &mut next.s, &mut s.heads)?;
        match &w.gate {
            Gate::Full(g) => d.matmul(&s.x, g, &mut s.gate)?,
            Gate::LowRank(a, b) => {
                d.matmul(&s.x, a, &mut s.low)?;
                d.matmul(&s.low, b, &mut s.gate)?;
            }
        }
        d.norm_gate(&mut s.heads, &w.o_norm, c.rms_norm_eps, &s.gate)?;
        d.matmul(&s.heads, &w.o, &mut s.out)
    }

    /// Gated MLA of `s.x` into `s.out`.
    fn mla(&mut self, w: &Mla<B::Weight, B::Tensor>, cache: &mut B::Cache, s: &mut Scratch<B>) -> Result<()> {
        let d = &mut *self.device;
        match &w.q {
            Query::Full(q) => d.matmul(&s.x, q, &mut s.q)?,
            Query::LowRank(a, n, b) => {
                d.matmul(&s.x, a, &mut s.low)?;
                d.rmsnorm(&s.low, n, MLA_NORM_EPS, &mut s.u)?;
                d.matmul(&s.u, b, &mut s.q)?;
            }
        }
        d.matmul(&s.x, &w.kv_a, &mut s.k)?;
        d.append(&s.k, &w.kv_norm, MLA_NORM_EPS, self.pos, cache)?;
        let gate = match &w.gate {
            Some(g) => {
                d.matmul(&s.x, g, &mut s.gate)?;
                Some(&s.gate)
            }
            None => None,
        };
        d.attend(&s.q, &w.kv_b, cache, self.pos, gate, &mut s.heads)?;
        d.matmul(&s.heads, &w.o, &mut s.out)
    }

    /// Latent mixture of experts of `s.x` into `s.out`. Each distinct expert is taken once, for all its tokens.
    fn moe(&mut self, layer: usize, w: &Moe<B::Weight, B::Tensor>, s: &mut Scratch<B>) -> Result<()> {
        let c = self.config;
        let k = c.moe.experts_per_token;
        let d = &mut *self.device;
        d.matmul(&s.x, &w.router, &mut s.scores)?;
        let router =
            moe::Router { chosen: k, renormalize: c.moe.renormalize, scale: c.moe.routed_scaling_factor };
        d.route(&mut s.scores, &w.bias, router, &mut s.routing)?;
        self.seen.routing(layer, &s.routing);
        let tokens = B::rows(&s.x);
        s.groups.resize_with(c.moe.experts, Vec::new);
        s.groups.iter_mut().for_each(Vec::clear);
        for (slot, e) in s.routing.experts.iter().enumerate() {
            s.groups[*e as usize].push(slot as u32);
        }
        let distinct: Vec<u32> =
            (0..c.moe.experts as u32).filter(|e| !s.groups[*e as usize].is_empty()).collect();
        // While the experts are on their way: what does not need them.
        self.experts.request(layer, &distinct, self.number)?;
        match &w.latent {
            Some((down, _)) => d.matmul(&s.x, down, &mut s.latent)?,
            None => d.copy(&s.x, &mut s.latent)?,
        }
        if let Some(shared) = &w.shared {
            self.mlp(shared, &s.x, &mut s.mlp_gate, &mut s.mlp_up, &mut s.mixed)?;
        }
        let d = &mut *self.device;
        d.shape(&mut s.parts, tokens * k, c.expert_width())?;
        self.experts.for_each(d, layer, &distinct, self.number, &mut |d, e, expert| {
            let slots = &s.groups[e as usize];
            s.rows.clear();
            s.rows.extend(slots.iter().map(|slot| slot / k as u32));
            d.gather(&s.latent, &s.rows, &mut s.gathered)?;
            d.matmul(&s.gathered, &expert.w1, &mut s.mlp_gate)?;
            d.matmul(&s.gathered, &expert.w3, &mut s.mlp_up)?;
            d.situ(&mut s.mlp_gate, &s.mlp_up, c.situ_beta, c.situ_linear_beta)?;
            d.matmul(&s.mlp_gate, &expert.w2, &mut s.expert_out)?;
            d.scatter(&s.expert_out, slots, &mut s.parts)
        })?;
        let d = &mut *self.device;
        d.combine(&s.parts, &s.routing, &mut s.sum)?;
        self.show(Point::LatentSum, layer, &s.sum)?;
        let d = &mut *self.device;
        let sum = match &w.norm {
            Some(n) => {
                d.rmsnorm(&s.sum, n, c.rms_norm_eps, &mut s.sum_normed)?;
                &s.sum_normed
            }
            None => &s.sum,
        };
        match &w.latent {
            Some((_, up)) => d.matmul(sum, up, &mut s.out)?,
            None => d.copy(sum, &mut s.out)?,
        }
        if w.shared.is_some() {
            self.device.add(&mut s.out, &s.mixed)?;
        }
        Ok(())
    }
}
