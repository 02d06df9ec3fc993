//! Operations on rows: norms, softmax, dot products, the KDA state step and the MLA attention sums.
//!
//! Every function states the order of its sums; none depends on what other rows are computed with it.

// One contract for every lane function: the machine has the set of `L`.
#![allow(unsafe_op_in_unsafe_fn)]

mod attention;

pub use attention::{kda_head_step, mla_scores, mla_weighted_sum};

use super::lanes::{Kernel, LANES, Lanes};
use super::math::exp_lanes;
use super::simd::Isa;

/// Lanes of the `f64` sums, which are plain Rust: the same bits on every instruction set.
const WIDE: usize = 8;

/// `Σ f(x)` in `f64`: element `i` goes to lane `i % 8` in ascending order, and the lanes are summed by halves.
#[inline(always)]
fn sum_f64(x: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0f64; WIDE];
    let mut whole = x.chunks_exact(WIDE);
    for part in &mut whole {
        for (lane, v) in lanes.iter_mut().zip(part) {
            *lane += f(f64::from(*v));
        }
    }
    for (lane, v) in lanes.iter_mut().zip(whole.remainder()) {
        *lane += f(f64::from(*v));
    }
    let mut half = WIDE / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// `Σ x²` in `f64`, in eight lanes.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    sum_f64(x, |v| v * v)
}

/// `1 / sqrt(mean(x²) + eps)`, the factor of an RMS norm; the sum is [`sum_of_squares`].
pub fn rms_factor(x: &[f32], eps: f32) -> f32 {
    (1.0 / (sum_of_squares(x) / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// RMS norm of one row: `out = x / sqrt(mean(x²) + eps) · w`.
///
/// # Panics
/// If the lengths differ.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == w.len() && x.len() == out.len(), "lengths of x, w and out differ");
    let factor = rms_factor(x, eps);
    for ((o, x), w) in out.iter_mut().zip(x).zip(w) {
        *o = x * factor * w;
    }
}

/// [`rms_norm`] in place.
///
/// # Panics
/// If the lengths differ.
pub fn rms_norm_in_place(x: &mut [f32], w: &[f32], eps: f32) {
    assert_eq!(x.len(), w.len());
    let factor = rms_factor(x, eps);
    for (x, w) in x.iter_mut().zip(w) {
        *x = *x * factor * w;
    }
}

/// L2 norm of one row: `x = x / sqrt(Σx² + eps) · scale`; the sum is [`sum_of_squares`].
pub fn l2_norm(x: &mut [f32], eps: f32, scale: f32) {
    let factor = (1.0 / (sum_of_squares(x) + f64::from(eps)).sqrt()) as f32;
    for x in x {
        *x = *x * factor * scale;
    }
}

/// `Σ a·b` in sixteen `f32` lanes (element `i` in lane `i % 16`, ascending), summed by halves: the order of a
/// dense matrix product.
///
/// # Panics
/// If the lengths differ or the machine lacks `isa`.
pub fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    isa.run(Dot { a, b })
}

struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        let mut sum = L::zero();
        for (a, b) in self.a.chunks(LANES).zip(self.b.chunks(LANES)) {
            sum = L::fma(L::load_part(a.as_ptr(), a.len()), L::load_part(b.as_ptr(), b.len()), sum);
        }
        L::sum(sum)
    }
}

/// `y = y + a·x`.
///
/// # Panics
/// If the lengths differ or the machine lacks `isa`.
pub fn axpy(isa: Isa, a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    isa.run(Axpy { a, x, y });
}

struct Axpy<'a> {
    a: f32,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Axpy<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let a = L::splat(self.a);
        for (x, y) in self.x.chunks(LANES).zip(self.y.chunks_mut(LANES)) {
            let sum = L::fma(a, L::load_part(x.as_ptr(), x.len()), L::load_part(y.as_ptr(), y.len()));
            L::store_part(y.as_mut_ptr(), sum, y.len());
        }
    }
}

/// `y = y + x`.
///
/// # Panics
/// If the lengths differ.
pub fn add(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// `x = a·x`.
pub fn scale(a: f32, x: &mut [f32]) {
    for x in x {
        *x *= a;
    }
}

/// Softmax of one row in place: `e^(x - max) / Σ`. The sum is in `f64`, in eight lanes, ascending. A NaN
/// anywhere, or an infinite maximum, makes the row NaN.
///
/// # Panics
/// If the machine lacks `isa`.
pub fn softmax(isa: Isa, x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    isa.run(ExpLess { x, max });
    let factor = (1.0 / sum_f64(x, |v| v)) as f32;
    scale(factor, x);
}

struct ExpLess<'a> {
    x: &'a mut [f32],
    max: f32,
}

impl Kernel for ExpLess<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let max = L::splat(self.max);
        for part in self.x.chunks_mut(LANES) {
            let x = L::sub(L::load_part(part.as_ptr(), part.len()), max);
            L::store_part(part.as_mut_ptr(), exp_lanes::<L>(x), part.len());
        }
    }
}

/// Whether no value is infinite or NaN, decided by the bits.
pub fn all_finite(x: &[f32]) -> bool {
    // One step above the largest finite exponent carries into the sign bit.
    let carry = |v: &f32| (v.to_bits() & 0x7fff_ffff) + 0x0080_0000;
    x.iter().fold(0, |all, v| all | carry(v)) >> 31 == 0
}

/// The first value that is infinite or NaN.
pub fn first_non_finite(x: &[f32]) -> Option<usize> {
    const BLOCK: usize = 1024;
    let block = x.chunks(BLOCK).position(|part| !all_finite(part))?;
    x[block * BLOCK..].iter().position(|v| !v.is_finite()).map(|i| block * BLOCK + i)
}

/// The index of the greatest value, the lowest of equals. A NaN never wins; `None` if there is nothing else.
pub fn argmax(x: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, v) in x.iter().copied().enumerate() {
        let wins = match best {
            None => !v.is_nan(),
            Some((_, b)) => v > b,
        };
        if wins {
            best = Some((i, v));
        }
    }
    best.map(|(i, _)| i)
}

#[cfg(test)]
mod tests;
