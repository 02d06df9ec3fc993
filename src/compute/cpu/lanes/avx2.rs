//! The lanes as two AVX2 registers.

use std::arch::x86_64::*;

use super::{Lanes, Tile};

/// AVX2 with FMA. A value is lanes 0..8 and lanes 8..16.
pub(in super::super) struct Avx2;

/// Lanes `i + (i+4)`, then `i + (i+2)`, then `i + (i+1)`.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn sum_8(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Twice the E2M1 values of nibble I of eight words.
#[inline(always)]
unsafe fn e2m1_8<const I: usize>(words: __m256i) -> __m256 {
    // Doubled, the values are small whole numbers: one byte shuffle looks up all low or all high nibbles (shared
    // by four calls), and what is left is to bring a byte down with its sign and convert it.
    let table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    let nibbles = if I.is_multiple_of(2) { words } else { _mm256_srli_epi16::<4>(words) };
    let doubled = _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
    let top = match I / 2 {
        0 => _mm256_slli_epi32::<24>(doubled),
        1 => _mm256_slli_epi32::<16>(doubled),
        2 => _mm256_slli_epi32::<8>(doubled),
        _ => doubled,
    };
    _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
}

/// Half of two scales of four lanes each, from the bytes at bits `from` and `from + 8`.
#[inline(always)]
unsafe fn scales_8(bytes: i32, from: i32) -> __m256 {
    let at = _mm256_setr_epi32(from, from, from, from, from + 8, from + 8, from + 8, from + 8);
    let bits = _mm256_slli_epi32::<23>(_mm256_srlv_epi32(_mm256_set1_epi32(bytes), at));
    let bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f80_0000));
    // Byte 0 is the subnormal 2^-127.
    let scale = _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x0040_0000)));
    _mm256_mul_ps(scale, _mm256_set1_ps(0.5))
}

impl Lanes for Avx2 {
    type V = (__m256, __m256);

    const TILE: Tile = Tile::Small;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        (_mm256_setzero_ps(), _mm256_setzero_ps())
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        (_mm256_set1_ps(x), _mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        _mm256_storeu_ps(p, v.0);
        _mm256_storeu_ps(p.add(8), v.1);
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::V {
        let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
        (
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
        )
    }
    #[inline(always)]
    unsafe fn load_e2m1<const I: usize>(p: *const u8) -> Self::V {
        (e2m1_8::<I>(_mm256_loadu_si256(p.cast())), e2m1_8::<I>(_mm256_loadu_si256(p.add(32).cast())))
    }
    #[inline(always)]
    unsafe fn load_scales(p: *const u8) -> Self::V {
        let bytes = p.cast::<i32>().read_unaligned();
        (scales_8(bytes, 0), scales_8(bytes, 16))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1))
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
    }
    #[inline(always)]
    unsafe fn clamp(x: Self::V, lo: f32, hi: f32) -> Self::V {
        // Both return their second operand where either is NaN.
        let (lo, hi) = (_mm256_set1_ps(lo), _mm256_set1_ps(hi));
        (_mm256_min_ps(hi, _mm256_max_ps(lo, x.0)), _mm256_min_ps(hi, _mm256_max_ps(lo, x.1)))
    }
    #[inline(always)]
    unsafe fn round(x: Self::V) -> Self::V {
        (
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x.0),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x.1),
        )
    }
    #[inline(always)]
    unsafe fn exp2_int(n: Self::V) -> Self::V {
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias);
        let high = _mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias);
        (
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
        )
    }
    #[inline(always)]
    unsafe fn abs(x: Self::V) -> Self::V {
        let sign = _mm256_set1_ps(-0.0);
        (_mm256_andnot_ps(sign, x.0), _mm256_andnot_ps(sign, x.1))
    }
    #[inline(always)]
    unsafe fn copysign(x: Self::V, s: Self::V) -> Self::V {
        let sign = _mm256_set1_ps(-0.0);
        (
            _mm256_or_ps(_mm256_andnot_ps(sign, x.0), _mm256_and_ps(sign, s.0)),
            _mm256_or_ps(_mm256_andnot_ps(sign, x.1), _mm256_and_ps(sign, s.1)),
        )
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        sum_8(_mm256_add_ps(v.0, v.1))
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}
