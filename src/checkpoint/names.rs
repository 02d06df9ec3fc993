//! The one table of the tensors a configuration implies: names in the released spelling, dtypes and shapes.

use super::config::{Attention, Config, Ffn};
use super::format::MXFP4_GROUP;
use std::fmt;

/// Types of stored values that the text model uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// Bytes: packed codes, and scales in the release's spelling.
    U8,
    /// Scales in the other spelling of the same bytes.
    F8E8M0,
}

impl DType {
    /// The spelling of the safetensors format.
    pub fn as_str(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
            DType::U8 => "U8",
            DType::F8E8M0 => "F8_E8M0",
        }
    }

    /// Bytes of a value.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
            DType::U8 | DType::F8E8M0 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A tensor that the configuration implies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Released spelling.
    pub name: String,
    /// Type in the release.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// The first dimension may be longer: the tail is padding (`A_log`).
    pub padded: bool,
}

/// Prefix of the tensors of layer `i`.
pub fn layer_prefix(i: usize) -> String {
    format!("language_model.model.layers.{i}.")
}

/// Trunk tensors of layer `i`: everything but the routed experts.
pub fn trunk_tensors(c: &Config, i: usize) -> Vec<Expected> {
    let prefix = layer_prefix(i);
    let mut out = Vec::new();
    let mut push = |name: &str, dtype: DType, shape: &[usize], padded: bool| {
        out.push(Expected { name: format!("{prefix}{name}"), dtype, shape: shape.to_vec(), padded });
    };
    let h = c.hidden_size;
    let mut bf16 = |name: &str, shape: &[usize]| push(name, DType::Bf16, shape, false);
    bf16("input_layernorm.weight", &[h]);
    bf16("post_attention_layernorm.weight", &[h]);
    bf16("self_attention_res_norm.weight", &[h]);
    bf16("self_attention_res_proj.weight", &[1, h]);
    bf16("mlp_res_norm.weight", &[h]);
    bf16("mlp_res_proj.weight", &[1, h]);
    match c.layers[i].attention {
        Attention::Kda => {
            let k = &c.kda;
            let p = k.heads * k.head_dim;
            for n in ["q", "k", "v"] {
                bf16(&format!("self_attn.{n}_proj.weight"), &[p, h]);
            }
            bf16("self_attn.f_a_proj.weight", &[k.head_dim, h]);
            bf16("self_attn.f_b_proj.weight", &[p, k.head_dim]);
            bf16("self_attn.b_proj.weight", &[k.heads, h]);
            if k.full_rank_gate {
                bf16("self_attn.g_proj.weight", &[p, h]);
            } else {
                bf16("self_attn.g_a_proj.weight", &[k.head_dim, h]);
                bf16("self_attn.g_b_proj.weight", &[p, k.head_dim]);
            }
            bf16("self_attn.o_proj.weight", &[h, p]);
            for n in ["q", "k", "v"] {
                push(&format!("self_attn.{n}_conv1d.weight"), DType::F32, &[p, 1, k.conv_kernel], false);
            }
            push("self_attn.A_log", DType::F32, &[k.heads.max(k.head_dim)], true);
            push("self_attn.dt_bias", DType::F32, &[p], false);
            push("self_attn.o_norm.weight", DType::F32, &[k.head_dim], false);
        }
        Attention::Mla => {
            let m = &c.mla;
            let q = m.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim);
            match m.q_lora_rank {
                Some(r) => {
                    bf16("self_attn.q_a_proj.weight", &[r, h]);
                    bf16("self_attn.q_a_layernorm.weight", &[r]);
                    bf16("self_attn.q_b_proj.weight", &[q, r]);
                }
                None => bf16("self_attn.q_proj.weight", &[q, h]),
            }
            bf16("self_attn.kv_a_proj_with_mqa.weight", &[m.kv_lora_rank + m.qk_rope_head_dim, h]);
            bf16("self_attn.kv_a_layernorm.weight", &[m.kv_lora_rank]);
            bf16(
                "self_attn.kv_b_proj.weight",
                &[m.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank],
            );
            if m.output_gate {
                bf16("self_attn.g_proj.weight", &[m.heads * m.v_head_dim, h]);
            }
            bf16("self_attn.o_proj.weight", &[h, m.heads * m.v_head_dim]);
        }
    }
    let mut bf16 = |name: &str, shape: &[usize]| push(name, DType::Bf16, shape, false);
    match c.layers[i].ffn {
        Ffn::Dense => {
            bf16("mlp.gate_proj.weight", &[c.intermediate_size, h]);
            bf16("mlp.up_proj.weight", &[c.intermediate_size, h]);
            bf16("mlp.down_proj.weight", &[h, c.intermediate_size]);
        }
        Ffn::Moe => {
            let m = &c.moe;
            bf16("block_sparse_moe.gate.weight", &[m.experts, h]);
            if let Some(l) = m.latent_size {
                bf16("block_sparse_moe.routed_expert_down_proj.weight", &[l, h]);
                bf16("block_sparse_moe.routed_expert_up_proj.weight", &[h, l]);
            }
            if m.latent_norm {
                bf16("block_sparse_moe.routed_expert_norm.weight", &[c.expert_width()]);
            }
            if m.shared_experts > 0 {
                let width = m.shared_experts * m.intermediate_size;
                bf16("block_sparse_moe.shared_experts.gate_proj.weight", &[width, h]);
                bf16("block_sparse_moe.shared_experts.up_proj.weight", &[width, h]);
                bf16("block_sparse_moe.shared_experts.down_proj.weight", &[h, width]);
            }
            push("block_sparse_moe.gate.e_score_correction_bias", DType::F32, &[m.experts], false);
        }
    }
    out
}

/// The embedding.
pub const EMBED: &str = "language_model.model.embed_tokens.weight";
/// The output head; absent when it is tied to the embedding.
pub const LM_HEAD: &str = "language_model.lm_head.weight";

/// Tensors outside the layers.
pub fn model_tensors(c: &Config) -> Vec<Expected> {
    let (v, h) = (c.vocab_size, c.hidden_size);
    let bf16 = |name: &str, shape: &[usize]| Expected {
        name: name.to_string(),
        dtype: DType::Bf16,
        shape: shape.to_vec(),
        padded: false,
    };
    let mut out = vec![bf16(EMBED, &[v, h])];
    if !c.tie_word_embeddings {
        out.push(bf16(LM_HEAD, &[v, h]));
    }
    out.push(bf16("language_model.model.norm.weight", &[h]));
    out.push(bf16("language_model.model.output_attn_res_norm.weight", &[h]));
    out.push(bf16("language_model.model.output_attn_res_proj.weight", &[1, h]));
    out
}

/// One of the six tensors of a routed expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertPart {
    /// Gate, codes.
    W1Packed,
    /// Gate, scales.
    W1Scale,
    /// Down, codes.
    W2Packed,
    /// Down, scales.
    W2Scale,
    /// Up, codes.
    W3Packed,
    /// Up, scales.
    W3Scale,
}

/// The six parts in the order in which the release stores them.
pub const EXPERT_PARTS: [ExpertPart; 6] = [
    ExpertPart::W1Packed,
    ExpertPart::W1Scale,
    ExpertPart::W2Packed,
    ExpertPart::W2Scale,
    ExpertPart::W3Packed,
    ExpertPart::W3Scale,
];

impl ExpertPart {
    /// End of the name.
    pub fn suffix(self) -> &'static str {
        match self {
            ExpertPart::W1Packed => "w1.weight_packed",
            ExpertPart::W1Scale => "w1.weight_scale",
            ExpertPart::W2Packed => "w2.weight_packed",
            ExpertPart::W2Scale => "w2.weight_scale",
            ExpertPart::W3Packed => "w3.weight_packed",
            ExpertPart::W3Scale => "w3.weight_scale",
        }
    }

    /// Whether it holds scales.
    pub fn is_scale(self) -> bool {
        matches!(self, ExpertPart::W1Scale | ExpertPart::W2Scale | ExpertPart::W3Scale)
    }
}

/// Name of one part of a routed expert.
pub fn expert_tensor_name(layer: usize, expert: usize, part: ExpertPart) -> String {
    format!("{}block_sparse_moe.experts.{expert}.{}", layer_prefix(layer), part.suffix())
}

/// Shape of one part in bytes: `[rows, bytes a row]`.
pub fn expert_part_shape(c: &Config, part: ExpertPart) -> [usize; 2] {
    let (l, i) = (c.expert_width(), c.moe.intermediate_size);
    match part {
        ExpertPart::W1Packed | ExpertPart::W3Packed => [i, l / 2],
        ExpertPart::W1Scale | ExpertPart::W3Scale => [i, l / MXFP4_GROUP],
        ExpertPart::W2Packed => [l, i / 2],
        ExpertPart::W2Scale => [l, i / MXFP4_GROUP],
    }
}

/// Bytes of one part.
pub fn expert_part_bytes(c: &Config, part: ExpertPart) -> usize {
    expert_part_shape(c, part).iter().product()
}

/// What a name in an index or header stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// A part of a routed expert.
    Expert {
        /// Layer.
        layer: usize,
        /// Expert.
        expert: usize,
        /// Index into [`EXPERT_PARTS`].
        part: usize,
    },
    /// Vision tower or projector: not read.
    Vision,
    /// Anything else.
    Other,
}

/// Classifies a name.
pub fn classify(name: &str) -> Name {
    if name.starts_with("vision_tower.") || name.starts_with("mm_projector.") {
        return Name::Vision;
    }
    // As names are written: no sign and no leading zero, so that no two names are the same expert.
    let number = |text: &str| -> Option<usize> {
        let padded = text.len() > 1 && text.starts_with('0');
        let plain = !padded && text.bytes().all(|b| b.is_ascii_digit());
        if plain { text.parse().ok() } else { None }
    };
    let expert = || {
        let rest = name.strip_prefix("language_model.model.layers.")?;
        let (layer, rest) = rest.split_once('.')?;
        let rest = rest.strip_prefix("block_sparse_moe.experts.")?;
        let (expert, suffix) = rest.split_once('.')?;
        let part = EXPERT_PARTS.iter().position(|p| p.suffix() == suffix)?;
        Some(Name::Expert { layer: number(layer)?, expert: number(expert)?, part })
    };
    expert().unwrap_or(Name::Other)
}
