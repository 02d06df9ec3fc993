//! Matrix products and the gated unit between them.

use crate::compute::cpu::{math, matmul as kernel, vector};
use crate::compute::device::{Cpu, Tensor, Weight};
use crate::error::Result;
use rayon::prelude::*;

/// Elements that one task of an element-wise operation takes.
pub(crate) const ELEMENTS: usize = 8192;

/// `y = x·Wᵀ`: x `[T,in]`, w `[out,in]` in its stored form, y `[T,out]`. Rows of a streamed weight are multiplied as
/// they arrive. Fails where one cannot be read.
pub fn matmul(dev: &Cpu, x: &Tensor, w: &Weight, y: &mut Tensor) -> Result<()> {
    debug_assert_eq!(x.cols(), w.cols());
    y.reshape(x.rows(), w.rows());
    let stride = w.rows();
    for part in w.parts() {
        let part = part?;
        let y = &mut y.host_mut()[part.first..];
        dev.run(|| kernel::matmul_strided(dev.isa, x.host(), &part.matrix(), y, stride));
    }
    Ok(())
}

/// SiTU-GLU, `β·tanh(gate/β)·σ(gate) · βl·tanh(up/βl)` (the sigmoid takes the uncapped gate), into `gate`:
/// both `[T,n]`.
pub fn situ(dev: &Cpu, gate: &mut Tensor, up: &Tensor, beta: f32, linear_beta: f32) {
    dev.run(|| {
        gate.host_mut()
            .par_chunks_mut(ELEMENTS)
            .zip(up.host().par_chunks(ELEMENTS))
            .for_each(|(g, u)| math::situ_glu(dev.isa, g, u, beta, linear_beta));
    });
}

/// `a += b`, both `[T,n]`.
pub fn add(a: &mut Tensor, b: &Tensor) {
    debug_assert_eq!(a.host().len(), b.host().len());
    vector::add(b.host(), a.host_mut());
}

/// `a *= σ(gate)`, both `[T,n]`.
pub fn gate_sigmoid(dev: &Cpu, a: &mut Tensor, gate: &Tensor) {
    dev.run(|| {
        a.host_mut()
            .par_chunks_mut(ELEMENTS)
            .zip(gate.host().par_chunks(ELEMENTS))
            .for_each(|(a, g)| math::sigmoid_gate(dev.isa, a, g));
    });
}
