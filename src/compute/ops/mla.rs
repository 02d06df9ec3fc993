//! Gated multi-head latent attention without positions (NoPE), in the absorbed form: queries are carried into the
//! latent space, so that only the latent cache is read.

use super::Disjoint;
use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor, Weight};
use rayon::prelude::*;
use std::cell::RefCell;

/// Widths of the attention.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Heads N.
    pub heads: usize,
    /// Query and key width per head that goes through the latent.
    pub nope: usize,
    /// Query and key width per head that is shared by all heads (never rotated).
    pub rope: usize,
    /// Value width per head.
    pub value: usize,
    /// Latent rank R.
    pub rank: usize,
}

/// Writes the cache rows of a pass: `latent[pos+t] = RMSNorm(c[t,..R]; w, eps)`, `rope[pos+t] = c[t,R..]`.
///
/// c `[T,R+rope]`, w `[1,R]`, latent `[capacity,R]`, rope `[capacity,rope]`; the rows must exist.
pub fn append(
    dev: &Cpu,
    c: &Tensor,
    w: &Tensor,
    eps: f32,
    pos: usize,
    latent: &mut Tensor,
    rope: &mut Tensor,
) {
    let rank = w.cols();
    for t in 0..c.rows() {
        let (lat, shared) = c.row(t).split_at(rank);
        vector::rmsnorm(dev.isa, lat, w.host(), eps, latent.row_mut(pos + t));
        rope.row_mut(pos + t).copy_from_slice(shared);
    }
}

/// Scratch of one head's attention, kept per thread.
#[derive(Default)]
struct Scratch {
    k: Vec<f32>,
    v: Vec<f32>,
    query: Vec<f32>,
    scores: Vec<f32>,
    context: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Causal attention of T new tokens at `pos` over the cache rows `0..pos+T`.
///
/// q `[T, N·(nope+rope)]` (per head nope then rope), kv_b `[N·(nope+value), R]` (per head the key rows, then the
/// value rows), latent `[≥pos+T, R]`, shared `[≥pos+T, rope]`, o `[T, N·value]`. Per head and token, with
/// `qk = Σ_d q_nope[d]·Wk[d,:]`: `p = softmax_s((qk·latent_s + q_rope·shared_s)·(nope+rope)^-½)`,
/// `o = Wv·Σ_s p_s·latent_s`. Sums run over s in order.
pub fn attend(
    dev: &Cpu,
    shape: Shape,
    q: &Tensor,
    kv_b: &Weight,
    (latent, shared): (&Tensor, &Tensor),
    pos: usize,
    o: &mut Tensor,
) {
    let Shape { heads, nope, rope, value, rank } = shape;
    let (t_len, isa) = (q.rows(), dev.isa);
    o.reshape(t_len, heads * value);
    let scale = ((nope + rope) as f32).sqrt().recip();
    let matrix = kv_b.matrix();
    let out = Disjoint::new(o.host_mut());
    let head = |h: usize| {
        SCRATCH.with_borrow_mut(|s| {
            let first = h * (nope + value);
            s.k.resize(nope * rank, 0.0);
            s.v.resize(value * rank, 0.0);
            s.query.resize(rank, 0.0);
            s.context.resize(rank, 0.0);
            for (d, row) in s.k.chunks_exact_mut(rank).enumerate() {
                matrix.widen_row(first + d, row);
            }
            for (d, row) in s.v.chunks_exact_mut(rank).enumerate() {
                matrix.widen_row(first + nope + d, row);
            }
            for t in 0..t_len {
                let q = &q.row(t)[h * (nope + rope)..(h + 1) * (nope + rope)];
                let (q_nope, q_rope) = q.split_at(nope);
                s.query.fill(0.0);
                for (a, row) in q_nope.iter().zip(s.k.chunks_exact(rank)) {
                    vector::axpy(isa, *a, row, &mut s.query);
                }
                let visible = pos + t + 1;
                s.scores.resize(visible, 0.0);
                let cached = latent.host().chunks_exact(rank).zip(shared.host().chunks_exact(rope));
                for (score, (lat, shared)) in s.scores.iter_mut().zip(cached) {
                    *score = (vector::dot(isa, &s.query, lat) + vector::dot(isa, q_rope, shared)) * scale;
                }
                vector::softmax(isa, &mut s.scores);
                s.context.fill(0.0);
                for (p, lat) in s.scores.iter().zip(latent.host().chunks_exact(rank)) {
                    vector::axpy(isa, *p, lat, &mut s.context);
                }
                // SAFETY: each head writes its own columns.
                let o = unsafe { out.range((t * heads + h) * value, value) };
                for (o, row) in o.iter_mut().zip(s.v.chunks_exact(rank)) {
                    *o = vector::dot(isa, row, &s.context);
                }
            }
        });
    };
    dev.run(|| (0..heads).into_par_iter().for_each(head));
}
