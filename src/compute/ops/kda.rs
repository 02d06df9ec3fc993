//! Kimi Delta Attention: short convolution, decay, and the recurrence over the state.

use super::Disjoint;
use crate::compute::backend::Recurrence;
use crate::compute::cpu::{math, vector};
use crate::compute::device::{Cpu, Tensor};
use rayon::prelude::*;

/// Channels that one task of the convolution takes.
const CHANNELS: usize = 2048;

/// Causal depthwise convolution and SiLU:
/// `y_t[c] = SiLU(Σ_j w[j,c]·u_{t-(k-1)+j}[c])`, so the last tap meets the current token.
///
/// u `[T,P]`, w `[k,P]` (taps outermost), history `[k-1,P]` oldest first (the inputs before the pass), y `[T,P]`;
/// `next` receives the history after the pass.
pub fn short_conv(dev: &Cpu, u: &Tensor, w: &Tensor, history: &Tensor, y: &mut Tensor, next: &mut Tensor) {
    let (t_len, p, taps) = (u.rows(), u.cols(), w.rows());
    let past = taps - 1;
    y.reshape(t_len, p);
    // Row `t` of the sequence that begins with the history.
    let input = |t: usize| if t < past { history.row(t) } else { u.row(t - past) };
    let out = Disjoint::new(y.host_mut());
    dev.run(|| {
        (0..p.div_ceil(CHANNELS)).into_par_iter().for_each(|block| {
            let at = block * CHANNELS;
            let n = CHANNELS.min(p - at);
            for t in 0..t_len {
                // SAFETY: each block writes its own channels.
                let row = unsafe { out.range(t * p + at, n) };
                row.fill(0.0);
                for j in 0..taps {
                    for ((r, w), x) in row.iter_mut().zip(&w.row(j)[at..]).zip(&input(t + j)[at..]) {
                        *r += w * x;
                    }
                }
                math::silu(dev.isa, row);
            }
        });
    });
    next.reshape(past, p);
    for j in 0..past {
        next.row_mut(j).copy_from_slice(input(t_len + j));
    }
}

/// The decay factor of every key channel, in place: `z = exp(lb·σ(exp(A_log[h])·(z + dt_bias)))`.
///
/// z `[T,P]`, a_log `[1,N]`, dt_bias `[1,P]`; `lower_bound` is the gate bound (it multiplies the sigmoid).
pub fn decay(dev: &Cpu, z: &mut Tensor, a_log: &Tensor, dt_bias: &Tensor, lower_bound: f32) {
    let p = z.cols();
    let dim = p / a_log.cols();
    dev.run(|| {
        z.host_mut().par_chunks_mut(p).for_each(|row| {
            let heads = row.chunks_exact_mut(dim).zip(dt_bias.host().chunks_exact(dim)).zip(a_log.host());
            for ((z, bias), a_log) in heads {
                let a = a_log.exp();
                for (z, b) in z.iter_mut().zip(bias) {
                    *z = a * (*z + b);
                }
            }
            math::sigmoid(dev.isa, row);
            for z in row.iter_mut() {
                *z *= lower_bound;
            }
            math::exp(dev.isa, row);
        });
    });
}

/// `x = σ(x)` in place.
pub fn sigmoid(dev: &Cpu, x: &mut Tensor) {
    math::sigmoid(dev.isa, x.host_mut());
}

/// The recurrence, head by head and token by token (S is `[Dk,Dv]` of a head):
/// `S *= decay[:,None]; u = Sᵀk; S += k ⊗ (beta·(v-u)); o = Sᵀq`.
///
/// `state` and `next` `[N·D, D]`: the state before and after the pass (the one before is left as it is, so that an
/// unfinished step can be dropped). o `[T,P]`.
pub fn recurrence(dev: &Cpu, r: &Recurrence<'_, Tensor>, state: &Tensor, next: &mut Tensor, o: &mut Tensor) {
    let (t_len, p, heads) = (r.q.rows(), r.q.cols(), r.beta.cols());
    let dim = p / heads;
    o.reshape(t_len, p);
    let size = dim * dim;
    let out = Disjoint::new(o.host_mut());
    let head = |(h, (before, s)): (usize, (&[f32], &mut [f32]))| {
        s.copy_from_slice(before);
        for t in 0..t_len {
            let at = h * dim..(h + 1) * dim;
            // SAFETY: each head writes its own columns.
            let o = unsafe { out.range(t * p + h * dim, dim) };
            vector::kda_head_step(
                dev.isa,
                s,
                &r.q.row(t)[at.clone()],
                &r.k.row(t)[at.clone()],
                &r.v.row(t)[at.clone()],
                &r.decay.row(t)[at],
                r.beta.row(t)[h],
                o,
            );
        }
    };
    dev.run(|| {
        state.host().par_chunks(size).zip(next.host_mut().par_chunks_mut(size)).enumerate().for_each(head);
    });
}

/// `o = RMSNorm(o; w, eps) per head, then o *= σ(gate)`: o and gate `[T,P]`, w `[1,D]`.
pub fn norm_gate(dev: &Cpu, o: &mut Tensor, w: &Tensor, eps: f32, gate: &Tensor) {
    let (p, dim) = (o.cols(), w.cols());
    dev.run(|| {
        o.host_mut().par_chunks_mut(p).zip(gate.host().par_chunks(p)).for_each(|(o, gate)| {
            for head in o.chunks_exact_mut(dim) {
                vector::rms_norm_in_place(head, w.host(), eps);
            }
            math::sigmoid_gate(dev.isa, o, gate);
        });
    });
}
