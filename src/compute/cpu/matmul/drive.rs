//! Walks the tiles over rows, tokens and columns.

// One contract for every function: the machine has the set of `L`, and the pointers cover the product.
#![allow(unsafe_op_in_unsafe_fn)]

use super::super::lanes::{Kernel, LANES, Lanes, Tile};
use super::tile::{self, Bf16, Block, Dense, F32, Operands, Packed, Widened};
use crate::checkpoint::format::{Data, MXFP4_GROUP, Matrix, e8m0};

/// From this many tokens on, weights are widened once into a panel instead of once a tile of tokens.
const PANEL_TOKENS: usize = 12;
/// Rows of a panel: its tokens' activations are read once for so many rows.
const PANEL_ROWS: usize = 32;
/// Columns of a panel: rows of a tile and the activations of its tokens stay in the first-level cache.
const PANEL_COLS: usize = 512;
/// The most rows of a tile.
const MAX_TILE_ROWS: usize = 4;

/// All tokens of a product times the rows of `w`.
pub(super) struct Rows<'a> {
    pub w: Matrix<'a>,
    /// `[T]` rows of `x_stride` values: padded with zeros to whole lanes, or arranged for MXFP4.
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
            Data::Mxfp4 { packed, scale } => self.mxfp4::<L>(packed, scale),
        }
    }
}

impl Rows<'_> {
    /// The operands at the first row and token, over all columns.
    #[inline(always)]
    fn operands(&self, w: *const u8, w_stride: usize, steps: usize) -> Operands {
        Operands {
            w,
            w_stride,
            scale: std::ptr::null(),
            scale_stride: 0,
            tail: std::ptr::null(),
            x: self.x,
            x_stride: self.x_stride,
            y: self.y,
            y_stride: self.y_stride,
            steps,
            sums: std::ptr::null_mut(),
            first: true,
            last: true,
        }
    }

    #[inline(always)]
    unsafe fn dense<L: Lanes, S: Dense>(&self, bytes: &[u8]) {
        if self.tokens >= PANEL_TOKENS && self.w.cols > 0 {
            return match L::TILE {
                Tile::Large => self.dense_panels::<L, S, 4, 6>(bytes),
                Tile::Small => self.dense_panels::<L, S, 2, 3>(bytes),
            };
        }
        let stride = self.w.cols * S::BYTES;
        let o = self.operands(bytes.as_ptr(), stride, self.w.cols / LANES);
        let mut r = 0;
        while r < self.w.rows {
            let left = self.w.rows - r;
            let at = Operands { w: o.w.add(r * stride), y: o.y.add(r), ..o };
            r += match (L::TILE, self.tokens) {
                (_, 1) if left >= 4 => self.dense_rows::<L, S, 4, 1>(at),
                (Tile::Large, _) if left >= 4 => self.dense_rows::<L, S, 4, 6>(at),
                (Tile::Small, _) if left >= 2 => self.dense_rows::<L, S, 2, 3>(at),
                _ => self.dense_rows::<L, S, 1, 6>(at),
            };
        }
    }

    /// R rows, all tokens, all columns; returns R.
    #[inline(always)]
    unsafe fn dense_rows<L: Lanes, S: Dense, const R: usize, const N: usize>(
        &self,
        mut o: Operands,
    ) -> usize {
        let done = o.steps * LANES;
        let mut tail = [0.0f32; MAX_TILE_ROWS * LANES];
        if done < self.w.cols {
            for r in 0..R {
                let p = o.w.add(r * o.w_stride + done * S::BYTES);
                widen_part::<S>(p, &mut tail[r * LANES..][..self.w.cols - done]);
            }
            o.tail = tail.as_ptr();
        }
        dense_tokens::<L, S, R, N>(o, self.tokens);
        R
    }

    #[inline(always)]
    unsafe fn dense_panels<L: Lanes, S: Dense, const R: usize, const N: usize>(&self, bytes: &[u8]) {
        let mut panel = vec![0.0f32; PANEL_ROWS * PANEL_COLS];
        let mut sums = vec![0.0f32; self.sums_len()];
        let stride = self.w.cols * S::BYTES;
        for r0 in (0..self.w.rows).step_by(PANEL_ROWS) {
            let rows = PANEL_ROWS.min(self.w.rows - r0);
            for c0 in (0..self.w.cols).step_by(PANEL_COLS) {
                let cols = PANEL_COLS.min(self.w.cols - c0);
                for (r, out) in panel.chunks_exact_mut(PANEL_COLS).take(rows).enumerate() {
                    let p = bytes.as_ptr().add((r0 + r) * stride + c0 * S::BYTES);
                    widen::<L, S>(p, cols, out);
                }
                let o = Operands {
                    x: self.x.add(c0),
                    y: self.y.add(r0),
                    sums: sums.as_mut_ptr(),
                    first: c0 == 0,
                    last: c0 + cols == self.w.cols,
                    ..self.operands(panel.as_ptr().cast(), 4 * PANEL_COLS, cols.div_ceil(LANES))
                };
                for (t, n) in tiles(self.tokens, N) {
                    for (r, wide) in row_tiles(rows, R) {
                        let o = Operands {
                            w: o.w.add(r * o.w_stride),
                            x: o.x.add(t * o.x_stride),
                            y: o.y.add(t * o.y_stride + r),
                            sums: o.sums.add((t * PANEL_ROWS + r * n) * LANES),
                            ..o
                        };
                        if wide {
                            dense_tokens::<L, F32, R, N>(o, n);
                        } else {
                            dense_tokens::<L, F32, 1, N>(o, n);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn mxfp4<L: Lanes>(&self, packed: &[u8], scale: &[u8]) {
        if self.tokens >= PANEL_TOKENS && self.w.cols > 0 {
            return match L::TILE {
                Tile::Large => self.mxfp4_panels::<L, 4, 4>(packed, scale),
                Tile::Small => self.mxfp4_panels::<L, 2, 2>(packed, scale),
            };
        }
        let blocks = self.w.cols / MXFP4_GROUP;
        let mut scales = vec![0.0f32; MAX_TILE_ROWS * blocks];
        let o = Operands {
            scale: scales.as_ptr(),
            scale_stride: blocks,
            ..self.operands(packed.as_ptr(), blocks * Packed::BYTES, blocks)
        };
        let mut r = 0;
        while r < self.w.rows {
            let left = self.w.rows - r;
            let at = Operands { w: o.w.add(r * o.w_stride), y: o.y.add(r), ..o };
            widen_scales(&scale[r * blocks..], &mut scales[..left.min(MAX_TILE_ROWS) * blocks]);
            r += match (L::TILE, self.tokens) {
                (_, 1) if left >= 4 => mxfp4_tokens::<L, Packed, 4, 1>(at, 1),
                (Tile::Large, t) if left >= 4 => mxfp4_tokens::<L, Packed, 4, 4>(at, t),
                (Tile::Small, t) if left >= 2 => mxfp4_tokens::<L, Packed, 2, 2>(at, t),
                (_, t) => mxfp4_tokens::<L, Packed, 1, 4>(at, t),
            };
        }
    }

    #[inline(always)]
    unsafe fn mxfp4_panels<L: Lanes, const R: usize, const N: usize>(&self, packed: &[u8], scale: &[u8]) {
        const PANEL_BLOCKS: usize = PANEL_COLS / MXFP4_GROUP;
        let mut panel = vec![0.0f32; PANEL_ROWS * PANEL_COLS];
        let mut scales = vec![0.0f32; PANEL_ROWS * PANEL_BLOCKS];
        let mut sums = vec![0.0f32; self.sums_len()];
        let blocks = self.w.cols / MXFP4_GROUP;
        for r0 in (0..self.w.rows).step_by(PANEL_ROWS) {
            let rows = PANEL_ROWS.min(self.w.rows - r0);
            for b0 in (0..blocks).step_by(PANEL_BLOCKS) {
                let count = PANEL_BLOCKS.min(blocks - b0);
                for r in 0..rows {
                    let at = (r0 + r) * blocks + b0;
                    widen_scales(&scale[at..], &mut scales[r * PANEL_BLOCKS..][..count]);
                    let out = panel.as_mut_ptr().add(r * PANEL_COLS);
                    for b in 0..count {
                        let w = L::load_e2m1(packed.as_ptr().add((at + b) * Packed::BYTES));
                        L::store(out.add(2 * b * LANES), w.0);
                        L::store(out.add((2 * b + 1) * LANES), w.1);
                    }
                }
                let o = Operands {
                    scale: scales.as_ptr(),
                    scale_stride: PANEL_BLOCKS,
                    x: self.x.add(b0 * MXFP4_GROUP),
                    y: self.y.add(r0),
                    sums: sums.as_mut_ptr(),
                    first: b0 == 0,
                    last: b0 + count == blocks,
                    ..self.operands(panel.as_ptr().cast(), 4 * PANEL_COLS, count)
                };
                for (t, n) in tiles(self.tokens, N) {
                    for (r, wide) in row_tiles(rows, R) {
                        let o = Operands {
                            w: o.w.add(r * o.w_stride),
                            scale: o.scale.add(r * o.scale_stride),
                            x: o.x.add(t * o.x_stride),
                            y: o.y.add(t * o.y_stride + r),
                            sums: o.sums.add((t * PANEL_ROWS + r * n) * LANES),
                            ..o
                        };
                        if wide {
                            mxfp4_tokens::<L, Widened, R, N>(o, n);
                        } else {
                            mxfp4_tokens::<L, Widened, 1, N>(o, n);
                        }
                    }
                }
            }
        }
    }

    fn sums_len(&self) -> usize {
        self.tokens * PANEL_ROWS * LANES
    }
}

/// A row tile of R dense rows times all tokens, N at a time.
#[inline(always)]
unsafe fn dense_tokens<L: Lanes, S: Dense, const R: usize, const N: usize>(o: Operands, tokens: usize) {
    for (t, n) in tiles(tokens, N) {
        let at = Operands { x: o.x.add(t * o.x_stride), y: o.y.add(t * o.y_stride), ..o };
        // The guards are constants: arms beyond N are not compiled.
        match n {
            1 => tile::dense::<L, S, R, 1>(&at),
            2 if N >= 2 => tile::dense::<L, S, R, 2>(&at),
            3 if N >= 3 => tile::dense::<L, S, R, 3>(&at),
            4 if N >= 4 => tile::dense::<L, S, R, 4>(&at),
            5 if N >= 5 => tile::dense::<L, S, R, 5>(&at),
            _ => tile::dense::<L, S, R, N>(&at),
        }
    }
}

/// A row tile of R MXFP4 rows times all tokens, N at a time; returns R.
#[inline(always)]
unsafe fn mxfp4_tokens<L: Lanes, S: Block, const R: usize, const N: usize>(
    o: Operands,
    tokens: usize,
) -> usize {
    for (t, n) in tiles(tokens, N) {
        let at = Operands { x: o.x.add(t * o.x_stride), y: o.y.add(t * o.y_stride), ..o };
        match n {
            1 => tile::scaled::<L, S, R, 1>(&at),
            2 if N >= 2 => tile::scaled::<L, S, R, 2>(&at),
            3 if N >= 3 => tile::scaled::<L, S, R, 3>(&at),
            _ => tile::scaled::<L, S, R, N>(&at),
        }
    }
    R
}

/// `(start, count)` of runs of at most `n` in `0..total`.
#[inline(always)]
fn tiles(total: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..total).step_by(n).map(move |start| (start, n.min(total - start)))
}

/// First rows of the tiles of `r` rows in `0..rows`, then the rows left over one by one (`false`).
#[inline(always)]
fn row_tiles(rows: usize, r: usize) -> impl Iterator<Item = (usize, bool)> {
    let whole = rows - rows % r;
    (0..whole).step_by(r).map(|at| (at, true)).chain((whole..rows).map(|at| (at, false)))
}

/// Widens `cols` values at `p` into `out`, with zeros up to whole lanes.
#[inline(always)]
unsafe fn widen<L: Lanes, S: Dense>(p: *const u8, cols: usize, out: &mut [f32]) {
    let whole = cols - cols % LANES;
    for c in (0..whole).step_by(LANES) {
        L::store(out.as_mut_ptr().add(c), S::load::<L>(p.add(c * S::BYTES)));
    }
    if whole < cols {
        out[whole..whole + LANES].fill(0.0);
        widen_part::<S>(p.add(whole * S::BYTES), &mut out[whole..cols]);
    }
}

/// Widens `out.len()` values at `p` one by one: for what is left of a row, where 16 would read past its end.
#[inline(always)]
unsafe fn widen_part<S: Dense>(p: *const u8, out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let mut bytes = [0u8; 4];
        // The value is the high part of the f32 bits, whole or half.
        std::ptr::copy_nonoverlapping(p.add(i * S::BYTES), bytes[4 - S::BYTES..].as_mut_ptr(), S::BYTES);
        *o = f32::from_le_bytes(bytes);
    }
}

/// Expands scale bytes into `out`.
#[inline(always)]
fn widen_scales(bytes: &[u8], out: &mut [f32]) {
    for (o, s) in out.iter_mut().zip(bytes) {
        *o = e8m0(*s);
    }
}
