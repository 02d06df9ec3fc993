//! Moving rows, adding, the largest value, finiteness.

use super::super::buffer::{GpuTensor, Region};
use super::super::device::Gpu;
use super::super::pipelines::kernel;
use super::super::recorder::Recorder;
use super::{at_most, want};
use crate::error::Result;

/// Values a lane of the finite check looks at.
const CHECKS_A_LANE: usize = 16;

impl Recorder<'_> {
    /// `y += x`
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn add(&mut self, x: &GpuTensor, y: &GpuTensor) -> Result<()> {
        want("add", y.len(), x.len())?;
        let [gx, gy] = self.gpu().fold(x.len().div_ceil(64));
        let bindings = [(1, &x.region), (2, &y.region)];
        self.dispatch(kernel!("add": "add.wgsl"), &[], &[x.len() as u32], &bindings, [gx, gy, 1])
    }

    /// `out[n] = x[ids[n]]`: the rows of the tokens that chose one expert.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn gather_rows(&mut self, x: &GpuTensor, ids: &GpuTensor, out: &GpuTensor) -> Result<()> {
        want("gather_rows: columns", x.cols, out.cols)?;
        want("gather_rows: rows", ids.len(), out.rows)?;
        let spans =
            Spans { from: (x.cols, 0), to: (out.cols, 0), count: ids.len(), cols: x.cols, limit: x.rows };
        self.rows(&x.region, Some(&ids.region), &out.region, spans, false)
    }

    /// `out[ids[n]] = x[n]`: an expert's outputs back to their tokens' slots. The ids must differ.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn scatter_rows(&mut self, x: &GpuTensor, ids: &GpuTensor, out: &GpuTensor) -> Result<()> {
        want("scatter_rows: columns", x.cols, out.cols)?;
        want("scatter_rows: rows", ids.len(), x.rows)?;
        let spans =
            Spans { from: (x.cols, 0), to: (out.cols, 0), count: ids.len(), cols: x.cols, limit: out.rows };
        self.rows(&x.region, Some(&ids.region), &out.region, spans, true)
    }

    /// `count` rows of `cols` values between tensors; `from` and `to` are (stride, offset) in values.
    pub(in super::super) fn move_rows(
        &mut self,
        x: &GpuTensor,
        from: (usize, usize),
        out: &GpuTensor,
        to: (usize, usize),
        count: usize,
        cols: usize,
    ) -> Result<()> {
        let last = |(stride, offset): (usize, usize)| offset + count.saturating_sub(1) * stride + cols;
        at_most("move_rows: input", x.len(), last(from))?;
        at_most("move_rows: output", out.len(), last(to))?;
        self.rows(&x.region, None, &out.region, Spans { from, to, count, cols, limit: count }, false)
    }

    fn rows(
        &mut self,
        x: &Region,
        ids: Option<&Region>,
        out: &Region,
        spans: Spans,
        scatter: bool,
    ) -> Result<()> {
        let Spans { from, to, count, cols, limit } = spans;
        let parameters = [count, cols, from.0, from.1, to.0, to.1, limit].map(|n| n as u32);
        let [gx, gy] = self.gpu().fold((count * cols).div_ceil(64));
        // Without a list the input stands in for it; the kernel does not look.
        let bindings = [(1, x), (2, ids.unwrap_or(x)), (3, out)];
        let constants = [("IDS", u32::from(ids.is_some())), ("SCATTER", u32::from(scatter))];
        self.dispatch(kernel!("rows": "rows.wgsl"), &constants, &parameters, &bindings, [gx, gy, 1])
    }

    /// Per row of `x` the column of the largest value, the lowest of equals, into `out` `[1, rows]` (integers); `u32::MAX`
    /// where a value is not finite.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn argmax(&mut self, x: &GpuTensor, out: &GpuTensor) -> Result<()> {
        want("argmax: output", x.rows, out.len())?;
        let [gx, gy] = self.gpu().fold(x.rows);
        let bindings = [(1, &x.region), (2, &out.region)];
        let parameters = [x.rows as u32, x.cols as u32];
        self.dispatch(kernel!("argmax": "argmax.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// Lowers word `slot` of `flags` to the lowest index of a value of `x` that is not finite. Make `flags` with
    /// [`Gpu::finite_flags`]; a word that stays `u32::MAX` says that all were.
    ///
    /// # Errors
    /// `Run` when there is no such slot.
    pub fn check_finite(&mut self, x: &GpuTensor, flags: &GpuTensor, slot: usize) -> Result<()> {
        at_most("check_finite: slot", flags.len().saturating_sub(1), slot)?;
        let parameters = [x.len() as u32, slot as u32, CHECKS_A_LANE as u32];
        let [gx, gy] = self.gpu().fold(x.len().div_ceil(64 * CHECKS_A_LANE));
        let bindings = [(1, &x.region), (2, &flags.region)];
        self.dispatch(kernel!("check_finite": "check_finite.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }
}

/// Rows to move: (stride, offset) on either side, their number and width, and the rows that ids may name.
struct Spans {
    from: (usize, usize),
    to: (usize, usize),
    count: usize,
    cols: usize,
    limit: usize,
}

impl Gpu {
    /// `n` flags for [`Recorder::check_finite`], all clear.
    ///
    /// # Errors
    /// As for any allocation.
    pub fn finite_flags(&self, n: usize) -> Result<GpuTensor> {
        GpuTensor::from_words(self, 1, n, &vec![u32::MAX; n], "finite flags")
    }

    /// How this device rounds: CPU mirrors of kernels must do as the device does.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn probe_fma(&self) -> Result<FloatRules> {
        let e = f32::EPSILON * 2048.0;
        let operands = [1.0 + e, 1.0 + 2.0 * e, f32::MIN_POSITIVE, 0.5];
        let x = GpuTensor::from_slice(self, 1, 4, &operands, "probe operands")?;
        let out = GpuTensor::new(self, 1, 3, "probe results")?;
        let mut rec = self.record("probe floats");
        let bindings = [(1, &x.region), (2, &out.region)];
        rec.dispatch(kernel!("probe_fma": "probe_fma.wgsl"), &[], &[], &bindings, [1, 1, 1])?;
        let read = rec.read(&out)?;
        rec.submit()?;
        let got = read.words(self)?;
        let is_zero = |i: usize| got.get(i) == Some(&0);
        Ok(FloatRules { fused: !is_zero(0), contracts: !is_zero(1), keeps_subnormals: !is_zero(2) })
    }
}

/// What [`Gpu::probe_fma`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FloatRules {
    /// `fma` rounds once.
    pub fused: bool,
    /// `a*b+c` is computed as `fma`.
    pub contracts: bool,
    /// A product below 2^-126 is not flushed to zero.
    pub keeps_subnormals: bool,
}
