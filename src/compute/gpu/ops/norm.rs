//! Norms and the residual mix.

use super::super::buffer::{GpuSlots, GpuTensor};
use super::super::pipelines::kernel;
use super::super::recorder::Recorder;
use super::{at_most, want};
use crate::error::Result;

/// Sources the residual mix takes (`MAX_SOURCES` of its shader).
const MAX_SOURCES: usize = 32;

impl Recorder<'_> {
    /// `out = x / sqrt(mean(x²) + eps) * w`, row by row: `x`, `out` `[T, n]`, `w` `[1, n]`.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn rmsnorm(&mut self, x: &GpuTensor, w: &GpuTensor, eps: f32, out: &GpuTensor) -> Result<()> {
        want("rmsnorm: input columns", out.cols, x.cols)?;
        self.rmsnorm_into(x, w, eps, out, 0)
    }

    /// The norm of the first `w.len()` columns of `x`, written to rows `at..` of `out`: the latent of an MLA layer goes
    /// straight into its cache.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn rmsnorm_into(
        &mut self,
        x: &GpuTensor,
        w: &GpuTensor,
        eps: f32,
        out: &GpuTensor,
        at: usize,
    ) -> Result<()> {
        want("rmsnorm: weight", out.cols, w.len())?;
        at_most("rmsnorm: weight", x.cols, w.len())?;
        at_most("rmsnorm: last row", out.rows, at + x.rows)?;
        let parameters = [
            x.rows as u32,
            w.len() as u32,
            x.cols as u32,
            0,
            out.cols as u32,
            (at * out.cols) as u32,
            eps.to_bits(),
        ];
        let [gx, gy] = self.gpu().fold(x.rows);
        let bindings = [(1, &x.region), (2, &w.region), (3, &out.region)];
        self.dispatch(kernel!("rmsnorm": "rmsnorm.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// `out = x / sqrt(Σx² + eps) * scale`, row by row.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn l2norm(&mut self, x: &GpuTensor, eps: f32, scale: f32, out: &GpuTensor) -> Result<()> {
        want("l2norm: output", x.len(), out.len())?;
        let parameters = [x.rows as u32, x.cols as u32, eps.to_bits(), scale.to_bits()];
        let [gx, gy] = self.gpu().fold(x.rows);
        let bindings = [(1, &x.region), (2, &out.region)];
        self.dispatch(kernel!("l2norm": "l2norm.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// `out = rmsnorm(o; w, eps) * σ(gate)` per head: `o`, `gate`, `out` hold T·N heads of `w.len()` channels.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn head_norm_gate(
        &mut self,
        o: &GpuTensor,
        w: &GpuTensor,
        gate: &GpuTensor,
        eps: f32,
        out: &GpuTensor,
    ) -> Result<()> {
        let dim = w.len();
        want("head_norm_gate: channels past the last head", 0, o.len() % dim.max(1))?;
        want("head_norm_gate: gate", o.len(), gate.len())?;
        want("head_norm_gate: output", o.len(), out.len())?;
        let rows = o.len() / dim.max(1);
        let [gx, gy] = self.gpu().fold(rows);
        let bindings = [(1, &o.region), (2, &w.region), (3, &gate.region), (4, &out.region)];
        let kernel = kernel!("head_norm_gate": "head_norm_gate.wgsl");
        self.dispatch(kernel, &[], &[rows as u32, dim as u32, eps.to_bits()], &bindings, [gx, gy, 1])
    }

    /// The residual mix over the first `count` slots (each `[T, H]`, the running sum last): `out` `[T, H]`, the shares
    /// in `probs` `[T, count]`. `w` `[1, H]` is the norm's weight times the projection's.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree or more than 32 sources.
    pub fn residual_mix(
        &mut self,
        sources: &GpuSlots,
        count: usize,
        w: &GpuTensor,
        eps: f32,
        out: &GpuTensor,
        probs: &GpuTensor,
    ) -> Result<()> {
        at_most("residual_mix: sources", MAX_SOURCES.min(sources.count), count)?;
        want("residual_mix: no sources", false, count == 0)?;
        want("residual_mix: weight", sources.cols, w.len())?;
        want("residual_mix: output rows", sources.rows, out.rows)?;
        want("residual_mix: output columns", sources.cols, out.cols)?;
        want("residual_mix: shares", sources.rows * count, probs.len())?;
        let parameters =
            [sources.rows as u32, sources.cols as u32, count as u32, sources.stride as u32, eps.to_bits()];
        let [gx, gy] = self.gpu().fold(sources.rows);
        let bindings = [(1, &sources.region), (2, &w.region), (3, &out.region), (4, &probs.region)];
        let kernel = kernel!("residual_mix": "residual_mix.wgsl");
        self.dispatch(kernel, &[], &parameters, &bindings, [gx, gy, 1])
    }
}
