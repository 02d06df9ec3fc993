//! The lanes as one AVX-512 register.

use std::arch::x86_64::*;

use super::{Lanes, Tile};
use crate::checkpoint::format::E2M1;

/// AVX-512 F, BW, VL and DQ.
pub(in super::super) struct Avx512;

impl Lanes for Avx512 {
    type V = __m512;

    const TILE: Tile = Tile::Large;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        _mm512_setzero_ps()
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        _mm512_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::V {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn load_e2m1<const I: usize>(p: *const u8) -> Self::V {
        // The permute reads the low four bits of each lane. Loading from byte I / 2 on brings the pair of
        // nibbles there without a shift, on the load ports instead of the multipliers'.
        let table = _mm512_loadu_ps(E2M1.as_ptr());
        let words = _mm512_loadu_si512(p.add(I / 2).cast());
        let codes = if I.is_multiple_of(2) { words } else { _mm512_srli_epi32::<4>(words) };
        _mm512_permutexvar_ps(codes, table)
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8) -> Self::V {
        // Rotates byte l / 4 to the exponent; byte 0 is the subnormal 2^-127.
        let bytes = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
        let turns = _mm512_setr_epi32(23, 23, 23, 23, 15, 15, 15, 15, 7, 7, 7, 7, 31, 31, 31, 31);
        let bits = _mm512_and_si512(_mm512_rolv_epi32(bytes, turns), _mm512_set1_epi32(0x7f80_0000));
        _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x0040_0000)))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn clamp(x: Self::V, lo: f32, hi: f32) -> Self::V {
        // Both return their second operand where either is NaN.
        _mm512_min_ps(_mm512_set1_ps(hi), _mm512_max_ps(_mm512_set1_ps(lo), x))
    }
    #[inline(always)]
    unsafe fn round(x: Self::V) -> Self::V {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
    }
    #[inline(always)]
    unsafe fn exp2_int(n: Self::V) -> Self::V {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn abs(x: Self::V) -> Self::V {
        _mm512_abs_ps(x)
    }
    #[inline(always)]
    unsafe fn copysign(x: Self::V, s: Self::V) -> Self::V {
        _mm512_or_ps(_mm512_abs_ps(x), _mm512_and_ps(s, _mm512_set1_ps(-0.0)))
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        super::avx2::sum_8(v)
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V {
        _mm512_maskz_loadu_ps(((1u32 << n) - 1) as __mmask16, p)
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize) {
        _mm512_mask_storeu_ps(p, ((1u32 << n) - 1) as __mmask16, v);
    }
}
