//! One pass: T tokens through every layer. Reads as the network is defined; every buffer's shape is beside it.

use super::state::{LayerState, State};
use super::weights::{AttentionWeights, Expert, FfnWeights, Gate, Kda, Layer, Mla, Mlp, Moe, Query};
use super::{Model, Observer, Point};
use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor};
use crate::compute::ops::{kda, matmul::*, mla, moe, norm, residual};
use crate::error::{Error, Kind, Result};
use crate::model::state::{KdaState, MlaCache};

/// The eps of the two low-rank norms of MLA, fixed in the release's code whatever the configuration says.
const MLA_NORM_EPS: f32 = 1e-6;
/// The eps inside the L2 norm of KDA's queries and keys, added to the sum of squares.
const L2_EPS: f32 = 1e-6;

/// Which logits a pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Those of the last position `[1,V]`.
    Last,
    /// Those of every position `[T,V]`.
    All,
}

/// Buffers of a pass, kept between passes so that decoding allocates nothing large.
#[derive(Default)]
pub struct Scratch {
    /// Sums of finished blocks, each `[T,H]`; the first is the embedding.
    blocks: Vec<Tensor>,
    /// How many of `blocks` belong to the current pass.
    used: usize,
    /// Running sum of the current block `[T,H]`
    prefix: Tensor,
    /// A sublayer's input mix `[T,H]`, its normed input `[T,H]`, its output `[T,H]`
    mixed: Tensor,
    x: Tensor,
    out: Tensor,
    /// Mix weights `[T,sources]`
    probs: Tensor,
    /// q, k, v before and after the convolution `[T,P]`
    u: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// Decay `[T,P]`, its low-rank half `[T,D]`, write strength `[T,N]`, output gate `[T,P]`
    decay: Tensor,
    low: Tensor,
    beta: Tensor,
    gate: Tensor,
    /// Attention result before the output projection `[T,P]`
    heads: Tensor,
    /// MLP halves `[T,width]`
    mlp_gate: Tensor,
    mlp_up: Tensor,
    /// Router scores `[T,E]`, latent input `[T,L]`, expert outputs `[T·K,L]`, their sum `[T,L]`
    scores: Tensor,
    latent: Tensor,
    parts: Tensor,
    sum: Tensor,
    sum_normed: Tensor,
    /// Rows of the latent gathered for one expert `[n,L]`, and its output `[n,L]`
    gathered: Tensor,
    expert_out: Tensor,
    routing: moe::Routing,
    groups: Vec<Vec<u32>>,
    logits: Tensor,
}

impl Scratch {
    /// Bytes that a pass of `tokens` tokens needs, roughly: the figure of the plan.
    pub fn bytes(config: &crate::checkpoint::config::Config, tokens: usize, all_logits: bool) -> u64 {
        let c = config;
        let p = c.kda.heads * c.kda.head_dim;
        let boundaries = c.attn_res_block_size.map_or(0, |b| c.layers.len().div_ceil(b));
        let l = c.moe.latent_size.unwrap_or(c.hidden_size);
        let per_token = c.hidden_size * (boundaries + 4)
            + 8 * p
            + 2 * c.intermediate_size
            + c.moe.experts
            + l * (c.moe.experts_per_token + 5);
        let logits = if all_logits { tokens } else { 1 } * c.vocab_size;
        4 * (tokens * per_token + logits) as u64
    }
}

impl Model {
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
        let pass = self.next_pass();
        self.cpu.run(|| self.layers(state, s, ids, want, pass, seen))?;
        state.commit(ids.len());
        Ok(&s.logits)
    }

    fn layers(
        &self,
        state: &mut State,
        s: &mut Scratch,
        ids: &[u32],
        want: Logits,
        pass: u64,
        seen: &mut dyn Observer,
    ) -> Result<()> {
        let c = self.config();
        let dev = &self.cpu;
        let pos = state.len();
        s.used = 0;
        self.embed(ids, &mut s.prefix)?;
        for i in 0..c.layers.len() {
            seen.layer(i, c.layers.len());
            self.check_cancelled()?;
            let layer = self.layer(i)?;
            seen.tensor(Point::AttnSources, i, &s.prefix);
            s.mix(dev, &layer.attn_mix, c.rms_norm_eps);
            seen.tensor(Point::AttnRes, i, &s.mixed);
            seen.tensor(Point::AttnProbs, i, &s.probs);
            let boundary = c.is_block_boundary(i);
            if boundary {
                s.push_block();
            }
            norm::rmsnorm(dev, &s.mixed, &layer.input_norm, c.rms_norm_eps, &mut s.x);
            seen.tensor(Point::AttnIn, i, &s.x);
            self.attention(&layer, &mut state.layers[i], pos, s).map_err(|e| e.layer(i))?;
            seen.tensor(Point::AttnOut, i, &s.out);
            if boundary {
                std::mem::swap(&mut s.prefix, &mut s.out);
            } else {
                add(&mut s.prefix, &s.out);
            }
            s.mix(dev, &layer.ffn_mix, c.rms_norm_eps);
            seen.tensor(Point::FfnRes, i, &s.mixed);
            seen.tensor(Point::FfnProbs, i, &s.probs);
            norm::rmsnorm(dev, &s.mixed, &layer.post_norm, c.rms_norm_eps, &mut s.x);
            seen.tensor(Point::FfnIn, i, &s.x);
            self.feed_forward(&layer, i, pass, s, seen).map_err(|e| e.layer(i))?;
            seen.tensor(Point::FfnOut, i, &s.out);
            add(&mut s.prefix, &s.out);
            seen.tensor(Point::Out, i, &s.prefix);
            if !vector::all_finite(s.prefix.host()) {
                return Err(Error::new(Kind::NonFinite, "a hidden value is not finite")
                    .layer(i)
                    .position(pos));
            }
            self.counters.ram_bytes.add(self.trunk.unit(i).bytes());
        }
        self.head(s, want, pos, seen)
    }

    /// One sublayer of layer `i` alone, on its normed input x `[T,H]`: the attention (`Point::AttnOut`) or the
    /// feed-forward (`Point::FfnOut`). The state advances by T.
    pub fn block<'s>(
        &self,
        i: usize,
        point: Point,
        x: &Tensor,
        state: &mut State,
        s: &'s mut Scratch,
    ) -> Result<&'s Tensor> {
        let pos = state.len();
        let layer = self.layer(i)?;
        s.x.clone_from(x);
        if point == Point::AttnOut {
            self.attention(&layer, &mut state.layers[i], pos, s)?;
        } else {
            self.feed_forward(&layer, i, self.next_pass(), s, &mut super::Unobserved)?;
        }
        state.commit(x.rows());
        Ok(&s.out)
    }

    fn attention(&self, layer: &Layer, state: &mut LayerState, pos: usize, s: &mut Scratch) -> Result<()> {
        match (&layer.attention, state) {
            (AttentionWeights::Kda(w), LayerState::Kda { now, next }) => self.kda(w, now, next, s),
            (AttentionWeights::Mla(w), LayerState::Mla(cache)) => self.mla(w, cache, pos, s),
            _ => return Err(Error::run("the state is of another model")),
        }
        Ok(())
    }

    fn feed_forward(
        &self,
        layer: &Layer,
        i: usize,
        pass: u64,
        s: &mut Scratch,
        seen: &mut dyn Observer,
    ) -> Result<()> {
        match &layer.ffn {
            FfnWeights::Dense(w) => {
                self.mlp(w, &s.x, &mut s.mlp_gate, &mut s.mlp_up, &mut s.out);
                Ok(())
            }
            FfnWeights::Moe(w) => self.moe(w, i, pass, s, seen),
        }
    }

    /// `h = embed[ids]`: one row of the table a token, read from its file.
    fn embed(&self, ids: &[u32], h: &mut Tensor) -> Result<()> {
        let hidden = self.config().hidden_size;
        h.reshape(ids.len(), hidden);
        for (t, id) in ids.iter().enumerate() {
            self.embedding.row(*id, h.row_mut(t))?;
            self.counters.nvme_bytes.add(self.embedding.row_bytes());
        }
        Ok(())
    }

    /// `logits = RMSNorm(mix(blocks + [h]))·lm_headᵀ`
    fn head(&self, s: &mut Scratch, want: Logits, pos: usize, seen: &mut dyn Observer) -> Result<()> {
        let c = self.config();
        let dev = &self.cpu;
        let t_len = s.prefix.rows();
        let n = c.layers.len();
        seen.layer(n, n);
        let head = self.output()?;
        s.mix(dev, &head.mix, c.rms_norm_eps);
        seen.tensor(Point::FinalRes, n, &s.mixed);
        seen.tensor(Point::FinalProbs, n, &s.probs);
        norm::rmsnorm(dev, &s.mixed, &head.norm, c.rms_norm_eps, &mut s.x);
        seen.tensor(Point::FinalNorm, n, &s.x);
        if want == Logits::Last && t_len > 1 {
            let last = s.x.row(t_len - 1).to_vec();
            s.x = Tensor::from_vec(1, c.hidden_size, last);
        }
        matmul(dev, &s.x, &head.lm_head, &mut s.logits);
        self.counters.ram_bytes.add(head.lm_head.matrix().bytes() as u64);
        let first = pos + t_len - s.logits.rows();
        for t in 0..s.logits.rows() {
            if !vector::all_finite(s.logits.row(t)) {
                return Err(Error::new(Kind::NonFinite, "a logit is not finite").position(first + t));
            }
        }
        Ok(())
    }

    fn mlp(&self, w: &Mlp, x: &Tensor, gate: &mut Tensor, up: &mut Tensor, out: &mut Tensor) {
        let c = self.config();
        matmul(&self.cpu, x, &w.gate, gate);
        matmul(&self.cpu, x, &w.up, up);
        situ(&self.cpu, gate, up, c.situ_beta, c.situ_linear_beta);
        matmul(&self.cpu, gate, &w.down, out);
    }

    /// Kimi Delta Attention of `s.x` into `s.out`.
    fn kda(&self, w: &Kda, now: &KdaState, next: &mut KdaState, s: &mut Scratch) {
        let c = self.config();
        let dev = &self.cpu;
        for (n, y) in [&mut s.q, &mut s.k, &mut s.v].into_iter().enumerate() {
            matmul(dev, &s.x, &w.qkv[n], &mut s.u);
            kda::short_conv(dev, &s.u, &w.conv[n], &now.conv[n], y, &mut next.conv[n]);
        }
        matmul(dev, &s.x, &w.f_a, &mut s.low);
        matmul(dev, &s.low, &w.f_b, &mut s.decay);
        kda::decay(dev, &mut s.decay, &w.a, &w.dt_bias, c.kda.gate_lower_bound);
        matmul(dev, &s.x, &w.b, &mut s.beta);
        kda::sigmoid(dev, &mut s.beta);
        let dim = c.kda.head_dim;
        norm::l2norm(dev, &mut s.q, dim, L2_EPS, (dim as f32).sqrt().recip());
        norm::l2norm(dev, &mut s.k, dim, L2_EPS, 1.0);
        let r = kda::Recurrence { q: &s.q, k: &s.k, v: &s.v, decay: &s.decay, beta: &s.beta };
        kda::recurrence(dev, &r, &now.s, &mut next.s, &mut s.heads);
        match &w.gate {
            Gate::Full(g) => matmul(dev, &s.x, g, &mut s.gate),
            Gate::LowRank(a, b) => {
                matmul(dev, &s.x, a, &mut s.low);
                matmul(dev, &s.low, b, &mut s.gate);
            }
        }
        kda::norm_gate(dev, &mut s.heads, &w.o_norm, c.rms_norm_eps, &s.gate);
        matmul(dev, &s.heads, &w.o, &mut s.out);
    }

    /// Gated MLA of `s.x` into `s.out`.
    fn mla(&self, w: &Mla, cache: &mut MlaCache, pos: usize, s: &mut Scratch) {
        let m = &self.config().mla;
        let dev = &self.cpu;
        match &w.q {
            Query::Full(q) => matmul(dev, &s.x, q, &mut s.q),
            Query::LowRank(a, n, b) => {
                matmul(dev, &s.x, a, &mut s.low);
                norm::rmsnorm(dev, &s.low, n, MLA_NORM_EPS, &mut s.u);
                matmul(dev, &s.u, b, &mut s.q);
            }
        }
        matmul(dev, &s.x, &w.kv_a, &mut s.k);
        mla::append(&s.k, &w.kv_norm, MLA_NORM_EPS, pos, &mut cache.latent, &mut cache.rope);
        let shape = mla::Shape {
            heads: m.heads,
            nope: m.qk_nope_head_dim,
            rope: m.qk_rope_head_dim,
            value: m.v_head_dim,
            rank: m.kv_lora_rank,
        };
        mla::attend(dev, shape, &s.q, &w.kv_b, (&cache.latent, &cache.rope), pos, &mut s.heads);
        if let Some(g) = &w.gate {
            matmul(dev, &s.x, g, &mut s.gate);
            gate_sigmoid(dev, &mut s.heads, &s.gate);
        }
        matmul(dev, &s.heads, &w.o, &mut s.out);
    }

    /// Latent mixture of experts of `s.x` into `s.out`. Each distinct expert is taken once, for all its tokens.
    fn moe(&self, w: &Moe, layer: usize, pass: u64, s: &mut Scratch, seen: &mut dyn Observer) -> Result<()> {
        let c = self.config();
        let dev = &self.cpu;
        let k = c.moe.experts_per_token;
        matmul(dev, &s.x, &w.router, &mut s.scores);
        let router =
            moe::Router { chosen: k, renormalize: c.moe.renormalize, scale: c.moe.routed_scaling_factor };
        moe::route(dev, &mut s.scores, &w.bias, router, &mut s.routing)?;
        seen.routing(layer, &s.routing);
        match &w.latent {
            Some((down, _)) => matmul(dev, &s.x, down, &mut s.latent),
            None => s.latent.clone_from(&s.x),
        }
        let t_len = s.x.rows();
        let width = s.latent.cols();
        s.groups.resize_with(c.moe.experts, Vec::new);
        s.groups.iter_mut().for_each(Vec::clear);
        for (slot, e) in s.routing.experts.iter().enumerate() {
            s.groups[*e as usize].push(slot as u32);
        }
        let distinct: Vec<u32> =
            (0..c.moe.experts as u32).filter(|e| !s.groups[*e as usize].is_empty()).collect();
        s.parts.reshape(t_len * k, width);
        self.experts.for_each(layer, &distinct, pass, |e, slab| {
            self.check_cancelled()?;
            let expert = Expert::bind(c, slab)?;
            let slots = &s.groups[e as usize];
            s.gathered.reshape(slots.len(), width);
            for (row, slot) in slots.iter().enumerate() {
                s.gathered.row_mut(row).copy_from_slice(s.latent.row(*slot as usize / k));
            }
            matmul(dev, &s.gathered, &expert.w1, &mut s.mlp_gate);
            matmul(dev, &s.gathered, &expert.w3, &mut s.mlp_up);
            situ(dev, &mut s.mlp_gate, &s.mlp_up, c.situ_beta, c.situ_linear_beta);
            matmul(dev, &s.mlp_gate, &expert.w2, &mut s.expert_out);
            for (row, slot) in slots.iter().enumerate() {
                s.parts.row_mut(*slot as usize).copy_from_slice(s.expert_out.row(row));
            }
            self.counters.ram_bytes.add(self.expert_bytes);
            Ok(())
        })?;
        s.sum.reshape(t_len, width);
        moe::combine(dev, &s.parts, &s.routing, &mut s.sum);
        seen.tensor(Point::LatentSum, layer, &s.sum);
        let sum = match &w.norm {
            Some(n) => {
                norm::rmsnorm(dev, &s.sum, n, c.rms_norm_eps, &mut s.sum_normed);
                &s.sum_normed
            }
            None => &s.sum,
        };
        match &w.latent {
            Some((_, up)) => matmul(dev, sum, up, &mut s.out),
            None => s.out.clone_from(sum),
        }
        if let Some(shared) = &w.shared {
            self.mlp(shared, &s.x, &mut s.mlp_gate, &mut s.mlp_up, &mut s.mixed);
            add(&mut s.out, &s.mixed);
        }
        Ok(())
    }

    fn layer(&self, i: usize) -> Result<std::sync::Arc<Layer>> {
        self.bound.layer(self, i)
    }
}

impl Scratch {
    /// The mix over the stored blocks and the running sum into `mixed`; without blocks, the running sum itself.
    fn mix(&mut self, dev: &Cpu, w: &Tensor, eps: f32) {
        let mut sources: Vec<&Tensor> = Vec::with_capacity(self.used + 1);
        sources.extend(&self.blocks[..self.used]);
        sources.push(&self.prefix);
        residual::mix(dev, &sources, w, eps, &mut self.mixed, &mut self.probs);
    }

    /// Stores the running sum as a finished block.
    fn push_block(&mut self) {
        if self.used == self.blocks.len() {
            self.blocks.push(Tensor::default());
        }
        self.blocks[self.used].clone_from(&self.prefix);
        self.used += 1;
    }
}
