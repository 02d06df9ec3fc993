//! Exponential functions in `f32`, sixteen lanes at a time.
//!
//! An element's result does not depend on its place in a slice: a short end goes through the same lanes. The
//! relative error of [`exp`], [`sigmoid`] and [`tanh`] is below 2.5e-7 (`exp` and `sigmoid` below 2^-126: an
//! absolute error of the last place there). NaN stays NaN.

// One contract for every lane function: the machine has the set of `L`.
#![allow(unsafe_op_in_unsafe_fn)]

use super::lanes::{Kernel, LANES, Lanes};
use super::simd::Isa;

/// The same functions of one value, computed in `f64` and rounded once: for the few values of a router or a
/// per-head constant, and as the reference of the tests.
pub mod scalar {
    /// `e^x`.
    pub fn exp(x: f32) -> f32 {
        f64::from(x).exp() as f32
    }

    /// `1 / (1 + e^-x)`.
    pub fn sigmoid(x: f32) -> f32 {
        (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
    }

    /// The hyperbolic tangent.
    pub fn tanh(x: f32) -> f32 {
        f64::from(x).tanh() as f32
    }

    /// `x·σ(x)`.
    pub fn silu(x: f32) -> f32 {
        (f64::from(x) / (1.0 + (-f64::from(x)).exp())) as f32
    }

    /// `β·tanh(gate/β)·σ(gate) · βl·tanh(up/βl)`.
    pub fn situ_glu(gate: f32, up: f32, beta: f32, linear_beta: f32) -> f32 {
        let [gate, up, beta, linear_beta] = [gate, up, beta, linear_beta].map(f64::from);
        let gated = beta * (gate / beta).tanh() / (1.0 + (-gate).exp());
        (gated * linear_beta * (up / linear_beta).tanh()) as f32
    }
}

/// `x = e^x`. Above 88.73 the result is infinite; below -103.97 it is 0.
///
/// # Panics
/// As all functions here: if the machine lacks `isa`.
pub fn exp(isa: Isa, x: &mut [f32]) {
    isa.run(Map { x, f: Exp });
}

/// `x = σ(x) = 1 / (1 + e^-x)`. Below -88.73 the result is 0.
pub fn sigmoid(isa: Isa, x: &mut [f32]) {
    isa.run(Map { x, f: Sigmoid });
}

/// `x = tanh(x)`.
pub fn tanh(isa: Isa, x: &mut [f32]) {
    isa.run(Map { x, f: Tanh });
}

/// `x = x·σ(x)`.
pub fn silu(isa: Isa, x: &mut [f32]) {
    isa.run(Map { x, f: Silu });
}

/// `x = x·σ(gate)`, the output gate of an attention layer.
///
/// # Panics
/// Also if the lengths differ.
pub fn sigmoid_gate(isa: Isa, x: &mut [f32], gate: &[f32]) {
    isa.run(Zip { x, y: gate, f: SigmoidGate });
}

/// SiTU-GLU: `gate = β·tanh(gate/β)·σ(gate) · βl·tanh(up/βl)`; σ takes the uncapped gate.
///
/// # Panics
/// Also if the lengths differ.
pub fn situ_glu(isa: Isa, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
    isa.run(Zip { x: gate, y: up, f: SituGlu { beta, linear_beta } });
}

/// A function of one lane.
trait Unary: Copy {
    unsafe fn apply<L: Lanes>(self, x: L::V) -> L::V;
}

/// A function of two lanes.
trait Binary: Copy {
    unsafe fn apply<L: Lanes>(self, x: L::V, y: L::V) -> L::V;
}

struct Map<'a, F> {
    x: &'a mut [f32],
    f: F,
}

impl<F: Unary> Kernel for Map<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for part in self.x.chunks_mut(LANES) {
            let x = L::load_part(part.as_ptr(), part.len());
            L::store_part(part.as_mut_ptr(), self.f.apply::<L>(x), part.len());
        }
    }
}

struct Zip<'a, F> {
    x: &'a mut [f32],
    y: &'a [f32],
    f: F,
}

impl<F: Binary> Kernel for Zip<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        assert_eq!(self.x.len(), self.y.len());
        for (x, y) in self.x.chunks_mut(LANES).zip(self.y.chunks(LANES)) {
            let out = self.f.apply::<L>(L::load_part(x.as_ptr(), x.len()), L::load_part(y.as_ptr(), y.len()));
            L::store_part(x.as_mut_ptr(), out, x.len());
        }
    }
}

/// ln 2 in two parts; the first has nine bits, so that its product with a whole number is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `n` and `e^r - 1` with `x = n·ln 2 + r`, `|r| <= ln 2 / 2`, for `|x| < 2^20`.
#[inline(always)]
unsafe fn reduce<L: Lanes>(x: L::V) -> (L::V, L::V) {
    let n = L::round(L::mul(x, L::splat(std::f32::consts::LOG2_E)));
    let r = L::fma(n, L::splat(-LN2_HIGH), x);
    let r = L::fma(n, L::splat(-LN2_LOW), r);
    // The series to r^7: what is left out is below 2e-8 of the sum.
    let mut p = L::splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        p = L::fma(p, r, L::splat(c));
    }
    (n, L::fma(L::mul(r, r), p, r))
}

#[inline(always)]
pub(super) unsafe fn exp_lanes<L: Lanes>(x: L::V) -> L::V {
    let (n, p) = reduce::<L>(L::clamp(x, -104.0, 89.0));
    // Two factors, since 2^n alone may be out of range where the product is not.
    let half = L::round(L::mul(n, L::splat(0.5)));
    let e = L::add(L::splat(1.0), p);
    L::mul(L::mul(e, L::exp2_int(half)), L::exp2_int(L::sub(n, half)))
}

#[inline(always)]
unsafe fn sigmoid_lanes<L: Lanes>(x: L::V) -> L::V {
    let one = L::splat(1.0);
    L::div(one, L::add(one, exp_lanes::<L>(L::sub(L::zero(), x))))
}

/// `tanh |x| = (e^2|x| - 1) / (e^2|x| + 1)`, with the numerator taken from `e^r - 1` so that small x keep
/// their precision.
#[inline(always)]
unsafe fn tanh_lanes<L: Lanes>(x: L::V) -> L::V {
    let t = L::clamp(L::abs(x), 0.0, 20.0);
    let (n, p) = reduce::<L>(L::add(t, t));
    let scale = L::exp2_int(n);
    let above = L::fma(scale, p, L::sub(scale, L::splat(1.0)));
    L::copysign(L::div(above, L::add(above, L::splat(2.0))), x)
}

#[derive(Clone, Copy)]
struct Exp;
impl Unary for Exp {
    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L::V) -> L::V {
        exp_lanes::<L>(x)
    }
}

#[derive(Clone, Copy)]
struct Sigmoid;
impl Unary for Sigmoid {
    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L::V) -> L::V {
        sigmoid_lanes::<L>(x)
    }
}

#[derive(Clone, Copy)]
struct Tanh;
impl Unary for Tanh {
    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L::V) -> L::V {
        tanh_lanes::<L>(x)
    }
}

#[derive(Clone, Copy)]
struct Silu;
impl Unary for Silu {
    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L::V) -> L::V {
        L::mul(x, sigmoid_lanes::<L>(x))
    }
}

#[derive(Clone, Copy)]
struct SigmoidGate;
impl Binary for SigmoidGate {
    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, x: L::V, gate: L::V) -> L::V {
        L::mul(x, sigmoid_lanes::<L>(gate))
    }
}

#[derive(Clone, Copy)]
struct SituGlu {
    beta: f32,
    linear_beta: f32,
}
impl Binary for SituGlu {
    #[inline(always)]
    unsafe fn apply<L: Lanes>(self, gate: L::V, up: L::V) -> L::V {
        let (beta, linear_beta) = (L::splat(self.beta), L::splat(self.linear_beta));
        let capped = L::mul(beta, tanh_lanes::<L>(L::div(gate, beta)));
        let linear = L::mul(linear_beta, tanh_lanes::<L>(L::div(up, linear_beta)));
        L::mul(L::mul(capped, sigmoid_lanes::<L>(gate)), linear)
    }
}

#[cfg(test)]
mod tests;
