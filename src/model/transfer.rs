//! Weights and state from host memory to a device.

use super::layer::{DeviceLayer, DeviceState};
use super::state::{KdaState, LayerState, mla_shape};
use super::weights::{AttentionWeights, Expert, FfnWeights, Gate, Head, Kda, Layer, Mla, Mlp, Moe, Query};
use crate::checkpoint::config::{Attention, Config};
use crate::compute::backend::{Backend, Section};
use crate::compute::device::{Tensor, Weight};
use crate::error::Result;

/// Moves the parts of a layer, named after it.
struct Transfer<'a, B> {
    device: &'a mut B,
    label: String,
}

impl<B: Backend> Transfer<'_, B> {
    fn weight(&mut self, w: &Weight, name: &str) -> Result<B::Weight> {
        self.device.weight(w, 1, &format!("{} / {name}", self.label))
    }
    fn tensor(&mut self, t: &Tensor) -> Result<B::Tensor> {
        let mut out = B::Tensor::default();
        self.device.upload(t, &mut out)?;
        Ok(out)
    }
    fn mlp(&mut self, m: &Mlp, name: &str) -> Result<Mlp<B::Weight>> {
        Ok(Mlp {
            gate: self.weight(&m.gate, &format!("{name} gate"))?,
            up: self.weight(&m.up, &format!("{name} up"))?,
            down: self.weight(&m.down, &format!("{name} down"))?,
        })
    }
    fn kda(&mut self, k: &Kda) -> Result<Kda<B::Weight, B::Tensor>> {
        let [q, kk, v] = &k.qkv;
        let [cq, ck, cv] = &k.conv;
        Ok(Kda {
            qkv: [self.weight(q, "q")?, self.weight(kk, "k")?, self.weight(v, "v")?],
            conv: [self.device.taps(cq)?, self.device.taps(ck)?, self.device.taps(cv)?],
            f_a: self.weight(&k.f_a, "f_a")?,
            f_b: self.weight(&k.f_b, "f_b")?,
            b: self.weight(&k.b, "b")?,
            a_log: self.tensor(&k.a_log)?,
            dt_bias: self.tensor(&k.dt_bias)?,
            o_norm: self.tensor(&k.o_norm)?,
            gate: match &k.gate {
                Gate::Full(g) => Gate::Full(self.weight(g, "gate")?),
                Gate::LowRank(a, b) => Gate::LowRank(self.weight(a, "gate a")?, self.weight(b, "gate b")?),
            },
            o: self.weight(&k.o, "o")?,
        })
    }
    fn mla(&mut self, m: &Mla, head_rows: usize) -> Result<Mla<B::Weight, B::Tensor>> {
        let label = format!("{} / kv_b", self.label);
        Ok(Mla {
            q: match &m.q {
                Query::Full(q) => Query::Full(self.weight(q, "q")?),
                Query::LowRank(a, n, b) => {
                    Query::LowRank(self.weight(a, "q_a")?, self.tensor(n)?, self.weight(b, "q_b")?)
                }
            },
            kv_a: self.weight(&m.kv_a, "kv_a")?,
            kv_norm: self.tensor(&m.kv_norm)?,
            // The rows of a head belong together.
            kv_b: self.device.weight(&m.kv_b, head_rows, &label)?,
            gate: m.gate.as_ref().map(|g| self.weight(g, "gate")).transpose()?,
            o: self.weight(&m.o, "o")?,
        })
    }
    fn moe(&mut self, m: &Moe) -> Result<Moe<B::Weight, B::Tensor>> {
        Ok(Moe {
            router: self.weight(&m.router, "router")?,
            bias: self.tensor(&m.bias)?,
            latent: match &m.latent {
                Some((down, up)) => Some((self.weight(down, "latent down")?, self.weight(up, "latent up")?)),
                None => None,
            },
            norm: m.norm.as_ref().map(|n| self.tensor(n)).transpose()?,
            shared: m.shared.as_ref().map(|s| self.mlp(s, "shared experts")).transpose()?,
        })
    }
}

/// The trunk of layer `i` on `device`.
pub fn layer<B: Backend>(device: &mut B, config: &Config, i: usize, host: &Layer) -> Result<DeviceLayer<B>> {
    device.section(Section::of_layer(i, "trunk"))?;
    let mut t = Transfer { device, label: format!("layer {i}") };
    Ok(Layer {
        input_norm: t.tensor(&host.input_norm)?,
        post_norm: t.tensor(&host.post_norm)?,
        attn_mix: t.tensor(&host.attn_mix)?,
        ffn_mix: t.tensor(&host.ffn_mix)?,
        attention: match &host.attention {
            AttentionWeights::Kda(k) => AttentionWeights::Kda(t.kda(k)?),
            AttentionWeights::Mla(m) => {
                AttentionWeights::Mla(t.mla(m, config.mla.qk_nope_head_dim + config.mla.v_head_dim)?)
            }
        },
        ffn: match &host.ffn {
            FfnWeights::Dense(m) => FfnWeights::Dense(t.mlp(m, "mlp")?),
            FfnWeights::Moe(m) => FfnWeights::Moe(t.moe(m)?),
        },
    })
}

/// The output norm, mix and head on `device`.
pub fn head<B: Backend>(device: &mut B, host: &Head) -> Result<Head<B::Weight, B::Tensor>> {
    device.section(Section { layer: None, part: "output head" })?;
    let mut t = Transfer { device, label: "output".into() };
    Ok(Head {
        mix: t.tensor(&host.mix)?,
        norm: t.tensor(&host.norm)?,
        lm_head: t.weight(&host.lm_head, "lm_head")?,
    })
}

/// A routed expert on `device`.
pub fn expert<B: Backend>(
    device: &mut B,
    layer: usize,
    e: usize,
    host: &Expert,
) -> Result<Expert<B::Weight>> {
    device.section(Section::of_layer(layer, "experts"))?;
    let mut t = Transfer { device, label: format!("layer {layer} / expert {e}") };
    Ok(Expert {
        w1: t.weight(&host.w1, "mxfp4 w1")?,
        w2: t.weight(&host.w2, "mxfp4 w2")?,
        w3: t.weight(&host.w3, "mxfp4 w3")?,
    })
}

/// The state of layer `i` before the first token, with room for `capacity` positions.
pub fn state<B: Backend>(
    device: &mut B,
    config: &Config,
    i: usize,
    capacity: usize,
) -> Result<DeviceState<B>> {
    device.section(Section::of_layer(i, "state"))?;
    if config.layers[i].attention == Attention::Mla {
        return Ok(LayerState::Mla(device.cache(mla_shape(config), capacity)?));
    }
    let k = &config.kda;
    let p = k.heads * k.head_dim;
    let conv = Tensor::zeros(k.conv_kernel - 1, p);
    let s = Tensor::zeros(p, k.head_dim);
    let mut zero = || -> Result<KdaState<B::Tensor>> {
        let mut t = Transfer { device: &mut *device, label: String::new() };
        Ok(KdaState { conv: [t.tensor(&conv)?, t.tensor(&conv)?, t.tensor(&conv)?], s: t.tensor(&s)? })
    };
    Ok(LayerState::Kda { now: zero()?, next: zero()? })
}
