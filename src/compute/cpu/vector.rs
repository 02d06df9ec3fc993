//! Row operations.
use super::Isa;
/// One step of one head of KDA.
#[allow(clippy::too_many_arguments)]
pub fn kda_head_step(
    _: Isa,
    s: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: &[f32],
    beta: f32,
    o: &mut [f32],
) {
    let dv = v.len();
    o.fill(0.0);
    for ((row, k), d) in s.chunks_exact_mut(dv).zip(k).zip(decay) {
        for (s, u) in row.iter_mut().zip(o.iter_mut()) {
            *s *= d;
            *u += *s * k;
        }
    }
    for (u, v) in o.iter_mut().zip(v) {
        *u = beta * (v - *u);
    }
    let write = o.to_vec();
    o.fill(0.0);
    for ((row, k), q) in s.chunks_exact_mut(dv).zip(k).zip(q) {
        for ((s, w), o) in row.iter_mut().zip(&write).zip(o.iter_mut()) {
            *s += k * w;
            *o += *s * q;
        }
    }
}
/// RMSNorm of a row.
pub fn rmsnorm(isa: Isa, x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
    y.copy_from_slice(x);
    rmsnorm_in_place(isa, y, w, eps);
}
/// RMSNorm of a row in place.
pub fn rmsnorm_in_place(isa: Isa, x: &mut [f32], w: &[f32], eps: f32) {
    let r = (dot(isa, x, x) / x.len() as f32 + eps).sqrt().recip();
    x.iter_mut().zip(w).for_each(|(x, w)| *x = *x * r * w);
}
/// L2 norm of a row in place, times `scale`.
pub fn l2norm(isa: Isa, x: &mut [f32], eps: f32, scale: f32) {
    let r = scale / (dot(isa, x, x) + eps).sqrt();
    x.iter_mut().for_each(|x| *x *= r);
}
/// `y += a·x`.
pub fn axpy(_: Isa, a: f32, x: &[f32], y: &mut [f32]) {
    x.iter().zip(y).for_each(|(x, y)| *y += a * x);
}
/// `Σ a·b`.
pub fn dot(_: Isa, a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (ca, cb) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = ca.remainder().iter().zip(cb.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in ca.zip(cb) {
        for i in 0..16 {
            lanes[i] += a[i] * b[i];
        }
    }
    lanes.iter().sum::<f32>() + tail
}
/// Softmax of a row in place.
pub fn softmax(_: Isa, x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
    let mut sum = 0.0;
    for v in x.iter_mut() {
        *v = (*v - max).exp();
        sum += *v;
    }
    x.iter_mut().for_each(|v| *v /= sum);
}
/// Whether no value is NaN or infinite.
pub fn all_finite(x: &[f32]) -> bool {
    x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)) < 0x7f80_0000
}
