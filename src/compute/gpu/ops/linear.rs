//! Matrix products with weights in their stored form, and rows of such weights.

use super::super::buffer::GpuTensor;
use super::super::matrix::{Format, GpuMatrix};
use super::super::pipelines::{Kernel, kernel};
use super::super::recorder::Recorder;
use super::want;
use crate::error::Result;

/// Up to this many tokens the matrix-vector kernel runs over groups of tokens; above, the tiled kernel.
const SMALL_BATCH: usize = 8;
/// Rows and tokens a matrix-vector group computes, for one token and for several: what a lane holds in registers.
const ALONE: (u32, u32) = (4, 1);
const TOGETHER: (u32, u32) = (2, 4);

macro_rules! per_format {
    ($name:literal, $format:expr, $($rest:literal),+) => {
        match $format {
            Format::F32 => kernel!($name: "weights_f32.wgsl", $($rest),+),
            Format::Bf16 => kernel!($name: "weights_bf16.wgsl", $($rest),+),
            Format::Mxfp4 => kernel!($name: "weights_mxfp4.wgsl", $($rest),+),
        }
    };
}
pub(in super::super) use per_format;

fn matvec_kernel(format: Format, vec4: bool, subgroups: bool) -> &'static Kernel {
    macro_rules! variant {
        ($input:literal, $reduce:literal) => {
            per_format!("matvec", format, "matmul_params.wgsl", $input, "matvec.wgsl", $reduce)
        };
    }
    match (vec4, subgroups) {
        (true, false) => variant!("input_vec4.wgsl", "reduce_tree.wgsl"),
        (false, false) => variant!("input_scalar.wgsl", "reduce_tree.wgsl"),
        (true, true) => variant!("input_vec4.wgsl", "reduce_subgroup.wgsl"),
        (false, true) => variant!("input_scalar.wgsl", "reduce_subgroup.wgsl"),
    }
}

fn matmul_kernel(format: Format, vec4: bool) -> &'static Kernel {
    if vec4 {
        per_format!("matmul", format, "matmul_params.wgsl", "input_vec4.wgsl", "matmul.wgsl")
    } else {
        per_format!("matmul", format, "matmul_params.wgsl", "input_scalar.wgsl", "matmul.wgsl")
    }
}

impl Recorder<'_> {
    /// `out[T, out] = x[T, in] · Wᵀ`.
    ///
    /// One token runs a matrix-vector kernel, a few share its reads of the weight, many run a tiled kernel. Up to 8 tokens
    /// a row's sum has the same order whatever the count; the tiled kernel's order is another.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree, `Device` when a kernel does not build.
    pub fn matmul(&mut self, w: &GpuMatrix, x: &GpuTensor, out: &GpuTensor) -> Result<()> {
        self.product(w, x, out, false)
    }

    /// As [`Recorder::matmul`], added to what `out` holds: a residual.
    ///
    /// # Errors
    /// As [`Recorder::matmul`].
    pub fn matmul_add(&mut self, w: &GpuMatrix, x: &GpuTensor, out: &GpuTensor) -> Result<()> {
        self.product(w, x, out, true)
    }

    fn product(&mut self, w: &GpuMatrix, x: &GpuTensor, out: &GpuTensor, accumulate: bool) -> Result<()> {
        want("matmul: input columns", w.cols, x.cols)?;
        want("matmul: output columns", w.rows, out.cols)?;
        want("matmul: output rows", x.rows, out.rows)?;
        let tokens = x.rows;
        // Whole units of the weight and aligned rows of x: otherwise columns are read one at a time, with a guard.
        let vec4 = w.cols.is_multiple_of(w.format.per_unit());
        for chunk in &w.chunks {
            let parameters = [
                chunk.rows as u32,
                w.cols as u32,
                w.units as u32,
                tokens as u32,
                x.cols as u32,
                0,
                out.cols as u32,
                chunk.first_row as u32,
                u32::from(accumulate),
            ];
            let mut bindings = vec![(1, &chunk.weights), (3, &x.region), (4, &out.region)];
            bindings.extend(chunk.scales.as_ref().map(|s| (2, s)));
            if tokens <= SMALL_BATCH {
                let (rows, per_group) = if tokens == 1 { ALONE } else { TOGETHER };
                let [gx, gy] = self.gpu().fold(chunk.rows.div_ceil(rows as usize));
                let constants = [("ROWS", rows), ("TOKENS", per_group)];
                let groups = [gx, gy, (tokens as u32).div_ceil(per_group)];
                self.dispatch(
                    matvec_kernel(w.format, vec4, self.gpu().uses_subgroups()),
                    &constants,
                    &parameters,
                    &bindings,
                    groups,
                )?;
            } else {
                let [gx, gy] = self.gpu().fold(chunk.rows.div_ceil(64));
                let groups = [gx, gy, tokens.div_ceil(32) as u32];
                self.dispatch(matmul_kernel(w.format, vec4), &[], &parameters, &bindings, groups)?;
            }
        }
        Ok(())
    }

    /// Rows `ids` (a `[1, n]` tensor of integers) of a weight, widened exactly: `out[n, cols]`. A row with an id outside the
    /// weight is left as it was.
    ///
    /// # Errors
    /// As [`Recorder::matmul`].
    pub fn embed(&mut self, w: &GpuMatrix, ids: &GpuTensor, out: &GpuTensor) -> Result<()> {
        want("embed: output columns", w.cols, out.cols)?;
        want("embed: output rows", ids.len(), out.rows)?;
        let kernel = per_format!("embed", w.format, "embed.wgsl");
        for chunk in &w.chunks {
            let parameters =
                [chunk.rows as u32, chunk.first_row as u32, w.units as u32, w.cols as u32, ids.len() as u32];
            let mut bindings = vec![(1, &chunk.weights), (3, &ids.region), (4, &out.region)];
            bindings.extend(chunk.scales.as_ref().map(|s| (2, s)));
            let [gx, gy] = self.gpu().fold((ids.len() * w.units).div_ceil(64));
            self.dispatch(kernel, &[], &parameters, &bindings, [gx, gy, 1])?;
        }
        Ok(())
    }
}
