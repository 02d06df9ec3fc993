//! Sixteen `f32` lanes as one value: what a kernel is written over.

// Every method has the same contract, stated once on the trait; a block per intrinsic would say nothing more.
#![allow(unsafe_op_in_unsafe_fn)]

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
mod portable;

pub(super) use portable::Portable;

/// Lanes of a value.
pub(super) const LANES: usize = 16;
/// Columns of an MXFP4 group: four blocks, one 32-bit word of eight codes a lane.
pub(super) const GROUP: usize = 8 * LANES;
/// Bytes of the codes of a group.
pub(super) const GROUP_BYTES: usize = GROUP / 2;

/// A kernel body, compiled once for each instruction set by [`super::simd::Isa::run`].
pub(super) trait Kernel {
    /// What it returns.
    type Output;
    /// Runs it. Implementations are `#[inline(always)]`, and so is all they call, except through
    /// `Isa::run`: only then are they compiled with the features of the set.
    ///
    /// # Safety
    /// The machine has the instruction set of `L`.
    unsafe fn run<L: Lanes>(self) -> Self::Output;
}

/// Sixteen `f32` lanes and what the kernels do with them.
///
/// # Safety
/// Of every method: the machine has the instruction set, and pointers are valid for the stated number of
/// values or bytes. No pointer needs any alignment.
pub(super) trait Lanes {
    /// Sixteen lanes.
    type V: Copy;

    /// Rows and tokens of the register tile of a matrix product, chosen so that the sums stay in registers.
    const TILE: Tile;

    unsafe fn zero() -> Self::V;
    unsafe fn splat(x: f32) -> Self::V;
    /// Loads 16 values.
    unsafe fn load(p: *const f32) -> Self::V;
    /// Stores 16 values.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Widens 16 bf16 values (32 bytes) exactly.
    unsafe fn load_bf16(p: *const u8) -> Self::V;
    /// The E2M1 values of nibble I (0..8) of the sixteen 32-bit words of an MXFP4 group, times a power of two of
    /// the set's own: lane `l` holds column `8l + I`. Reads up to `GROUP_BYTES + 3` bytes.
    unsafe fn load_e2m1<const I: usize>(p: *const u8) -> Self::V;
    /// The four scales of an MXFP4 group from their bytes, which are not 255, over the same power of two: lane
    /// `l` holds scale `l / 4`. All these factors are exact, the subnormal ones too.
    unsafe fn load_scales(p: *const u8) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a·b + c`, with one rounding on the sets that can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `x` held within `lo..=hi`; a NaN in `x` stays NaN.
    unsafe fn clamp(x: Self::V, lo: f32, hi: f32) -> Self::V;
    /// The nearest whole number, ties to even.
    unsafe fn round(x: Self::V) -> Self::V;
    /// `2^n` for whole `n` in `-126..=127`; any value for NaN.
    unsafe fn exp2_int(n: Self::V) -> Self::V;
    unsafe fn abs(x: Self::V) -> Self::V;
    /// The magnitude of `x` with the sign of `s`.
    unsafe fn copysign(x: Self::V, s: Self::V) -> Self::V;
    /// The sum of the lanes by halves: `i + (i+8)`, then `i + (i+4)`, `i + (i+2)`, `i + (i+1)`.
    unsafe fn sum(v: Self::V) -> f32;
    /// Hints that the cache line at `p` will be read soon. `p` may be any address.
    unsafe fn prefetch(p: *const u8);

    /// Loads `n <= 16` values; the other lanes are 0.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V {
        if n == LANES {
            return Self::load(p);
        }
        let mut part = [0.0f32; LANES];
        std::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), n);
        Self::load(part.as_ptr())
    }
    /// Stores the first `n <= 16` values.
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize) {
        if n == LANES {
            return Self::store(p, v);
        }
        let mut part = [0.0f32; LANES];
        Self::store(part.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(part.as_ptr(), p, n);
    }
}

/// How a matrix product is tiled over registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tile {
    /// 32 registers of 16 lanes.
    Large,
    /// 16 registers of 8 lanes, or 32 of 4.
    Small,
}
