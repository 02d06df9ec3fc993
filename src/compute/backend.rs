//! What a device must be able to do: every operation of the network, once per device.
//!
//! The forward pass is written against this trait, so no operation exists on one device alone. Shapes are those of
//! [`super::ops`], whose functions are the CPU's side.

use super::cpu::vector;
use super::device::{Cpu, Tensor, Weight};
use super::ops::mla::{MlaCache, Shape};
use super::ops::moe::{Router, Routing};
use super::ops::{kda, matmul, mla, moe, norm, residual};
use crate::error::{Error, Kind, Result};
use std::fmt;

/// A part of the network, as profilers and traces name it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Section {
    /// Zero-based layer, where it belongs to one.
    pub layer: Option<usize>,
    /// What of it.
    pub part: &'static str,
}

impl Section {
    /// Part of layer `i`.
    pub fn of_layer(i: usize, part: &'static str) -> Section {
        Section { layer: Some(i), part }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(i) => write!(f, "layer {i} / {}", self.part),
            None => f.write_str(self.part),
        }
    }
}

/// What one pass of the KDA recurrence reads.
pub struct Recurrence<'a, T> {
    /// Queries, normalised and scaled `[T,P]`.
    pub q: &'a T,
    /// Keys, normalised `[T,P]`.
    pub k: &'a T,
    /// Values `[T,P]`.
    pub v: &'a T,
    /// Decay factors per key channel `[T,P]`.
    pub decay: &'a T,
    /// Write strength per head `[T,N]`.
    pub beta: &'a T,
}

/// A device that computes. Outputs take the shape of the result; an output is never an input unless said so.
pub trait Backend {
    /// f32 activations or state.
    type Tensor: Default + Send;
    /// A weight in its stored form.
    type Weight: Send + Sync;
    /// The blocks and the running sum that the residual mix reads.
    type Sources: Default + Send;
    /// Latents and shared keys of the positions seen by one MLA layer.
    type Cache: Send;

    /// Rows of a tensor.
    fn rows(t: &Self::Tensor) -> usize;
    /// A tensor with the values of a host tensor.
    fn upload(&mut self, from: &Tensor, to: &mut Self::Tensor) -> Result<()>;
    /// The values on the host. Waits for whatever computes them.
    fn download(&mut self, from: &Self::Tensor) -> Result<Tensor>;
    /// A weight from host memory. Where it must be split, it is split at multiples of `row_multiple` rows.
    fn weight(&mut self, from: &Weight, row_multiple: usize, label: &str) -> Result<Self::Weight>;
    /// Taps of a convolution, given outermost `[k,P]`, in the layout that [`Backend::short_conv`] reads here.
    fn taps(&mut self, w: &Tensor) -> Result<Self::Tensor>;
    /// An empty cache with room for `capacity` positions.
    fn cache(&mut self, shape: Shape, capacity: usize) -> Result<Self::Cache>;
    /// Gives `s` `count` sources `[rows, cols]` each; the contents are unspecified.
    fn shape_sources(&mut self, s: &mut Self::Sources, count: usize, rows: usize, cols: usize) -> Result<()>;
    /// Source `i`.
    fn source(s: &Self::Sources, i: usize) -> &Self::Tensor;
    /// Source `i`, to be written.
    fn source_mut(s: &mut Self::Sources, i: usize) -> &mut Self::Tensor;
    /// Gives `t` a shape; the contents are unspecified.
    fn shape(&mut self, t: &mut Self::Tensor, rows: usize, cols: usize) -> Result<()>;
    /// Names what follows for profilers and traces, until the next call.
    fn section(&mut self, section: Section) -> Result<()>;
    /// A layer is complete: what was recorded may start.
    fn end_layer(&mut self) -> Result<()>;

    /// `to = from`.
    fn copy(&mut self, from: &Self::Tensor, to: &mut Self::Tensor) -> Result<()>;
    /// `to = from[rows]`, row by row.
    fn gather(&mut self, from: &Self::Tensor, rows: &[u32], to: &mut Self::Tensor) -> Result<()>;
    /// `to[rows] = from`, row by row; `to` keeps its shape and its other rows.
    fn scatter(&mut self, from: &Self::Tensor, rows: &[u32], to: &mut Self::Tensor) -> Result<()>;
    /// `a += b`.
    fn add(&mut self, a: &mut Self::Tensor, b: &Self::Tensor) -> Result<()>;
    /// Fails, now or at the next read-back, if a value is not finite.
    fn check_finite(&mut self, x: &Self::Tensor, layer: usize, position: usize) -> Result<()>;

    /// See [`norm::rmsnorm`].
    fn rmsnorm(&mut self, x: &Self::Tensor, w: &Self::Tensor, eps: f32, y: &mut Self::Tensor) -> Result<()>;
    /// See [`norm::l2norm`].
    fn l2norm(&mut self, x: &mut Self::Tensor, dim: usize, eps: f32, scale: f32) -> Result<()>;
    /// See [`matmul::matmul`].
    fn matmul(&mut self, x: &Self::Tensor, w: &Self::Weight, y: &mut Self::Tensor) -> Result<()>;
    /// See [`matmul::situ`].
    fn situ(&mut self, gate: &mut Self::Tensor, up: &Self::Tensor, beta: f32, linear_beta: f32)
    -> Result<()>;
    /// See [`kda::short_conv`].
    fn short_conv(
        &mut self,
        u: &Self::Tensor,
        w: &Self::Tensor,
        history: &Self::Tensor,
        y: &mut Self::Tensor,
        next: &mut Self::Tensor,
    ) -> Result<()>;
    /// See [`kda::decay`] and [`kda::sigmoid`]: both gates of KDA, in place.
    fn kda_gates(
        &mut self,
        z: &mut Self::Tensor,
        beta: &mut Self::Tensor,
        a_log: &Self::Tensor,
        dt_bias: &Self::Tensor,
        lower_bound: f32,
    ) -> Result<()>;
    /// See [`kda::recurrence`].
    fn recurrence(
        &mut self,
        r: &Recurrence<'_, Self::Tensor>,
        state: &Self::Tensor,
        next: &mut Self::Tensor,
        o: &mut Self::Tensor,
    ) -> Result<()>;
    /// See [`kda::norm_gate`].
    fn norm_gate(
        &mut self,
        o: &mut Self::Tensor,
        w: &Self::Tensor,
        eps: f32,
        gate: &Self::Tensor,
    ) -> Result<()>;
    /// See [`mla::append`].
    fn append(
        &mut self,
        c: &Self::Tensor,
        w: &Self::Tensor,
        eps: f32,
        pos: usize,
        cache: &mut Self::Cache,
    ) -> Result<()>;
    /// See [`mla::attend`], and [`matmul::gate_sigmoid`] where there is a gate.
    fn attend(
        &mut self,
        q: &Self::Tensor,
        kv_b: &Self::Weight,
        cache: &Self::Cache,
        pos: usize,
        gate: Option<&Self::Tensor>,
        o: &mut Self::Tensor,
    ) -> Result<()>;
    /// See [`moe::route`]. The choice comes to the host: it decides what is read.
    fn route(
        &mut self,
        logits: &mut Self::Tensor,
        bias: &Self::Tensor,
        r: Router,
        out: &mut Routing,
    ) -> Result<()>;
    /// See [`moe::combine`].
    fn combine(&mut self, parts: &Self::Tensor, routing: &Routing, sum: &mut Self::Tensor) -> Result<()>;
    /// See [`residual::mix`]; of the first `count` sources.
    fn mix(
        &mut self,
        sources: &Self::Sources,
        count: usize,
        w: &Self::Tensor,
        eps: f32,
        out: &mut Self::Tensor,
        probs: &mut Self::Tensor,
    ) -> Result<()>;
}

impl Backend for &Cpu {
    type Tensor = Tensor;
    type Weight = Weight;
    type Sources = Vec<Tensor>;
    type Cache = MlaCache;

    fn rows(t: &Tensor) -> usize {
        t.rows()
    }
    fn upload(&mut self, from: &Tensor, to: &mut Tensor) -> Result<()> {
        to.clone_from(from);
        Ok(())
    }
    fn download(&mut self, from: &Tensor) -> Result<Tensor> {
        Ok(from.clone())
    }
    fn weight(&mut self, from: &Weight, _row_multiple: usize, _label: &str) -> Result<Weight> {
        Ok(from.clone())
    }
    fn taps(&mut self, w: &Tensor) -> Result<Tensor> {
        Ok(w.clone())
    }
    fn cache(&mut self, shape: Shape, capacity: usize) -> Result<MlaCache> {
        Ok(MlaCache::new(shape, capacity))
    }
    fn shape_sources(&mut self, s: &mut Vec<Tensor>, count: usize, rows: usize, cols: usize) -> Result<()> {
        s.resize_with(s.len().max(count), Tensor::default);
        s.iter_mut().take(count).for_each(|t| t.reshape(rows, cols));
        Ok(())
    }
    fn source(s: &Vec<Tensor>, i: usize) -> &Tensor {
        &s[i]
    }
    fn source_mut(s: &mut Vec<Tensor>, i: usize) -> &mut Tensor {
        &mut s[i]
    }
    fn shape(&mut self, t: &mut Tensor, rows: usize, cols: usize) -> Result<()> {
        t.reshape(rows, cols);
        Ok(())
    }
    fn section(&mut self, section: Section) -> Result<()> {
        self.enter(section);
        Ok(())
    }
    fn end_layer(&mut self) -> Result<()> {
        Ok(())
    }
    fn copy(&mut self, from: &Tensor, to: &mut Tensor) -> Result<()> {
        self.op("copy", || {
            to.clone_from(from);
            [to.rows(), to.cols()]
        });
        Ok(())
    }
    fn gather(&mut self, from: &Tensor, rows: &[u32], to: &mut Tensor) -> Result<()> {
        self.op("gather", || {
            to.reshape(rows.len(), from.cols());
            for (i, r) in rows.iter().enumerate() {
                to.row_mut(i).copy_from_slice(from.row(*r as usize));
            }
            [to.rows(), to.cols()]
        });
        Ok(())
    }
    fn scatter(&mut self, from: &Tensor, rows: &[u32], to: &mut Tensor) -> Result<()> {
        self.op("scatter", || {
            for (i, r) in rows.iter().enumerate() {
                to.row_mut(*r as usize).copy_from_slice(from.row(i));
            }
            [rows.len(), from.cols()]
        });
        Ok(())
    }
    fn add(&mut self, a: &mut Tensor, b: &Tensor) -> Result<()> {
        self.op("add", || {
            matmul::add(a, b);
            [a.rows(), a.cols()]
        });
        Ok(())
    }
    fn check_finite(&mut self, x: &Tensor, layer: usize, position: usize) -> Result<()> {
        match vector::all_finite(x.host()) {
            true => Ok(()),
            false => Err(Error::new(Kind::NonFinite, "a hidden value is not finite")
                .layer(layer)
                .position(position)),
        }
    }
    fn rmsnorm(&mut self, x: &Tensor, w: &Tensor, eps: f32, y: &mut Tensor) -> Result<()> {
        self.op("rmsnorm", || {
            norm::rmsnorm(self, x, w, eps, y);
            [y.rows(), y.cols()]
        });
        Ok(())
    }
    fn l2norm(&mut self, x: &mut Tensor, dim: usize, eps: f32, scale: f32) -> Result<()> {
        self.op("l2norm", || {
            norm::l2norm(self, x, dim, eps, scale);
            [x.rows(), x.cols()]
        });
        Ok(())
    }
    fn matmul(&mut self, x: &Tensor, w: &Weight, y: &mut Tensor) -> Result<()> {
        let mut result = Ok(());
        self.op("matmul", || {
            result = matmul::matmul(self, x, w, y);
            [y.rows(), y.cols()]
        });
        result
    }
    fn situ(&mut self, gate: &mut Tensor, up: &Tensor, beta: f32, linear_beta: f32) -> Result<()> {
        self.op("situ", || {
            matmul::situ(self, gate, up, beta, linear_beta);
            [gate.rows(), gate.cols()]
        });
        Ok(())
    }
    fn short_conv(
        &mut self,
        u: &Tensor,
        w: &Tensor,
        history: &Tensor,
        y: &mut Tensor,
        next: &mut Tensor,
    ) -> Result<()> {
        self.op("short_conv", || {
            kda::short_conv(self, u, w, history, y, next);
            [y.rows(), y.cols()]
        });
        Ok(())
    }
    fn kda_gates(
        &mut self,
        z: &mut Tensor,
        beta: &mut Tensor,
        a_log: &Tensor,
        dt_bias: &Tensor,
        lower_bound: f32,
    ) -> Result<()> {
        self.op("kda_gates", || {
            kda::decay(self, z, a_log, dt_bias, lower_bound);
            kda::sigmoid(self, beta);
            [z.rows(), z.cols()]
        });
        Ok(())
    }
    fn recurrence(
        &mut self,
        r: &Recurrence<'_, Tensor>,
        state: &Tensor,
        next: &mut Tensor,
        o: &mut Tensor,
    ) -> Result<()> {
        self.op("recurrence", || {
            kda::recurrence(self, r, state, next, o);
            [o.rows(), o.cols()]
        });
        Ok(())
    }
    fn norm_gate(&mut self, o: &mut Tensor, w: &Tensor, eps: f32, gate: &Tensor) -> Result<()> {
        self.op("norm_gate", || {
            kda::norm_gate(self, o, w, eps, gate);
            [o.rows(), o.cols()]
        });
        Ok(())
    }
    fn append(&mut self, c: &Tensor, w: &Tensor, eps: f32, pos: usize, cache: &mut MlaCache) -> Result<()> {
        self.op("append", || {
            mla::append(c, w, eps, pos, cache);
            [c.rows(), c.cols()]
        });
        Ok(())
    }
    fn attend(
        &mut self,
        q: &Tensor,
        kv_b: &Weight,
        cache: &MlaCache,
        pos: usize,
        gate: Option<&Tensor>,
        o: &mut Tensor,
    ) -> Result<()> {
        let mut result = Ok(());
        self.op("attend", || {
            result = mla::attend(self, q, kv_b, cache, pos, o);
            if let (Ok(()), Some(gate)) = (&result, gate) {
                matmul::gate_sigmoid(self, o, gate);
            }
            [o.rows(), o.cols()]
        });
        result
    }
    fn route(&mut self, logits: &mut Tensor, bias: &Tensor, r: Router, out: &mut Routing) -> Result<()> {
        let mut result = Ok(());
        self.op("route", || {
            result = moe::route(self, logits, bias, r, out);
            [logits.rows(), r.chosen]
        });
        result
    }
    fn combine(&mut self, parts: &Tensor, routing: &Routing, sum: &mut Tensor) -> Result<()> {
        self.op("combine", || {
            moe::combine(self, parts, routing, sum);
            [sum.rows(), sum.cols()]
        });
        Ok(())
    }
    fn mix(
        &mut self,
        sources: &Vec<Tensor>,
        count: usize,
        w: &Tensor,
        eps: f32,
        out: &mut Tensor,
        probs: &mut Tensor,
    ) -> Result<()> {
        self.op("mix", || {
            residual::mix(self, &sources[..count], w, eps, out, probs);
            [out.rows(), out.cols()]
        });
        Ok(())
    }
}
