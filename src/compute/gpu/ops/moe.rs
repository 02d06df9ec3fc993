//! Mixture of experts: routing, SiTU-GLU, combining.

use super::super::buffer::GpuTensor;
use super::super::pipelines::kernel;
use super::super::recorder::Recorder;
use super::{at_most, want};
use crate::error::{Error, Kind, Result};

/// Bounds of the router kernel's shared memory.
const MAX_EXPERTS: usize = 1024;
const MAX_CHOSEN: usize = 64;

/// How tokens are routed.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// K, experts a token.
    pub chosen: usize,
    /// Whether the weights are divided by their sum (`moe_renormalize`).
    pub renormalize: bool,
    /// Added to that sum.
    pub norm_eps: f32,
    /// `routed_scaling_factor`
    pub scale: f32,
}

/// What the router decided, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// `[T][K]`, in order of choice.
    pub experts: Vec<Vec<u32>>,
    /// `[T][K]`
    pub weights: Vec<Vec<f32>>,
}

impl Routing {
    /// From the words of a router output `[T, 2K]`.
    ///
    /// # Errors
    /// `NonFinite` for a token whose scores were not finite, `Run` when the words are not rows of `2*chosen`.
    pub fn from_words(words: &[u32], chosen: usize) -> Result<Routing> {
        want("routing words past the last token", 0, words.len() % (2 * chosen.max(1)))?;
        let mut routing = Routing { experts: Vec::new(), weights: Vec::new() };
        for (t, row) in words.chunks_exact(2 * chosen.max(1)).enumerate() {
            let (ids, weights) = row.split_at(chosen);
            if ids.contains(&u32::MAX) {
                return Err(Error::new(Kind::NonFinite, "a router score is not finite").position(t));
            }
            routing.experts.push(ids.to_vec());
            routing.weights.push(weights.iter().map(|w| f32::from_bits(*w)).collect());
        }
        Ok(routing)
    }

    /// As the words of a router output, to route on the device what was decided on the host.
    pub fn to_words(&self) -> Vec<u32> {
        let rows = self.experts.iter().zip(&self.weights);
        rows.flat_map(|(ids, weights)| ids.iter().copied().chain(weights.iter().map(|w| w.to_bits())))
            .collect()
    }
}

impl Recorder<'_> {
    /// Routes tokens from `logits` `[T, E]` and `bias` (E values): `out` `[T, 2K]` holds K ids and K weights a token; read it
    /// back through [`Routing::from_words`].
    ///
    /// # Errors
    /// `Run` on shapes that do not agree, more than 1024 experts or 64 chosen.
    pub fn router(
        &mut self,
        logits: &GpuTensor,
        bias: &GpuTensor,
        route: &Route,
        out: &GpuTensor,
    ) -> Result<()> {
        let experts = logits.cols;
        at_most("router: experts", MAX_EXPERTS, experts)?;
        at_most("router: chosen", MAX_CHOSEN.min(experts), route.chosen)?;
        want("router: bias", experts, bias.len())?;
        want("router: output", logits.rows * 2 * route.chosen, out.len())?;
        let parameters = [
            logits.rows as u32,
            experts as u32,
            route.chosen as u32,
            u32::from(route.renormalize),
            route.norm_eps.to_bits(),
            route.scale.to_bits(),
        ];
        let [gx, gy] = self.gpu().fold(logits.rows);
        let bindings = [(1, &logits.region), (2, &bias.region), (3, &out.region)];
        self.dispatch(kernel!("router": "router.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// `out = beta·tanh(gate/beta) · σ(gate) · linear_beta·tanh(up/linear_beta)`, value by value.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn situ_glu(
        &mut self,
        gate: &GpuTensor,
        up: &GpuTensor,
        beta: f32,
        linear_beta: f32,
        out: &GpuTensor,
    ) -> Result<()> {
        want("situ_glu: up", gate.len(), up.len())?;
        want("situ_glu: output", gate.len(), out.len())?;
        let parameters = [gate.len() as u32, beta.to_bits(), linear_beta.to_bits()];
        let [gx, gy] = self.gpu().fold(gate.len().div_ceil(64));
        let bindings = [(1, &gate.region), (2, &up.region), (3, &out.region)];
        self.dispatch(kernel!("situ_glu": "situ_glu.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    /// `out[t] = Σ_j weight[t,j] · parts[t·K+j]`, j ascending: `parts` `[T·K, L]`, `routing` a router output `[T, 2K]`.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree.
    pub fn combine(&mut self, parts: &GpuTensor, routing: &GpuTensor, out: &GpuTensor) -> Result<()> {
        let chosen = routing.cols / 2;
        want("combine: routing rows", out.rows, routing.rows)?;
        want("combine: parts rows", out.rows * chosen, parts.rows)?;
        want("combine: parts columns", out.cols, parts.cols)?;
        let parameters = [out.rows as u32, out.cols as u32, chosen as u32];
        let [gx, gy] = self.gpu().fold(out.len().div_ceil(64));
        let bindings = [(1, &parts.region), (2, &routing.region), (3, &out.region)];
        self.dispatch(kernel!("combine": "combine.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }
}
