//! The router and the combination of the chosen experts.

use crate::compute::cpu::{math, vector};
use crate::compute::device::{Cpu, Tensor};
use crate::error::{Error, Kind, Result};

/// The experts chosen for T tokens, K each, strongest biased score first.
#[derive(Debug, Clone, Default)]
pub struct Routing {
    /// Expert ids `[T,K]`.
    pub experts: Vec<u32>,
    /// Their weights `[T,K]`.
    pub weights: Vec<f32>,
    /// K
    pub chosen: usize,
}

/// How the router turns logits into weights.
#[derive(Debug, Clone, Copy)]
pub struct Router {
    /// K.
    pub chosen: usize,
    /// Divide the chosen scores by their sum plus 1e-20.
    pub renormalize: bool,
    /// Multiplies the weights last.
    pub scale: f32,
}

/// `s = σ(logits); idx = topK(s + bias); w = s[idx] / (Σ s[idx] + 1e-20) · scale`.
///
/// logits `[T,E]` (overwritten by the scores), bias `[1,E]` (selection only). Equal biased scores go to the lower index.
/// Fails on a logit that is not finite.
pub fn route(dev: &Cpu, logits: &mut Tensor, bias: &Tensor, r: Router, out: &mut Routing) -> Result<()> {
    out.experts.clear();
    out.weights.clear();
    out.chosen = r.chosen;
    let experts = logits.cols();
    let mut order: Vec<u32> = Vec::with_capacity(experts);
    let mut biased = vec![0.0f32; experts];
    for t in 0..logits.rows() {
        let scores = logits.row_mut(t);
        if !vector::all_finite(scores) {
            return Err(Error::new(Kind::NonFinite, "a router logit is not finite"));
        }
        math::sigmoid(dev.isa, scores);
        for ((b, s), bias) in biased.iter_mut().zip(scores.iter()).zip(bias.host()) {
            *b = s + bias;
        }
        order.clear();
        order.extend(0..experts as u32);
        let better = |a: &u32, b: &u32| biased[*b as usize].total_cmp(&biased[*a as usize]).then(a.cmp(b));
        if r.chosen < experts {
            order.select_nth_unstable_by(r.chosen - 1, better);
            order.truncate(r.chosen);
        }
        order.sort_unstable_by(better);
        let sum: f32 = order.iter().map(|e| scores[*e as usize]).sum();
        for e in &order {
            let mut w = scores[*e as usize];
            if r.renormalize {
                w /= sum + 1e-20;
            }
            out.experts.push(*e);
            out.weights.push(w * r.scale);
        }
    }
    Ok(())
}

/// `sum[t] = Σ_j weights[t,j]·parts[t·K+j]` over j in order: parts `[T·K, L]`, sum `[T,L]`.
pub fn combine(dev: &Cpu, parts: &Tensor, routing: &Routing, sum: &mut Tensor) {
    let k = routing.chosen;
    sum.reshape(parts.rows() / k.max(1), parts.cols());
    for t in 0..sum.rows() {
        let row = sum.row_mut(t);
        row.fill(0.0);
        for j in t * k..(t + 1) * k {
            vector::axpy(dev.isa, routing.weights[j], parts.row(j), row);
        }
    }
}
