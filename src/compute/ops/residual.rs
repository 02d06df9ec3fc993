//! Block attention residuals: a softmax mix over the stored block sums and the running sum.

use super::Disjoint;
use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor};
use rayon::prelude::*;

/// `k_i = v_i / sqrt(mean(v_i²) + eps); a_i = k_i·w; p = softmax(a); out = Σ p_i·v_i` for every token.
///
/// sources: each `[T,H]`, the running sum last; w `[1,H]` = `norm_w·proj_w`; out `[T,H]`, probs `[T, sources]`.
/// The mix is of the raw sources, and sums run over the sources in order.
pub fn mix(dev: &Cpu, sources: &[Tensor], w: &Tensor, eps: f32, out: &mut Tensor, probs: &mut Tensor) {
    let (t_len, h, n) = (sources[0].rows(), w.cols(), sources.len());
    out.reshape(t_len, h);
    probs.reshape(t_len, n);
    let (rows, ps) = (Disjoint::new(out.host_mut()), Disjoint::new(probs.host_mut()));
    let token = |t: usize| {
        // SAFETY: each token writes its own rows.
        let (row, p) = unsafe { (rows.range(t * h, h), ps.range(t * n, n)) };
        for (p, s) in p.iter_mut().zip(sources) {
            let v = s.row(t);
            *p = vector::dot(dev.isa, v, w.host()) * vector::rms_factor(v, eps);
        }
        vector::softmax(dev.isa, p);
        row.fill(0.0);
        for (p, s) in p.iter().zip(sources) {
            vector::axpy(dev.isa, *p, s.row(t), row);
        }
    };
    dev.run(|| match t_len {
        1 => token(0),
        _ => (0..t_len).into_par_iter().for_each(token),
    });
}
