//! Kimi Delta Attention: short convolution, gates, the recurrence.

use super::super::buffer::GpuTensor;
use super::super::pipelines::kernel;
use super::super::recorder::Recorder;
use super::{at_most, want};
use crate::error::Result;

/// Key channels of a head the recurrence takes (`MAX_DK` of its shader).
const MAX_DK: usize = 256;

/// Inputs of the KDA gates.
#[derive(Debug)]
pub struct KdaGate<'a> {
    /// `[T, N·D]`, before the bias.
    pub z: &'a GpuTensor,
    /// At least N values; those past N are padding and are not read.
    pub a_log: &'a GpuTensor,
    /// N·D values.
    pub dt_bias: &'a GpuTensor,
    /// `[T, N]`, before the sigmoid.
    pub beta_logit: &'a GpuTensor,
    /// `gate_lower_bound` of the config.
    pub lower_bound: f32,
}

/// How a step's decay is given, `[T, N·Dk]`.
#[derive(Debug)]
pub enum Decay<'a> {
    /// Logarithms of the factors, as [`Recorder::kda_gate`] makes them.
    Log(&'a GpuTensor),
    /// The factors.
    Factor(&'a GpuTensor),
}

/// Inputs of the KDA recurrence. Head-major: channel = head·D + d.
#[derive(Debug)]
pub struct KdaStep<'a> {
    /// N
    pub heads: usize,
    /// `[T, N·Dk]`, normalised and scaled.
    pub q: &'a GpuTensor,
    /// `[T, N·Dk]`, normalised.
    pub k: &'a GpuTensor,
    /// `[T, N·Dv]`
    pub v: &'a GpuTensor,
    /// Decay of the key channels.
    pub decay: Decay<'a>,
    /// `[T, N]`
    pub beta: &'a GpuTensor,
    /// State before the pass, `[N, Dk·Dv]`.
    pub s_in: &'a GpuTensor,
}

impl Recorder<'_> {
    /// Causal depthwise convolution of `u` `[T, P]` with `w` `[P, taps]`, then SiLU, into `y` `[T, P]`. `history` holds the
    /// `taps-1` inputs before the pass, oldest first; `next` (another buffer) receives those after it.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn short_conv(
        &mut self,
        u: &GpuTensor,
        history: &GpuTensor,
        w: &GpuTensor,
        y: &GpuTensor,
        next: &GpuTensor,
    ) -> Result<()> {
        let (channels, taps) = (w.rows, w.cols);
        want("short_conv: no taps", false, taps == 0)?;
        want("short_conv: input columns", channels, u.cols)?;
        want("short_conv: output", u.len(), y.len())?;
        want("short_conv: history", (taps - 1) * channels, history.len())?;
        want("short_conv: next history", (taps - 1) * channels, next.len())?;
        let parameters = [u.rows as u32, channels as u32, taps as u32];
        let [gx, gy] = self.gpu().fold(((u.rows + taps - 1) * channels).div_ceil(64));
        let bindings =
            [(1, &u.region), (2, &history.region), (3, &w.region), (4, &y.region), (5, &next.region)];
        self.dispatch(kernel!("short_conv": "short_conv.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// `g = lower_bound * σ(exp(a_log[h]) * (z + dt_bias))` `[T, N·D]` and `beta = σ(beta_logit)` `[T, N]`.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn kda_gate(&mut self, gate: &KdaGate, g: &GpuTensor, beta: &GpuTensor) -> Result<()> {
        let (tokens, heads) = (gate.z.rows, gate.beta_logit.cols);
        let dim = gate.z.cols / heads.max(1);
        want("kda_gate: z columns", heads * dim, gate.z.cols)?;
        want("kda_gate: beta rows", tokens, gate.beta_logit.rows)?;
        want("kda_gate: dt_bias", heads * dim, gate.dt_bias.len())?;
        at_most("kda_gate: heads", gate.a_log.len(), heads)?;
        want("kda_gate: g", gate.z.len(), g.len())?;
        want("kda_gate: beta", gate.beta_logit.len(), beta.len())?;
        let parameters = [tokens as u32, heads as u32, dim as u32, gate.lower_bound.to_bits()];
        let [gx, gy] = self.gpu().fold(gate.z.len().div_ceil(64));
        let bindings = [
            (1, &gate.z.region),
            (2, &gate.a_log.region),
            (3, &gate.dt_bias.region),
            (4, &gate.beta_logit.region),
            (5, &g.region),
            (6, &beta.region),
        ];
        self.dispatch(kernel!("kda_gate": "kda_gate.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// The recurrence over the T tokens of the pass: the state goes from `step.s_in` to `s_out` (another buffer), the
    /// outputs to `o` `[T, N·Dv]`.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree or more than 256 key channels.
    pub fn kda_step(&mut self, step: &KdaStep, s_out: &GpuTensor, o: &GpuTensor) -> Result<()> {
        let KdaStep { heads, q, k, v, beta, s_in, .. } = *step;
        let (dk, dv) = (q.cols / heads.max(1), v.cols / heads.max(1));
        let (g, given) = match step.decay {
            Decay::Log(g) => (g, 0),
            Decay::Factor(f) => (f, 1),
        };
        want("kda_step: q columns", heads * dk, q.cols)?;
        want("kda_step: v columns", heads * dv, v.cols)?;
        at_most("kda_step: key channels", MAX_DK, dk)?;
        want("kda_step: k", q.len(), k.len())?;
        want("kda_step: decay", q.len(), g.len())?;
        want("kda_step: v rows", q.rows, v.rows)?;
        want("kda_step: beta", q.rows * heads, beta.len())?;
        want("kda_step: state", heads * dk * dv, s_in.len())?;
        want("kda_step: next state", heads * dk * dv, s_out.len())?;
        want("kda_step: output", v.len(), o.len())?;
        let parameters = [q.rows as u32, heads as u32, dk as u32, dv as u32];
        let bindings = [
            (1, &q.region),
            (2, &k.region),
            (3, &v.region),
            (4, &g.region),
            (5, &beta.region),
            (6, &s_in.region),
            (7, &s_out.region),
            (8, &o.region),
        ];
        let groups = [dv.div_ceil(64) as u32, heads as u32, 1];
        self.dispatch(
            kernel!("kda_step": "kda_step.wgsl"),
            &[("DECAY_GIVEN", given)],
            &parameters,
            &bindings,
            groups,
        )
    }
}
