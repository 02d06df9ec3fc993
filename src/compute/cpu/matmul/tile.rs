//! The register tiles: R rows of W times N tokens.

// One contract for every function: the machine has the set of `L`, and the pointers cover the tile.
#![allow(unsafe_op_in_unsafe_fn)]

use super::super::lanes::{LANES, Lanes};

/// Stored values of F32 or BF16 rows.
pub(super) trait Dense {
    /// Bytes a value.
    const BYTES: usize;
    /// Widens 16 values at `p`.
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V;
}

/// Little-endian `f32`.
pub(super) struct F32;
/// Little-endian bf16.
pub(super) struct Bf16;

impl Dense for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load(p.cast())
    }
}

impl Dense for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load_bf16(p)
    }
}

/// Stored values of one MXFP4 block of 32 columns, without the scale.
pub(super) trait Block {
    /// Bytes a block.
    const BYTES: usize;
    /// The values of the block at `p`.
    unsafe fn load<L: Lanes>(p: *const u8) -> (L::V, L::V);
}

/// Two E2M1 codes a byte, as in the checkpoint.
pub(super) struct Packed;
/// Widened `f32` in lane order.
pub(super) struct Widened;

impl Block for Packed {
    const BYTES: usize = 16;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> (L::V, L::V) {
        L::load_e2m1(p)
    }
}

impl Block for Widened {
    const BYTES: usize = 2 * LANES * 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> (L::V, L::V) {
        (L::load(p.cast()), L::load(p.cast::<f32>().add(LANES)))
    }
}

/// What a tile reads and writes. Strides are between rows of W (`w`, `scale`, `tail`) or tokens (`x`, `y`).
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// Stored weights, at the first column of the tile.
    pub w: *const u8,
    /// Bytes.
    pub w_stride: usize,
    /// MXFP4: the scales as `f32`, one a block.
    pub scale: *const f32,
    /// Values.
    pub scale_stride: usize,
    /// Dense: the columns past the last 16, widened and padded to 16 a row; null if there are none.
    pub tail: *const f32,
    /// Activations, padded or arranged.
    pub x: *const f32,
    /// Values.
    pub x_stride: usize,
    /// Results.
    pub y: *mut f32,
    /// Values.
    pub y_stride: usize,
    /// Groups of 16 columns (dense) or blocks of 32 (MXFP4) to walk.
    pub steps: usize,
    /// `[R][N][16]` lanes carried from one range of columns to the next; unused if `first` and `last`.
    pub sums: *mut f32,
    /// The sums start at zero here.
    pub first: bool,
    /// The sums end here, into `y`.
    pub last: bool,
}

#[inline(always)]
unsafe fn begin<L: Lanes, const R: usize, const N: usize>(o: &Operands) -> [[L::V; N]; R] {
    let mut acc = [[L::zero(); N]; R];
    if !o.first {
        for r in 0..R {
            for n in 0..N {
                acc[r][n] = L::load(o.sums.add((r * N + n) * LANES));
            }
        }
    }
    acc
}

#[inline(always)]
unsafe fn end<L: Lanes, const R: usize, const N: usize>(o: &Operands, acc: [[L::V; N]; R]) {
    for (r, row) in acc.into_iter().enumerate() {
        for (n, sum) in row.into_iter().enumerate() {
            if o.last {
                *o.y.add(n * o.y_stride + r) = L::sum(sum);
            } else {
                L::store(o.sums.add((r * N + n) * LANES), sum);
            }
        }
    }
}

/// R dense rows times N tokens.
#[inline(always)]
pub(super) unsafe fn dense<L: Lanes, S: Dense, const R: usize, const N: usize>(o: &Operands) {
    let mut acc = begin::<L, R, N>(o);
    for step in 0..o.steps {
        let at = step * LANES * S::BYTES;
        let mut w = [L::zero(); R];
        for r in 0..R {
            let p = o.w.add(r * o.w_stride + at);
            if N == 1 {
                L::prefetch(p.wrapping_add(PREFETCH_BYTES));
            }
            w[r] = S::load::<L>(p);
        }
        for n in 0..N {
            let x = L::load(o.x.add(n * o.x_stride + step * LANES));
            for r in 0..R {
                acc[r][n] = L::fma(w[r], x, acc[r][n]);
            }
        }
    }
    if !o.tail.is_null() {
        for n in 0..N {
            let x = L::load(o.x.add(n * o.x_stride + o.steps * LANES));
            for r in 0..R {
                acc[r][n] = L::fma(L::load(o.tail.add(r * LANES)), x, acc[r][n]);
            }
        }
    }
    end::<L, R, N>(o, acc);
}

/// R MXFP4 rows times N tokens.
#[inline(always)]
pub(super) unsafe fn scaled<L: Lanes, S: Block, const R: usize, const N: usize>(o: &Operands) {
    let mut acc = begin::<L, R, N>(o);
    for step in 0..o.steps {
        let mut w = [(L::zero(), L::zero()); R];
        for r in 0..R {
            let p = o.w.add(r * o.w_stride + step * S::BYTES);
            if N == 1 {
                L::prefetch(p.wrapping_add(PREFETCH_BYTES));
            }
            w[r] = S::load::<L>(p);
        }
        for n in 0..N {
            let p = o.x.add(n * o.x_stride + step * 2 * LANES);
            let x = (L::load(p), L::load(p.add(LANES)));
            for r in 0..R {
                let partial = L::fma(w[r].1, x.1, L::mul(w[r].0, x.0));
                let scale = L::splat(*o.scale.add(r * o.scale_stride + step));
                acc[r][n] = L::fma(partial, scale, acc[r][n]);
            }
        }
    }
    end::<L, R, N>(o, acc);
}

/// How far ahead of a single token's walk the weights are fetched.
const PREFETCH_BYTES: usize = 2048;
