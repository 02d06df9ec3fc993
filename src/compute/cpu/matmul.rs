//! Matrix products `y = x·Wᵀ` from the stored form of the weights, widened in registers.
//!
//! # Order of a sum
//! Each `y[t, r]` has one accumulator of sixteen lanes, walked through the columns in ascending order and
//! summed by halves at the end. F32 and BF16: lane `c % 16` takes column `c`. MXFP4: in each group of
//! 128 columns lane `l` takes columns `8l..8l+8`, all of one scale: it sums the products of the unscaled E2M1
//! values, multiplies once by the scale and adds to the accumulator. So the bits depend neither on how many
//! tokens or rows share the call, nor on threads, nor on the tiling.

mod drive;
mod tile;

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use self::drive::{PANEL_ROWS, Rows};
use super::lanes::{GROUP, LANES};
use super::simd::Isa;
use crate::checkpoint::format::{Data, Matrix};

/// Multiply-adds below which a product is not worth handing to other threads.
const SERIAL_WORK: usize = 1 << 17;
/// Multiply-adds that one task should have at least.
const TASK_WORK: usize = 1 << 17;

/// `y = x·Wᵀ`, with x `[T, cols]` and y `[T, rows]`, in parallel over rows on the current rayon pool.
///
/// # Panics
/// If the slices do not fit the matrix, the matrix is inconsistent, or the machine lacks `isa`.
pub fn matmul(isa: Isa, x: &[f32], w: &Matrix<'_>, y: &mut [f32]) {
    matmul_strided(isa, x, w, y, w.rows);
}

/// [`matmul`] into rows that lie `y_stride` values apart: `y[t·y_stride + r]`, so that a matrix can be multiplied some
/// rows at a time.
///
/// # Panics
/// As [`matmul`], or if `y_stride < rows`.
pub fn matmul_strided(isa: Isa, x: &[f32], w: &Matrix<'_>, y: &mut [f32], y_stride: usize) {
    let product = Product::new(isa, x, w, y, y_stride);
    let work = w.rows * w.cols * product.tokens;
    let threads = rayon::current_num_threads();
    if work <= SERIAL_WORK || threads == 1 {
        return product.rows(0..w.rows);
    }
    // Four tasks a thread even out what a busy core falls behind; more only cost.
    let tasks = (work / TASK_WORK).clamp(1, 4 * threads);
    let per_task = w.rows.div_ceil(tasks).next_multiple_of(PANEL_ROWS);
    (0..w.rows.div_ceil(per_task)).into_par_iter().with_max_len(1).for_each(|task| {
        let start = task * per_task;
        product.rows(start..w.rows.min(start + per_task));
    });
}

/// [`matmul`] on the calling thread alone, for callers that are parallel over experts or heads themselves.
///
/// # Panics
/// As [`matmul`].
pub fn matmul_serial(isa: Isa, x: &[f32], w: &Matrix<'_>, y: &mut [f32]) {
    matmul_serial_strided(isa, x, w, y, w.rows);
}

/// [`matmul_serial`] into rows that lie `y_stride` values apart: `y[t·y_stride + r]`. Lets two products (gate
/// and up) share one buffer.
///
/// # Panics
/// As [`matmul`], or if `y_stride < rows`.
pub fn matmul_serial_strided(isa: Isa, x: &[f32], w: &Matrix<'_>, y: &mut [f32], y_stride: usize) {
    Product::new(isa, x, w, y, y_stride).rows(0..w.rows);
}

/// A checked product, its activations laid out for the kernels.
struct Product<'a> {
    isa: Isa,
    w: Matrix<'a>,
    x: Cow<'a, [f32]>,
    x_stride: usize,
    tokens: usize,
    y: Output,
    y_stride: usize,
}

/// Where the results go; workers write disjoint columns of it.
struct Output(*mut f32);
// SAFETY: the pointer comes from a unique borrow that outlives the product, and each task writes its own rows
// of W only, that is its own elements of y.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl<'a> Product<'a> {
    fn new(isa: Isa, x: &'a [f32], w: &Matrix<'a>, y: &'a mut [f32], y_stride: usize) -> Product<'a> {
        assert!(w.is_consistent(), "the bytes of the matrix do not match its shape");
        assert!(y_stride >= w.rows, "rows of the result overlap");
        let tokens = match (w.cols, w.rows) {
            (0, 0) => 0,
            (0, rows) => y.len() / rows,
            (cols, _) => x.len() / cols,
        };
        assert_eq!(x.len(), tokens * w.cols, "x is not [T, cols]");
        let needed = if tokens == 0 { 0 } else { (tokens - 1) * y_stride + w.rows };
        assert!(y.len() >= needed && (y_stride != w.rows || y.len() == needed), "y is not [T, rows]");
        let (x, x_stride) = match w.data {
            Data::Mxfp4 { .. } => (Cow::Owned(transpose_groups(x, w.cols)), w.cols.next_multiple_of(GROUP)),
            _ if w.cols.is_multiple_of(LANES) => (Cow::Borrowed(x), w.cols),
            _ => (Cow::Owned(pad(x, w.cols)), w.cols.next_multiple_of(LANES)),
        };
        Product { isa, w: *w, x, x_stride, tokens, y: Output(y.as_mut_ptr()), y_stride }
    }

    /// Computes `rows` of W, for all tokens.
    fn rows(&self, rows: Range<usize>) {
        if rows.is_empty() || self.tokens == 0 {
            return;
        }
        self.isa.run(Rows {
            w: self.w.row_range(rows.start, rows.len()),
            x: self.x.as_ptr(),
            x_stride: self.x_stride,
            tokens: self.tokens,
            // SAFETY: rows.start < w.rows <= y_stride, inside the first row of y.
            y: unsafe { self.y.0.add(rows.start) },
            y_stride: self.y_stride,
        });
    }
}

/// Each row of x `[T, cols]` followed by zeros up to whole lanes.
fn pad(x: &[f32], cols: usize) -> Vec<f32> {
    let stride = cols.next_multiple_of(LANES);
    let mut out = vec![0.0; x.len() / cols * stride];
    for (to, from) in out.chunks_exact_mut(stride).zip(x.chunks_exact(cols)) {
        to[..cols].copy_from_slice(from);
    }
    out
}

/// Each row of x `[T, cols]` padded with zeros to whole groups, and each group, as `[16][8]`, transposed: the
/// sixteen values that meet nibble `i` of the sixteen words of a group lie together.
fn transpose_groups(x: &[f32], cols: usize) -> Vec<f32> {
    if cols == 0 {
        return Vec::new();
    }
    let stride = cols.next_multiple_of(GROUP);
    let mut out = vec![0.0; x.len() / cols * stride];
    for (to, from) in out.chunks_exact_mut(stride).zip(x.chunks_exact(cols)) {
        for (to, from) in to.chunks_exact_mut(GROUP).zip(from.chunks(GROUP)) {
            for (lane, word) in from.chunks_exact(8).enumerate() {
                for (i, value) in word.iter().enumerate() {
                    to[i * LANES + lane] = *value;
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
