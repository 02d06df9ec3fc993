//! Element-wise functions.
use super::Isa;
/// `x·σ(x)` in place.
pub fn silu(_: Isa, x: &mut [f32]) {
    x.iter_mut().for_each(|v| *v /= 1.0 + (-*v).exp());
}
/// `σ(x)` in place.
pub fn sigmoid(_: Isa, x: &mut [f32]) {
    x.iter_mut().for_each(|v| *v = 1.0 / (1.0 + (-*v).exp()));
}
/// `exp(x)` in place.
pub fn exp(_: Isa, x: &mut [f32]) {
    x.iter_mut().for_each(|v| *v = v.exp());
}
/// SiTU-GLU into `gate`.
pub fn situ_glu(_: Isa, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = beta * (*g / beta).tanh() / (1.0 + (-*g).exp()) * linear_beta * (u / linear_beta).tanh();
    }
}
