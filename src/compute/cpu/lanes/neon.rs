//! The lanes as four NEON registers.

use std::arch::aarch64::*;

use super::{Lanes, Tile};
use crate::checkpoint::format::e8m0;

/// 64-bit Arm. A value is four quarters of four lanes.
pub(in super::super) struct Neon;

macro_rules! quarters {
    ($i:ident => $value:expr) => {{
        let quarter = |$i: usize| $value;
        [quarter(0), quarter(1), quarter(2), quarter(3)]
    }};
}

impl Lanes for Neon {
    type V = [float32x4_t; 4];

    const TILE: Tile = Tile::Small;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        Self::splat(0.0)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [vdupq_n_f32(x); 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // Through bytes, since `p` need not be aligned.
        quarters!(i => vreinterpretq_f32_u8(vld1q_u8(p.add(4 * i).cast())))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        for (i, q) in v.into_iter().enumerate() {
            vst1q_u8(p.add(4 * i).cast(), vreinterpretq_u8_f32(q));
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::V {
        quarters!(i => vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p.add(8 * i))))))
    }
    #[inline(always)]
    unsafe fn load_e2m1<const I: usize>(p: *const u8) -> Self::V {
        // A code of exponent e and mantissa m is 0.m/2, then 2^(e-1)·1.m: read as the top bits of an f32 it is
        // that value times 2^-126, the subnormal included.
        quarters!(i => {
            let words = vreinterpretq_u32_u8(vld1q_u8(p.add(16 * i)));
            let code = vshlq_u32(words, vdupq_n_s32(-4 * I as i32));
            let magnitude = vshlq_n_u32::<22>(vandq_u32(code, vdupq_n_u32(7)));
            let sign = vandq_u32(vshlq_n_u32::<28>(code), vdupq_n_u32(1 << 31));
            let value = vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(0x7e80_0000)));
            vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), sign))
        })
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8) -> Self::V {
        quarters!(i => vdupq_n_f32(e8m0(*p.add(i))))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        quarters!(i => vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        quarters!(i => vsubq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        quarters!(i => vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        quarters!(i => vdivq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        quarters!(i => vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn clamp(x: Self::V, lo: f32, hi: f32) -> Self::V {
        // Both give NaN where either operand is NaN.
        quarters!(i => vminq_f32(vdupq_n_f32(hi), vmaxq_f32(vdupq_n_f32(lo), x[i])))
    }
    #[inline(always)]
    unsafe fn round(x: Self::V) -> Self::V {
        quarters!(i => vrndnq_f32(x[i]))
    }
    #[inline(always)]
    unsafe fn exp2_int(n: Self::V) -> Self::V {
        quarters!(i => vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(n[i]), vdupq_n_s32(127)))))
    }
    #[inline(always)]
    unsafe fn abs(x: Self::V) -> Self::V {
        quarters!(i => vabsq_f32(x[i]))
    }
    #[inline(always)]
    unsafe fn copysign(x: Self::V, s: Self::V) -> Self::V {
        quarters!(i => {
            let sign = vandq_u32(vreinterpretq_u32_f32(s[i]), vdupq_n_u32(1 << 31));
            vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(vabsq_f32(x[i])), sign))
        })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
        let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
        vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
