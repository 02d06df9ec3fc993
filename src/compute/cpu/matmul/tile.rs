//! The register tiles: R rows of W times N tokens.

// One contract for every function: the machine has the set of `L`, and the pointers cover the tile.
#![allow(unsafe_op_in_unsafe_fn)]
// Indices run over several arrays of the tile at once, and must unroll into registers.
#![allow(clippy::needless_range_loop)]

use super::super::lanes::{GROUP, GROUP_BYTES, LANES, Lanes};

/// How far ahead of a single token's walk the weights are fetched.
const PREFETCH_BYTES: usize = 2048;

/// Scale bytes of one MXFP4 group.
const GROUP_SCALES: usize = 4;

/// The zero-padded copy of what is left of a row after its whole steps, and where its parts lie. A whole
/// MXFP4 group is followed by spare bytes that its loads may touch.
pub(super) const TAIL_BYTES: usize = 128;
const TAIL_SCALES: usize = 96;

/// What a tile reads and writes. Strides are between rows of W (`w`, `scale`, `tail`) or tokens (`x`, `y`).
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// Stored weights at the first column of the tile, rows `w_stride` bytes apart.
    pub w: *const u8,
    pub w_stride: usize,
    /// MXFP4 scale bytes at the first column of the tile, rows `scale_stride` apart.
    pub scale: *const u8,
    pub scale_stride: usize,
    /// The step past the whole ones, `TAIL_BYTES` a row; null if the tile has none.
    pub tail: *const u8,
    /// Activations as laid out by `Format::lay_out`, tokens `x_stride` values apart.
    pub x: *const f32,
    pub x_stride: usize,
    /// Results, tokens `y_stride` values apart.
    pub y: *mut f32,
    pub y_stride: usize,
    /// Whole steps to walk.
    pub steps: usize,
    /// `[R][N][16]` lanes, carried from one range of columns to the next.
    pub sums: *mut f32,
    /// The sums start at zero here.
    pub first: bool,
    /// The sums end here, in `y`.
    pub last: bool,
}

/// A stored form, walked in steps of some columns.
pub(super) trait Format {
    /// Columns of a step.
    const STEP: usize;
    /// Bytes of a step, scales apart.
    const STEP_BYTES: usize;

    /// Steps of a row of `cols` columns that can be read in place; what is left is read from a tail.
    fn whole_steps(cols: usize) -> usize;
    /// Writes what is left of a row after its whole steps.
    fn fill_tail(row: &[u8], scale: &[u8], tail: &mut [u8]);
    /// Adds the products of R rows times N tokens to the sums.
    unsafe fn tile<L: Lanes, const R: usize, const N: usize>(o: &Operands);
}

/// Stored values widened sixteen at a time.
pub(super) trait Value {
    /// Bytes a value.
    const BYTES: usize;
    /// Widens 16 values at `p`.
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V;
}

/// Little-endian `f32`.
pub(super) struct F32;
/// Little-endian bf16.
pub(super) struct Bf16;
/// E2M1 codes with E8M0 scales, in groups of 128 columns.
pub(super) struct Mxfp4;

impl Value for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load(p.cast())
    }
}

impl Value for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
        L::load_bf16(p)
    }
}

impl<S: Value> Format for S {
    const STEP: usize = LANES;
    const STEP_BYTES: usize = LANES * S::BYTES;

    fn whole_steps(cols: usize) -> usize {
        cols / LANES
    }

    fn fill_tail(row: &[u8], _: &[u8], tail: &mut [u8]) {
        let rest = row.len() % Self::STEP_BYTES;
        tail[..rest].copy_from_slice(&row[row.len() - rest..]);
    }

    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const N: usize>(o: &Operands) {
        let mut acc = [[L::zero(); N]; R];
        if !o.first {
            for r in 0..R {
                for n in 0..N {
                    acc[r][n] = L::load(o.sums.add((r * N + n) * LANES));
                }
            }
        }
        for step in 0..o.steps {
            let mut w = [L::zero(); R];
            for r in 0..R {
                let p = o.w.add(r * o.w_stride + step * Self::STEP_BYTES);
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
                    acc[r][n] = L::fma(S::load::<L>(o.tail.add(r * TAIL_BYTES)), x, acc[r][n]);
                }
            }
        }
        for r in 0..R {
            for n in 0..N {
                if o.last {
                    *o.y.add(n * o.y_stride + r) = L::sum(acc[r][n]);
                } else {
                    L::store(o.sums.add((r * N + n) * LANES), acc[r][n]);
                }
            }
        }
    }
}

impl Format for Mxfp4 {
    const STEP: usize = GROUP;
    const STEP_BYTES: usize = GROUP_BYTES;

    fn whole_steps(cols: usize) -> usize {
        // The last group of a row is never read in place: its loads touch a few bytes past its end.
        cols.saturating_sub(1) / GROUP
    }

    fn fill_tail(row: &[u8], scale: &[u8], tail: &mut [u8]) {
        let groups = Self::whole_steps(2 * row.len());
        let (row, scale) = (&row[groups * GROUP_BYTES..], &scale[groups * GROUP_SCALES..]);
        tail[..row.len()].copy_from_slice(row);
        tail[TAIL_SCALES..][..scale.len()].copy_from_slice(scale);
    }

    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const N: usize>(o: &Operands) {
        // The sums live in memory: they are touched once a group, and the registers are needed for the groups.
        if o.first {
            for i in 0..R * N {
                L::store(o.sums.add(i * LANES), L::zero());
            }
        }
        let steps = o.steps + usize::from(!o.tail.is_null());
        for step in 0..steps {
            let (w, w_stride, scale, scale_stride) = if step < o.steps {
                let w = o.w.add(step * GROUP_BYTES);
                (w, o.w_stride, o.scale.add(step * GROUP_SCALES), o.scale_stride)
            } else {
                (o.tail, TAIL_BYTES, o.tail.add(TAIL_SCALES), TAIL_BYTES)
            };
            let x = o.x.add(step * GROUP);
            if N == 1 {
                // The rows of a tile are shorter than the way to memory, so fetch the next tile: in the order of
                // its addresses, which the hardware's own prefetch follows.
                let ahead = o.w.wrapping_add(R * o.w_stride + step * R * GROUP_BYTES);
                for r in 0..R {
                    L::prefetch(ahead.wrapping_add(r * GROUP_BYTES));
                }
                L::prefetch(o.scale.wrapping_add(R * o.scale_stride + step * R * GROUP_SCALES));
            }
            let mut part = [[L::zero(); N]; R];
            nibbles::<L, R, N, 0>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 1>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 2>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 3>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 4>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 5>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 6>(o, w, w_stride, x, &mut part);
            nibbles::<L, R, N, 7>(o, w, w_stride, x, &mut part);
            for r in 0..R {
                let scale = L::load_scales(scale.add(r * scale_stride));
                for n in 0..N {
                    let sum = o.sums.add((r * N + n) * LANES);
                    L::store(sum, L::fma(part[r][n], scale, L::load(sum)));
                }
            }
        }
        if o.last {
            for r in 0..R {
                for n in 0..N {
                    *o.y.add(n * o.y_stride + r) = L::sum(L::load(o.sums.add((r * N + n) * LANES)));
                }
            }
        }
    }
}

/// Adds the products of nibble I of each word of a group, without the scales.
#[inline(always)]
unsafe fn nibbles<L: Lanes, const R: usize, const N: usize, const I: usize>(
    o: &Operands,
    w: *const u8,
    w_stride: usize,
    x: *const f32,
    part: &mut [[L::V; N]; R],
) {
    let mut values = [L::zero(); R];
    for r in 0..R {
        values[r] = L::load_e2m1::<I>(w.add(r * w_stride));
    }
    for n in 0..N {
        let x = L::load(x.add(n * o.x_stride + I * LANES));
        for r in 0..R {
            part[r][n] = if I == 0 { L::mul(values[r], x) } else { L::fma(values[r], x, part[r][n]) };
        }
    }
}
