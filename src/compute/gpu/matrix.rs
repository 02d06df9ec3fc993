//! Weights on the device, in their stored form.

use super::buffer::{Region, Upload};
use super::device::Gpu;
use crate::checkpoint::format::{Data, MXFP4_GROUP, Matrix};
use crate::error::{Error, Result};

/// The stored form of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 4 bytes a value.
    F32,
    /// 2 bytes a value.
    Bf16,
    /// Half a byte a value and one byte per 32.
    Mxfp4,
}

impl Format {
    /// The form of a host matrix.
    pub fn of(matrix: &Matrix) -> Format {
        match matrix.data {
            Data::F32(_) => Format::F32,
            Data::Bf16(_) => Format::Bf16,
            Data::Mxfp4 { .. } => Format::Mxfp4,
        }
    }

    /// Columns in a 16-byte unit.
    pub(super) fn per_unit(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::Bf16 => 8,
            Format::Mxfp4 => MXFP4_GROUP,
        }
    }
}

/// Rows of a [`GpuMatrix`] that lie in one buffer.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    pub(super) weights: Region,
    /// MXFP4 scales, one byte a block.
    pub(super) scales: Option<Region>,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// A weight `[rows, cols]` on the device, split by rows where it exceeds the binding limit.
///
/// A row is a whole number of 16-byte units: MXFP4 blocks as they lie in the file, bf16 and f32 padded with zeros where the
/// width is not a multiple of 8 or 4 (no width of the release needs that).
#[derive(Debug)]
pub struct GpuMatrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Stored form.
    pub format: Format,
    pub(super) units: usize,
    pub(super) chunks: Vec<Chunk>,
    label: String,
}

impl GpuMatrix {
    /// Room for a `[rows, cols]` weight. Chunks hold a multiple of `row_multiple` rows (1 unless rows belong together, as
    /// those of a head).
    ///
    /// # Errors
    /// `Refused` on a shape the form cannot have, `Machine` when `row_multiple` rows exceed the binding limit; as for any
    /// allocation.
    pub fn new(
        gpu: &Gpu,
        rows: usize,
        cols: usize,
        format: Format,
        row_multiple: usize,
        label: &str,
    ) -> Result<GpuMatrix> {
        let multiple = row_multiple.max(1);
        if rows == 0 || cols == 0 || !rows.is_multiple_of(multiple) {
            return Err(Error::refused("impossible weight shape")
                .tensor(label)
                .cause(format_args!("{rows} x {cols}")));
        }
        if format == Format::Mxfp4 && !cols.is_multiple_of(MXFP4_GROUP) {
            return Err(Error::refused("impossible width for MXFP4")
                .tensor(label)
                .expected(format_args!("a multiple of {MXFP4_GROUP}"), cols));
        }
        let units = cols.div_ceil(format.per_unit());
        let fit = gpu.binding_limit() as usize / (16 * units) / multiple * multiple;
        if fit == 0 {
            return Err(Error::machine("one row block of a weight exceeds the adapter's binding limit")
                .tensor(label)
                .expected(format_args!("at most {}", gpu.binding_limit()), 16 * units * multiple));
        }
        let mut chunks = Vec::new();
        let mut first_row = 0;
        while first_row < rows {
            let count = fit.min(rows - first_row);
            let name = format!("{label} rows {first_row}..{}", first_row + count);
            let scales = match format {
                Format::Mxfp4 => Some(Region::new(gpu, (count * units) as u64, &format!("{name} scales"))?),
                _ => None,
            };
            let weights = Region::new(gpu, (16 * units * count) as u64, &name)?;
            chunks.push(Chunk { weights, scales, first_row, rows: count });
            first_row += count;
        }
        Ok(GpuMatrix { rows, cols, format, units, chunks, label: label.to_owned() })
    }

    /// A host matrix, uploaded.
    ///
    /// # Errors
    /// As [`GpuMatrix::new`] and [`GpuMatrix::fill`].
    pub fn upload(gpu: &Gpu, matrix: &Matrix, row_multiple: usize, label: &str) -> Result<GpuMatrix> {
        let out = GpuMatrix::new(gpu, matrix.rows, matrix.cols, Format::of(matrix), row_multiple, label)?;
        out.fill(gpu, matrix)?;
        Ok(out)
    }

    /// Replaces the content, in staging buffers of bounded size, ahead of what is submitted later.
    ///
    /// # Errors
    /// `Refused` when shape, form or byte lengths differ, `Device` when the device fails.
    pub fn fill(&self, gpu: &Gpu, matrix: &Matrix) -> Result<()> {
        let same = matrix.rows == self.rows && matrix.cols == self.cols && Format::of(matrix) == self.format;
        if !same || !matrix.is_consistent() {
            return Err(Error::refused("weight of another shape or form").tensor(&self.label).expected(
                format_args!("{:?} {} x {}", self.format, self.rows, self.cols),
                format_args!(
                    "{:?} {} x {}, {} bytes",
                    Format::of(matrix),
                    matrix.rows,
                    matrix.cols,
                    matrix.bytes()
                ),
            ));
        }
        for chunk in &self.chunks {
            match (matrix.row_range(chunk.first_row, chunk.rows).data, &chunk.scales) {
                (Data::Mxfp4 { packed, scale }, Some(scales)) => {
                    gpu.write_rows(&chunk.weights, packed, 16 * self.units, 16 * self.units)?;
                    gpu.write_rows(scales, scale, scale.len(), scale.len())?;
                }
                (Data::F32(b), _) => gpu.write_rows(&chunk.weights, b, 4 * self.cols, 16 * self.units)?,
                (Data::Bf16(b), _) => gpu.write_rows(&chunk.weights, b, 2 * self.cols, 16 * self.units)?,
                (Data::Mxfp4 { .. }, None) => {
                    return Err(Error::run("no room for scales").tensor(&self.label));
                }
            }
        }
        Ok(())
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|c| c.weights.bytes + c.scales.as_ref().map_or(0, |s| s.bytes)).sum()
    }

    /// Buffers the rows are split over.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }
}

impl Gpu {
    /// Writes rows of `from` bytes as rows of `to` bytes, the difference zeros.
    fn write_rows(&self, region: &Region, bytes: &[u8], from: usize, to: usize) -> Result<()> {
        let mut upload = Upload::new(self, region);
        if from == to {
            upload.push(bytes)?;
        } else {
            let pad = vec![0; to - from];
            for row in bytes.chunks_exact(from) {
                upload.push(row)?;
                upload.push(&pad)?;
            }
        }
        upload.finish()
    }
}
