//! RMSNorm and L2 norm.

use crate::compute::cpu::vector;
use crate::compute::device::{Cpu, Tensor};
use rayon::prelude::*;

/// `y = x / sqrt(mean(x²) + eps) * w`, row by row: x `[T,n]`, w `[1,n]`, y `[T,n]`.
pub fn rmsnorm(dev: &Cpu, x: &Tensor, w: &Tensor, eps: f32, y: &mut Tensor) {
    let n = x.cols();
    y.reshape(x.rows(), n);
    let row = |(x, y): (&[f32], &mut [f32])| vector::rms_norm(x, w.host(), eps, y);
    dev.run(|| match x.rows() {
        1 => row((x.host(), y.host_mut())),
        _ => x.host().par_chunks(n).zip(y.host_mut().par_chunks_mut(n)).for_each(row),
    });
}

/// `x = x / sqrt(Σx² + eps) * scale` in place for each run of `dim` values: x `[T, N·dim]`.
pub fn l2norm(dev: &Cpu, x: &mut Tensor, dim: usize, eps: f32, scale: f32) {
    let cols = x.cols();
    dev.run(|| {
        x.host_mut().par_chunks_mut(cols).for_each(|row| {
            for head in row.chunks_exact_mut(dim) {
                vector::l2_norm(head, eps, scale);
            }
        });
    });
}
