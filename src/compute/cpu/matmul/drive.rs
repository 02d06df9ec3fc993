//! Walks the tiles over rows, tokens and columns.

// One contract for every function: the machine has the set of `L`, and the pointers cover the product.
#![allow(unsafe_op_in_unsafe_fn)]

use super::super::lanes::{Kernel, LANES, Lanes, Tile};
use super::tile::{Bf16, F32, Format, Mxfp4, Operands, TAIL_BYTES};
use crate::checkpoint::format::{Data, MXFP4_GROUP, Matrix};

/// Rows over which the activations of a tile of tokens are reused from the first-level cache.
pub(super) const PANEL_ROWS: usize = 32;
/// Columns of a panel when there is more than one tile of tokens: its weights and the activations of one
/// tile of tokens fit the first-level cache together.
const PANEL_COLS: usize = 512;

/// All tokens of a product times the rows of `w`.
pub(super) struct Rows<'a> {
    pub w: Matrix<'a>,
    /// `[T]` rows of `x_stride` values, laid out for the form of `w`.
    pub x: *const f32,
    pub x_stride: usize,
    pub tokens: usize,
    /// `y[t·y_stride + r]`.
    pub y: *mut f32,
    pub y_stride: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        match self.w.data {
            Data::F32(bytes) => self.dense::<L, F32>(bytes),
            Data::Bf16(bytes) => self.dense::<L, Bf16>(bytes),
            Data::Mxfp4 { packed, scale } => match (self.tokens, L::TILE) {
                (1, _) => self.walk::<L, Mxfp4, 4, 1>(packed, scale),
                (_, Tile::Large) => self.walk::<L, Mxfp4, 4, 4>(packed, scale),
                // Unpacking costs more than widening does: share it among as many tokens as fit.
                (_, Tile::Small) => self.walk::<L, Mxfp4, 1, 6>(packed, scale),
            },
        }
    }
}

impl Rows<'_> {
    #[inline(always)]
    unsafe fn dense<L: Lanes, F: Format>(&self, bytes: &[u8]) {
        match (self.tokens, L::TILE) {
            (1, _) => self.walk::<L, F, 4, 1>(bytes, &[]),
            (_, Tile::Large) => self.walk::<L, F, 4, 6>(bytes, &[]),
            (_, Tile::Small) => self.walk::<L, F, 2, 2>(bytes, &[]),
        }
    }

    /// Tiles of R rows and up to N tokens: for each panel of rows, each range of columns, each tile of tokens.
    #[inline(always)]
    unsafe fn walk<L: Lanes, F: Format, const R: usize, const N: usize>(&self, bytes: &[u8], scale: &[u8]) {
        let cols = self.w.cols;
        let (row_bytes, row_scales) = (bytes.len() / self.w.rows, scale.len() / self.w.rows);
        let steps = F::whole_steps(cols);
        let has_tail = steps * F::STEP < cols;
        let range = if self.tokens <= N { steps.max(1) } else { PANEL_COLS / F::STEP };
        let mut tail = [0u8; PANEL_ROWS * TAIL_BYTES];
        let mut sums = vec![0.0f32; PANEL_ROWS * self.tokens * LANES];
        for r0 in (0..self.w.rows).step_by(PANEL_ROWS) {
            let rows = PANEL_ROWS.min(self.w.rows - r0);
            if has_tail {
                for (r, tail) in tail.chunks_exact_mut(TAIL_BYTES).take(rows).enumerate() {
                    let row = &bytes[(r0 + r) * row_bytes..][..row_bytes];
                    F::fill_tail(row, &scale[(r0 + r) * row_scales..][..row_scales], tail);
                }
            }
            let mut s0 = 0;
            loop {
                let s1 = steps.min(s0 + range);
                let last = s1 == steps;
                let o = Operands {
                    w: bytes.as_ptr().add(r0 * row_bytes + s0 * F::STEP_BYTES),
                    w_stride: row_bytes,
                    scale: scale.as_ptr().wrapping_add(r0 * row_scales + s0 * F::STEP / MXFP4_GROUP),
                    scale_stride: row_scales,
                    tail: if last && has_tail { tail.as_ptr() } else { std::ptr::null() },
                    x: self.x.add(s0 * F::STEP),
                    x_stride: self.x_stride,
                    y: self.y.add(r0),
                    y_stride: self.y_stride,
                    steps: s1 - s0,
                    sums: sums.as_mut_ptr(),
                    first: s0 == 0,
                    last,
                };
                for t in (0..self.tokens).step_by(N) {
                    panel::<L, F, R, N>(&o, rows, t, N.min(self.tokens - t));
                }
                if last {
                    break;
                }
                s0 = s1;
            }
        }
    }
}

/// The rows of a panel times `n <= N` tokens from `t` on.
#[inline(always)]
unsafe fn panel<L: Lanes, F: Format, const R: usize, const N: usize>(
    o: &Operands,
    rows: usize,
    t: usize,
    n: usize,
) {
    // The guards are constants: arms beyond N are not compiled.
    match n {
        1 => row_tiles::<L, F, R, 1>(o, rows, t),
        2 if N >= 2 => row_tiles::<L, F, R, 2>(o, rows, t),
        3 if N >= 3 => row_tiles::<L, F, R, 3>(o, rows, t),
        4 if N >= 4 => row_tiles::<L, F, R, 4>(o, rows, t),
        5 if N >= 5 => row_tiles::<L, F, R, 5>(o, rows, t),
        _ => row_tiles::<L, F, R, N>(o, rows, t),
    }
}

/// The rows of a panel times N tokens from `t` on: tiles of R rows, then single rows.
#[inline(always)]
unsafe fn row_tiles<L: Lanes, F: Format, const R: usize, const N: usize>(
    o: &Operands,
    rows: usize,
    t: usize,
) {
    let at = |r: usize| Operands {
        w: o.w.wrapping_add(r * o.w_stride),
        scale: o.scale.wrapping_add(r * o.scale_stride),
        tail: if o.tail.is_null() { o.tail } else { o.tail.wrapping_add(r * TAIL_BYTES) },
        x: o.x.wrapping_add(t * o.x_stride),
        y: o.y.wrapping_add(t * o.y_stride + r),
        // Tiles of one run of tokens fill that run's share of the sums, row by row.
        sums: o.sums.wrapping_add((t * PANEL_ROWS + r * N) * LANES),
        ..*o
    };
    let mut r = 0;
    while r + R <= rows {
        F::tile::<L, R, N>(&at(r));
        r += R;
    }
    while r < rows {
        F::tile::<L, 1, N>(&at(r));
        r += 1;
    }
}
