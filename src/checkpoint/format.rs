//! The stored forms of a weight.

use half::bf16;

/// Columns of a weight that share one MXFP4 scale.
pub const MXFP4_GROUP: usize = 32;

/// The sixteen E2M1 values by code; the high bit is the sign.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// `2^(scale-127)`: the value of an E8M0 scale byte. 0 gives the subnormal 2^-127, 255 is NaN.
#[inline]
pub fn e8m0(scale: u8) -> f32 {
    match scale {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        s => f32::from_bits(u32::from(s) << 23),
    }
}

/// A matrix `[rows, cols]`, row-major, in one of its stored forms. The bytes are borrowed as they lie in
/// the file and need no alignment.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// The values.
    pub data: Data<'a>,
}

/// Stored values of a [`Matrix`], little-endian.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// 4 bytes a value.
    F32(&'a [u8]),
    /// 2 bytes a value.
    Bf16(&'a [u8]),
    /// E2M1 codes, two a byte with the even column in the low nibble, and one E8M0 scale per 32 columns.
    Mxfp4 {
        /// `[rows, cols/2]`
        packed: &'a [u8],
        /// `[rows, cols/32]`
        scale: &'a [u8],
    },
}

impl<'a> Matrix<'a> {
    /// Bytes this matrix occupies in its stored form.
    pub fn bytes(&self) -> usize {
        match self.data {
            Data::F32(b) | Data::Bf16(b) => b.len(),
            Data::Mxfp4 { packed, scale } => packed.len() + scale.len(),
        }
    }

    /// Whether the byte lengths are those of the shape.
    pub fn is_consistent(&self) -> bool {
        let n = self.rows * self.cols;
        match self.data {
            Data::F32(b) => b.len() == 4 * n,
            Data::Bf16(b) => b.len() == 2 * n,
            Data::Mxfp4 { packed, scale } => {
                self.cols.is_multiple_of(MXFP4_GROUP)
                    && packed.len() == n / 2
                    && scale.len() == n / MXFP4_GROUP
            }
        }
    }

    /// Rows `start..start+count` of the same matrix.
    ///
    /// # Panics
    /// If the range is outside the matrix or the matrix is not consistent (checked at open).
    pub fn row_range(&self, start: usize, count: usize) -> Matrix<'a> {
        let cut = |b: &'a [u8], per_row: usize| &b[start * per_row..(start + count) * per_row];
        let data = match self.data {
            Data::F32(b) => Data::F32(cut(b, 4 * self.cols)),
            Data::Bf16(b) => Data::Bf16(cut(b, 2 * self.cols)),
            Data::Mxfp4 { packed, scale } => {
                Data::Mxfp4 { packed: cut(packed, self.cols / 2), scale: cut(scale, self.cols / MXFP4_GROUP) }
            }
        };
        Matrix { rows: count, cols: self.cols, data }
    }

    /// Widens row `r` exactly into `out` (`cols` values).
    ///
    /// # Panics
    /// If `r` is outside the matrix or `out` has another length.
    pub fn widen_row(&self, r: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        match self.row_range(r, 1).data {
            Data::F32(b) => {
                for (o, c) in out.iter_mut().zip(b.chunks_exact(4)) {
                    *o = f32::from_le_bytes([c[0], c[1], c[2], c[3]]);
                }
            }
            Data::Bf16(b) => {
                for (o, c) in out.iter_mut().zip(b.chunks_exact(2)) {
                    *o = bf16::from_le_bytes([c[0], c[1]]).to_f32();
                }
            }
            Data::Mxfp4 { packed, scale } => {
                for (g, s) in scale.iter().enumerate() {
                    let s = e8m0(*s);
                    let at = g * MXFP4_GROUP;
                    for (pair, b) in out[at..at + MXFP4_GROUP].chunks_exact_mut(2).zip(&packed[at / 2..]) {
                        pair[0] = E2M1[usize::from(b & 15)] * s;
                        pair[1] = E2M1[usize::from(b >> 4)] * s;
                    }
                }
            }
        }
    }
}
