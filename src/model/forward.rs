//! One pass: T tokens through every layer.

use super::layer::{Buffers, Experts, Pass};
use super::state::State;
use super::weights::{Expert, Layer};
use super::{Model, Observer, Point};
use crate::checkpoint::config::Config;
use crate::compute::backend::Backend;
use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor, Weight};
use crate::error::{Error, Kind, Result};
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
    /// `[T,V]` or `[1,V]`
    logits: Tensor,
}

impl Scratch {
    /// Bytes that a pass of `tokens` tokens needs, roughly: the figure of the plan.
    pub fn bytes(c: &Config, tokens: usize, all_logits: bool) -> u64 {
        let p = c.kda.heads * c.kda.head_dim;
        let boundaries = c.attn_res_block_size.map_or(0, |b| c.layers.len().div_ceil(b));
        let per_token = c.hidden_size * (boundaries + 4)
            + 8 * p
            + 2 * c.intermediate_size
            + c.moe.experts
            + c.expert_width() * (c.moe.experts_per_token + 5);
        let logits = if all_logits { tokens } else { 1 } * c.vocab_size;
        4 * (tokens * per_token + logits) as u64
    }
}

/// Experts from the store in host memory.
struct HostExperts<'a>(&'a Model);

impl<'c> Experts<&'c Cpu> for HostExperts<'_> {
    fn for_each(
        &mut self,
        device: &mut &'c Cpu,
        layer: usize,
        experts: &[u32],
        pass: u64,
        f: &mut dyn FnMut(&mut &'c Cpu, u32, &Expert<Weight>) -> Result<()>,
    ) -> Result<()> {
        let model = self.0;
        model.experts.for_each(layer, experts, pass, |e, slab| {
            model.check_cancelled()?;
            f(device, e, &Expert::bind(model.config(), slab)?)?;
            model.counters.ram_bytes.add(model.expert_bytes);
            Ok(())
        })
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
        if ids.is_empty() {
            return Err(Error::usage("a pass needs at least one token"));
        }
        let number = self.next_pass();
        self.cpu.run(|| self.layers(state, s, ids, want, number, seen))?;
        state.commit(ids.len());
        Ok(&s.logits)
    }

    fn layers(
        &self,
        state: &mut State,
        s: &mut Scratch,
        ids: &[u32],
        want: Logits,
        number: u64,
        seen: &mut dyn Observer,
    ) -> Result<()> {
        let n = self.config().layers.len();
        let pos = state.len();
        s.cpu.blocks = 0;
        let sources = 1 + (0..n).filter(|i| self.config().is_block_boundary(*i)).count();
        (&mut &self.cpu).shape_sources(&mut s.cpu.sources, sources, ids.len(), self.config().hidden_size)?;
        self.embed(ids, &mut s.cpu.sources[0])?;
        let mut experts = HostExperts(self);
        let mut pass =
            Pass { device: &self.cpu, config: self.config(), number, pos, experts: &mut experts, seen };
        for i in 0..n {
            pass.seen.layer(i, n);
            self.check_cancelled()?;
            let layer = self.layer(i)?;
            pass.layer(i, &layer, &mut state.layers[i], &mut s.cpu).map_err(|e| e.layer(i))?;
            self.counters.ram_bytes.add(self.trunk.unit(i).bytes());
        }
        pass.seen.layer(n, n);
        self.check_cancelled()?;
        let head = self.output()?;
        pass.head(&head, want == Logits::All, &mut s.cpu, &mut s.logits)?;
        self.counters.ram_bytes.add(head.lm_head.matrix().bytes() as u64);
        let first = pos + ids.len() - s.logits.rows();
        for t in 0..s.logits.rows() {
            if !vector::all_finite(s.logits.row(t)) {
                return Err(Error::new(Kind::NonFinite, "a logit is not finite").position(first + t));
            }
        }
        Ok(())
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
        let layer = self.layer(i)?;
        let mut experts = HostExperts(self);
        let mut pass = Pass {
            device: &self.cpu,
            config: self.config(),
            number: self.next_pass(),
            pos: state.len(),
            experts: &mut experts,
            seen: &mut super::Unobserved,
        };
        let out = pass.block(i, point, x, &layer, &mut state.layers[i], &mut s.cpu)?;
        state.commit(x.rows());
        Ok(out)
    }

    /// `h = embed[ids]`: one row of the table a token, read from its file.
    fn embed(&self, ids: &[u32], h: &mut Tensor) -> Result<()> {
        h.reshape(ids.len(), self.config().hidden_size);
        for (t, id) in ids.iter().enumerate() {
            self.embedding.row(*id, h.row_mut(t))?;
            self.counters.nvme_bytes.add(self.embedding.row_bytes());
        }
        Ok(())
    }

    fn layer(&self, i: usize) -> Result<Arc<Layer>> {
        self.bound.layer(self, i)
    }
}
