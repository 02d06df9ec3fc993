//! `config.json` in the released key structure. Every key the network needs is required: a default would give a model
//! that runs and is wrong.

use super::format::MXFP4_GROUP;
use crate::error::{Error, Result};
use serde_json::Value;
use std::fmt::Display;
use std::path::Path;

/// More layers than any model has: what is allocated per layer stays small whatever the file says.
const MAX_LAYERS: usize = 4096;
/// More routed experts than any model has, over all layers.
const MAX_EXPERTS: usize = 1 << 22;

/// Attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Kimi Delta Attention: recurrent.
    Kda,
    /// Gated multi-head latent attention.
    Mla,
}

/// Feed-forward of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ffn {
    /// One MLP.
    Dense,
    /// Routed and shared experts.
    Moe,
}

/// What a layer is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerKind {
    /// Attention.
    pub attention: Attention,
    /// Feed-forward.
    pub ffn: Ffn,
}

/// Kimi Delta Attention.
#[derive(Debug, Clone, PartialEq)]
pub struct KdaConfig {
    /// Heads N.
    pub heads: usize,
    /// Key and value width D of a head.
    pub head_dim: usize,
    /// Taps of the short convolutions.
    pub conv_kernel: usize,
    /// Bound that multiplies the decay gate.
    pub gate_lower_bound: f32,
    /// One gate matrix instead of a low-rank pair.
    pub full_rank_gate: bool,
}

/// Multi-head latent attention.
#[derive(Debug, Clone, PartialEq)]
pub struct MlaConfig {
    /// Heads N.
    pub heads: usize,
    /// Rank of the query projection; `None`: one matrix.
    pub q_lora_rank: Option<usize>,
    /// Latent rank R.
    pub kv_lora_rank: usize,
    /// Query and key width through the latent.
    pub qk_nope_head_dim: usize,
    /// Query and key width shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Value width.
    pub v_head_dim: usize,
    /// Sigmoid gate on the output.
    pub output_gate: bool,
}

/// Mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Routed experts E.
    pub experts: usize,
    /// Chosen per token K.
    pub experts_per_token: usize,
    /// Shared experts, fused into one MLP.
    pub shared_experts: usize,
    /// Width I of an expert.
    pub intermediate_size: usize,
    /// Latent width L; `None`: experts work at the hidden width.
    pub latent_size: Option<usize>,
    /// Norm on the sum of the chosen experts.
    pub latent_norm: bool,
    /// Multiplies the router weights.
    pub routed_scaling_factor: f32,
    /// Divide the chosen scores by their sum.
    pub renormalize: bool,
}

/// The text model's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// H
    pub hidden_size: usize,
    /// V
    pub vocab_size: usize,
    /// Layers in order.
    pub layers: Vec<LayerKind>,
    /// KDA layers.
    pub kda: KdaConfig,
    /// MLA layers.
    pub mla: MlaConfig,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// Mixture-of-experts layers.
    pub moe: MoeConfig,
    /// β of SiTU.
    pub situ_beta: f32,
    /// βl of SiTU.
    pub situ_linear_beta: f32,
    /// Layers of an attention-residual block.
    pub attn_res_block_size: Option<usize>,
    /// Eps of the norms (but the two low-rank ones of MLA).
    pub rms_norm_eps: f32,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// Beginning of sequence.
    pub bos_token_id: u32,
    /// End of message.
    pub eos_token_id: u32,
    /// Padding.
    pub pad_token_id: u32,
    /// Positions the model was made for.
    pub max_position_embeddings: usize,
}

/// Looks up keys and refuses what is missing or of another kind.
struct Keys<'a> {
    path: &'a Path,
    prefix: String,
    object: &'a serde_json::Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn error(&self, key: &str, what: &str) -> Error {
        Error::refused(what).file(self.path).key(format!("{}{key}", self.prefix))
    }
    fn refuse<T>(&self, key: &str, expected: impl Display, found: impl Display) -> Result<T> {
        Err(self.error(key, "the configuration is refused").expected(expected, found))
    }
    fn get(&self, key: &str) -> Result<&'a Value> {
        self.object.get(key).ok_or_else(|| self.error(key, "the configuration lacks a required key"))
    }
    fn section(&self, key: &str) -> Result<Keys<'a>> {
        match self.get(key)? {
            Value::Object(object) => {
                Ok(Keys { path: self.path, prefix: format!("{}{key}.", self.prefix), object })
            }
            other => self.refuse(key, "an object", other),
        }
    }
    /// A whole number from 1 to 2^31.
    fn count(&self, key: &str) -> Result<usize> {
        self.number(key, 1)
    }
    fn number(&self, key: &str, least: u64) -> Result<usize> {
        let v = self.get(key)?;
        match v.as_u64().filter(|n| (least..=1 << 31).contains(n)).and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(n),
            None => self.refuse(key, format_args!("a whole number of at least {least}"), v),
        }
    }
    fn count_or_null(&self, key: &str) -> Result<Option<usize>> {
        if self.get(key)?.is_null() { Ok(None) } else { self.count(key).map(Some) }
    }
    fn float(&self, key: &str) -> Result<f32> {
        let v = self.get(key)?;
        match v.as_f64().map(|f| f as f32).filter(|f| f.is_finite()) {
            Some(f) => Ok(f),
            None => self.refuse(key, "a finite number", v),
        }
    }
    fn positive(&self, key: &str) -> Result<f32> {
        let f = self.float(key)?;
        if f > 0.0 { Ok(f) } else { self.refuse(key, "a number above 0", f) }
    }
    fn flag(&self, key: &str) -> Result<bool> {
        let v = self.get(key)?;
        v.as_bool().map_or_else(|| self.refuse(key, "true or false", v), Ok)
    }
    /// The one value that is supported.
    fn fixed(&self, key: &str, expected: Value) -> Result<()> {
        let v = self.get(key)?;
        if *v == expected { Ok(()) } else { self.refuse(key, expected, v) }
    }
    fn id(&self, key: &str, vocab: usize) -> Result<u32> {
        let n = self.number(key, 0)?;
        match u32::try_from(n) {
            Ok(id) if n < vocab => Ok(id),
            _ => self.refuse(key, format_args!("an id below vocab_size {vocab}"), n),
        }
    }
    /// One-based layer numbers.
    fn layers(&self, key: &str, n: usize) -> Result<Vec<usize>> {
        let v = self.get(key)?;
        let list = v.as_array().map_or_else(|| self.refuse(key, "a list of layer numbers", v), Ok)?;
        list.iter()
            .map(|item| match item.as_u64().and_then(|i| usize::try_from(i).ok()) {
                Some(i) if (1..=n).contains(&i) => Ok(i),
                _ => self.refuse(key, format_args!("one-based layer numbers from 1 to {n}"), item),
            })
            .collect()
    }
}

impl Config {
    /// Reads a configuration. `path` is for messages.
    pub fn from_json(bytes: &[u8], path: &Path) -> Result<Config> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|e| Error::refused("the configuration is not valid JSON").file(path).cause(e))?;
        let Value::Object(object) = &value else {
            return Err(Error::refused("the configuration is not a JSON object").file(path));
        };
        let top = Keys { path, prefix: String::new(), object };
        top.fixed("model_type", "kimi_k3".into())?;
        let tie = top.flag("tie_word_embeddings")?;
        let text = top.section("text_config")?;
        let k = &text;
        let n = k.count("num_hidden_layers")?;
        if n > MAX_LAYERS {
            return k.refuse("num_hidden_layers", format_args!("at most {MAX_LAYERS}"), n);
        }
        let vocab_size = k.count("vocab_size")?;
        k.fixed("hidden_act", "situ".into())?;
        k.fixed("mla_use_nope", true.into())?;
        k.fixed("moe_router_activation_func", "sigmoid".into())?;
        k.fixed("num_expert_group", 1.into())?;
        k.fixed("topk_group", 1.into())?;
        k.fixed("topk_method", "noaux_tc".into())?;
        k.fixed("num_nextn_predict_layers", 0.into())?;
        k.flag("use_grouped_topk")?;
        if k.flag("tie_word_embeddings")? != tie {
            return k.refuse("tie_word_embeddings", format_args!("{tie}, as at the top level"), !tie);
        }
        let linear = k.section("linear_attn_config")?;
        let dense = k.number("first_k_dense_replace", 0)?;
        let every = k.count("moe_layer_freq")?;
        let mut attention = vec![None; n];
        for (key, kind) in [("full_attn_layers", Attention::Mla), ("kda_layers", Attention::Kda)] {
            for i in linear.layers(key, n)? {
                if attention[i - 1].replace(kind).is_some() {
                    return linear.refuse(
                        key,
                        "each layer in one list, once",
                        format_args!("layer {i} again"),
                    );
                }
            }
        }
        let mut layers = Vec::with_capacity(n);
        for (i, a) in attention.into_iter().enumerate() {
            let Some(attention) = a else {
                return linear.refuse(
                    "kda_layers",
                    format_args!("every layer 1 to {n} in one of the two lists"),
                    format_args!("no layer {}", i + 1),
                );
            };
            let moe = i >= dense && i.is_multiple_of(every);
            layers.push(LayerKind { attention, ffn: if moe { Ffn::Moe } else { Ffn::Dense } });
        }
        let heads = k.count("num_attention_heads")?;
        k.fixed("num_key_value_heads", heads.into())?;
        let experts = k.count("num_experts")?;
        if experts > MAX_EXPERTS / n {
            return k.refuse(
                "num_experts",
                format_args!("at most {} in {n} layers", MAX_EXPERTS / n),
                experts,
            );
        }
        let experts_per_token = k.count("num_experts_per_token")?;
        if experts_per_token > experts {
            return k.refuse(
                "num_experts_per_token",
                format_args!("at most num_experts {experts}"),
                experts_per_token,
            );
        }
        let conv_kernel = linear.count("short_conv_kernel_size")?;
        if conv_kernel < 2 {
            return linear.refuse("short_conv_kernel_size", "at least 2", conv_kernel);
        }
        let config = Config {
            hidden_size: k.count("hidden_size")?,
            vocab_size,
            layers,
            kda: KdaConfig {
                heads: linear.count("num_heads")?,
                head_dim: linear.count("head_dim")?,
                conv_kernel,
                gate_lower_bound: linear.float("gate_lower_bound")?,
                full_rank_gate: linear.flag("use_full_rank_gate")?,
            },
            mla: MlaConfig {
                heads,
                q_lora_rank: k.count_or_null("q_lora_rank")?,
                kv_lora_rank: k.count("kv_lora_rank")?,
                qk_nope_head_dim: k.count("qk_nope_head_dim")?,
                qk_rope_head_dim: k.count("qk_rope_head_dim")?,
                v_head_dim: k.count("v_head_dim")?,
                output_gate: k.flag("mla_use_output_gate")?,
            },
            intermediate_size: k.count("intermediate_size")?,
            moe: MoeConfig {
                experts,
                experts_per_token,
                shared_experts: k.number("num_shared_experts", 0)?,
                intermediate_size: k.count("moe_intermediate_size")?,
                latent_size: k.count_or_null("routed_expert_hidden_size")?,
                latent_norm: k.flag("latent_moe_use_norm")?,
                routed_scaling_factor: k.positive("routed_scaling_factor")?,
                renormalize: k.flag("moe_renormalize")?,
            },
            situ_beta: k.positive("activation_situ_beta")?,
            situ_linear_beta: k.positive("activation_situ_linear_beta")?,
            attn_res_block_size: k.count_or_null("attn_res_block_size")?,
            rms_norm_eps: k.positive("rms_norm_eps")?,
            tie_word_embeddings: tie,
            bos_token_id: k.id("bos_token_id", vocab_size)?,
            eos_token_id: k.id("eos_token_id", vocab_size)?,
            pad_token_id: k.id("pad_token_id", vocab_size)?,
            max_position_embeddings: k.count("max_position_embeddings")?,
        };
        if linear.float("gate_lower_bound")? >= 0.0 {
            return linear.refuse("gate_lower_bound", "a number below 0", config.kda.gate_lower_bound);
        }
        if config.layers.iter().any(|l| l.ffn == Ffn::Moe) {
            quantization(k)?;
            for (key, width) in [
                ("moe_intermediate_size", config.moe.intermediate_size),
                ("routed_expert_hidden_size", config.expert_width()),
            ] {
                if !width.is_multiple_of(MXFP4_GROUP) {
                    return k.refuse(
                        key,
                        format_args!("a multiple of {MXFP4_GROUP}, the columns that share a scale"),
                        width,
                    );
                }
            }
        }
        Ok(config)
    }

    /// Input and output width of a routed expert: L, or H without a latent.
    pub fn expert_width(&self) -> usize {
        self.moe.latent_size.unwrap_or(self.hidden_size)
    }

    /// Whether a block of attention residuals ends before layer `i`.
    pub fn is_block_boundary(&self, i: usize) -> bool {
        self.attn_res_block_size.is_some_and(|b| i.is_multiple_of(b))
    }

    /// Layers with routed experts.
    pub fn moe_layers(&self) -> usize {
        self.layers.iter().filter(|l| l.ffn == Ffn::Moe).count()
    }
}

/// Only MXFP4 in groups of 32 is known, and only without quantised activations.
fn quantization(text: &Keys<'_>) -> Result<()> {
    let q = text.section("quantization_config")?;
    q.fixed("quant_method", "compressed-tensors".into())?;
    q.fixed("format", "mxfp4-pack-quantized".into())?;
    let groups = q.section("config_groups")?;
    for name in groups.object.keys() {
        let group = groups.section(name)?;
        group.fixed("format", "mxfp4-pack-quantized".into())?;
        group.fixed("input_activations", Value::Null)?;
        let w = group.section("weights")?;
        w.fixed("num_bits", 4.into())?;
        w.fixed("type", "float".into())?;
        w.fixed("strategy", "group".into())?;
        w.fixed("symmetric", true.into())?;
        w.fixed("group_size", MXFP4_GROUP.into())?;
    }
    if groups.object.is_empty() {
        return q.refuse("config_groups", "a group", "none");
    }
    Ok(())
}
