//! The lanes in plain Rust.

use super::{LANES, Lanes, Tile};
use crate::checkpoint::format::{E2M1, e8m0};

/// Plain Rust, left to the compiler to vectorise. A multiply-add rounds twice.
pub(in super::super) struct Portable;

macro_rules! each {
    ($i:ident => $value:expr) => {{
        let mut out = [0.0f32; LANES];
        for ($i, o) in out.iter_mut().enumerate() {
            *o = $value;
        }
        out
    }};
}

impl Lanes for Portable {
    type V = [f32; LANES];

    const TILE: Tile = Tile::Small;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        p.cast::<[f32; LANES]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        p.cast::<[f32; LANES]>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::V {
        let b = p.cast::<[[u8; 2]; LANES]>().read_unaligned();
        each!(i => f32::from_bits(u32::from(u16::from_le_bytes(b[i])) << 16))
    }
    #[inline(always)]
    unsafe fn load_e2m1<const I: usize>(p: *const u8) -> Self::V {
        let words = p.cast::<[[u8; 4]; LANES]>().read_unaligned();
        each!(i => E2M1[(words[i][I / 2] >> (4 * (I % 2)) & 15) as usize])
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8) -> Self::V {
        let scale = p.cast::<[u8; 4]>().read_unaligned().map(e8m0);
        each!(i => scale[i / 4])
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        each!(i => a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each!(i => a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn clamp(x: Self::V, lo: f32, hi: f32) -> Self::V {
        each!(i => x[i].clamp(lo, hi))
    }
    #[inline(always)]
    unsafe fn round(x: Self::V) -> Self::V {
        // Adding 1.5·2^23 leaves no fraction bits, so the addition itself rounds (|x| < 2^22 here and always
        // in `math`); `round_ties_even` would be a library call on a target without SSE4.1.
        const SHIFT: f32 = 12_582_912.0;
        each!(i => (x[i] + SHIFT) - SHIFT)
    }
    #[inline(always)]
    unsafe fn exp2_int(n: Self::V) -> Self::V {
        // The cast saturates (NaN gives 0) and callers keep n in range, so the shift cannot overflow.
        each!(i => f32::from_bits(((n[i] as i32).wrapping_add(127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn abs(x: Self::V) -> Self::V {
        each!(i => x[i].abs())
    }
    #[inline(always)]
    unsafe fn copysign(x: Self::V, s: Self::V) -> Self::V {
        each!(i => x[i].copysign(s[i]))
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let mut v = v;
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                v[i] += v[i + half];
            }
            half /= 2;
        }
        v[0]
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
