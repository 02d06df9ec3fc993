//! Gated multi-head latent attention without positions (NoPE), in the absorbed form: queries are carried into the
//! latent space, so that only the latent cache is read.

use super::Disjoint;
use crate::compute::cpu::matmul::matmul_serial;
use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor, Weight};
use crate::error::Result;
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

/// The cache of one layer. Rows beyond the sequence's length are unspecified.
#[derive(Debug, Clone)]
pub struct MlaCache {
    /// Widths.
    pub shape: Shape,
    /// Normalised latents `[capacity, R]`.
    pub latent: Tensor,
    /// Shared key part `[capacity, rope]`, raw.
    pub rope: Tensor,
}

impl MlaCache {
    /// An empty cache with room for `capacity` positions.
    pub fn new(shape: Shape, capacity: usize) -> MlaCache {
        MlaCache {
            shape,
            latent: Tensor::zeros(capacity, shape.rank),
            rope: Tensor::zeros(capacity, shape.rope),
        }
    }
}

/// Writes the cache rows of a pass: `latent[pos+t] = RMSNorm(c[t,..R]; w, eps)`, `rope[pos+t] = c[t,R..]`.
///
/// c `[T,R+rope]`, w `[1,R]`; the rows must exist.
pub fn append(c: &Tensor, w: &Tensor, eps: f32, pos: usize, cache: &mut MlaCache) {
    let rank = w.cols();
    for t in 0..c.rows() {
        let (lat, shared) = c.row(t).split_at(rank);
        vector::rms_norm(lat, w.host(), eps, cache.latent.row_mut(pos + t));
        cache.rope.row_mut(pos + t).copy_from_slice(shared);
    }
}

/// Heads that one task takes: the cache is read once for all of them.
const GROUP: usize = 4;

/// Scratch of one task, kept per thread.
#[derive(Default)]
struct Scratch {
    /// One row of kv_b `[R]`
    row: Vec<f32>,
    /// Queries in the latent space `[T, heads, R]`
    query: Vec<f32>,
    /// Shared part of one token's queries `[heads, rope]`
    shared: Vec<f32>,
    /// Scores of one token `[heads, S]`
    scores: Vec<f32>,
    /// Weighted latents of one token `[heads, R]`, and of all `[heads, T, R]`
    context: Vec<f32>,
    contexts: Vec<f32>,
    /// Output of one head `[T, value]`
    out: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Causal attention of T new tokens at `pos` over the cache rows `0..pos+T`.
///
/// q `[T, N·(nope+rope)]` (per head nope then rope), kv_b `[N·(nope+value), R]` (per head the key rows, then the
/// value rows), o `[T, N·value]`. Per head and token, with
/// `qk = Σ_d q_nope[d]·Wk[d,:]`: `p = softmax_s((qk·latent_s + q_rope·shared_s)·(nope+rope)^-½)`,
/// `o = Wv·Σ_s p_s·latent_s`. The order of every sum depends on the number of visible positions alone. Fails where kv_b
/// is streamed and cannot be read.
pub fn attend(
    dev: &Cpu,
    q: &Tensor,
    kv_b: &Weight,
    cache: &MlaCache,
    pos: usize,
    o: &mut Tensor,
) -> Result<()> {
    let MlaCache { shape, latent, rope: shared } = cache;
    let Shape { heads, nope, rope, value, rank } = *shape;
    let (t_len, isa, width) = (q.rows(), dev.isa, nope + rope);
    o.reshape(t_len, heads * value);
    let scale = (width as f32).sqrt().recip();
    let kv_b = kv_b.whole()?;
    let matrix = kv_b.matrix();
    let out = Disjoint::new(o.host_mut());
    let group = |first: usize| {
        let n = GROUP.min(heads - first);
        SCRATCH.with_borrow_mut(|s| {
            s.row.resize(rank, 0.0);
            s.query.clear();
            s.query.resize(t_len * n * rank, 0.0);
            s.shared.resize(n * rope, 0.0);
            s.context.resize(n * rank, 0.0);
            s.contexts.resize(n * t_len * rank, 0.0);
            s.out.resize(t_len * value, 0.0);
            for h in 0..n {
                for d in 0..nope {
                    matrix.widen_row((first + h) * (nope + value) + d, &mut s.row);
                    for t in 0..t_len {
                        let a = q.row(t)[(first + h) * width + d];
                        vector::axpy(isa, a, &s.row, &mut s.query[(t * n + h) * rank..][..rank]);
                    }
                }
            }
            for t in 0..t_len {
                for h in 0..n {
                    let from = (first + h) * width + nope;
                    s.shared[h * rope..][..rope].copy_from_slice(&q.row(t)[from..from + rope]);
                }
                let visible = pos + t + 1;
                s.scores.resize(n * visible, 0.0);
                vector::mla_scores(
                    isa,
                    n,
                    &s.query[t * n * rank..][..n * rank],
                    &s.shared,
                    &latent.host()[..visible * rank],
                    &shared.host()[..visible * rope],
                    scale,
                    &mut s.scores,
                );
                for row in s.scores.chunks_exact_mut(visible) {
                    vector::softmax(isa, row);
                }
                vector::mla_weighted_sum(isa, n, &s.scores, &latent.host()[..visible * rank], &mut s.context);
                for h in 0..n {
                    s.contexts[(h * t_len + t) * rank..][..rank]
                        .copy_from_slice(&s.context[h * rank..][..rank]);
                }
            }
            for h in 0..n {
                let values = matrix.row_range((first + h) * (nope + value) + nope, value);
                matmul_serial(isa, &s.contexts[h * t_len * rank..][..t_len * rank], &values, &mut s.out);
                for (t, row) in s.out.chunks_exact(value).enumerate() {
                    // SAFETY: each task writes the columns of its own heads.
                    unsafe { out.range((t * heads + first + h) * value, value) }.copy_from_slice(row);
                }
            }
        });
    };
    dev.run(|| (0..heads.div_ceil(GROUP)).into_par_iter().for_each(|g| group(g * GROUP)));
    Ok(())
}
