//! The configuration in the released key structure, and the values of the release.

use super::config::{Attention, Config, Ffn, KdaConfig, LayerKind, MlaConfig, MoeConfig};
use super::format::MXFP4_GROUP;
use super::names::{DType, Expected};
use serde_json::{Value, json};

/// Special ids lie at the end of the vocabulary, this many of them.
const SPECIAL_IDS: usize = 256;

/// The parts of the release's `vision_config` that shapes follow from.
mod vision {
    pub const LAYERS: usize = 27;
    pub const HIDDEN: usize = 1024;
    pub const INTERMEDIATE: usize = 4096;
    pub const QKV_HIDDEN: usize = 1536;
    pub const PATCH: usize = 14;
    pub const POS_EMB: [usize; 2] = [64, 64];
    pub const MERGE: [usize; 2] = [2, 2];
}

/// The shortest decimal that reads back as `v`: 1e-5 stays 1e-05 and does not become 9.99999974e-06.
fn decimal(v: f32) -> f64 {
    v.to_string().parse().unwrap_or(f64::from(v))
}

/// Layers in the pattern of the release: every fourth and the last have MLA, the first has a dense MLP.
pub(super) fn released_layers(n: usize) -> Vec<LayerKind> {
    (1..=n)
        .map(|number| LayerKind {
            attention: if number % 4 == 0 || number == n { Attention::Mla } else { Attention::Kda },
            ffn: if number == 1 { Ffn::Dense } else { Ffn::Moe },
        })
        .collect()
}

/// Ids of `[BOS]`, `<|end_of_msg|>` and `[PAD]` in a vocabulary of `vocab` entries with the release's special ids.
pub(super) fn special_ids(vocab: usize) -> (u32, u32, u32) {
    let id = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let first = vocab.saturating_sub(SPECIAL_IDS);
    (id(first), id(first.saturating_add(2)), id(vocab.saturating_sub(1)))
}

impl Config {
    /// The configuration of the released K3.
    pub fn released() -> Config {
        let vocab_size = 163_840;
        let (bos_token_id, eos_token_id, pad_token_id) = special_ids(vocab_size);
        Config {
            hidden_size: 7168,
            vocab_size,
            layers: released_layers(93),
            kda: KdaConfig {
                heads: 96,
                head_dim: 128,
                conv_kernel: 4,
                gate_lower_bound: -5.0,
                full_rank_gate: true,
            },
            mla: MlaConfig {
                heads: 96,
                q_lora_rank: Some(1536),
                kv_lora_rank: 512,
                qk_nope_head_dim: 128,
                qk_rope_head_dim: 64,
                v_head_dim: 128,
                output_gate: true,
            },
            intermediate_size: 33_792,
            moe: MoeConfig {
                experts: 896,
                experts_per_token: 16,
                shared_experts: 2,
                intermediate_size: 3072,
                latent_size: Some(3584),
                latent_norm: true,
                routed_scaling_factor: 1.0,
                renormalize: true,
            },
            situ_beta: 4.0,
            situ_linear_beta: 25.0,
            attn_res_block_size: Some(12),
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            bos_token_id,
            eos_token_id,
            pad_token_id,
            max_position_embeddings: 1_048_576,
        }
    }

    /// `first_k_dense_replace` and `moe_layer_freq`. A mix of layers that the two keys cannot say comes out as another
    /// one, which reading the result back shows.
    fn moe_keys(&self) -> (usize, usize) {
        let n = self.layers.len();
        let moe = |i: usize| self.layers[i].ffn == Ffn::Moe;
        let Some(first) = (0..n).find(|i| moe(*i)) else { return (n, 1) };
        let says_it = |every: &usize| (first..n).all(|i| moe(i) == i.is_multiple_of(*every));
        (first, (1..=n).find(says_it).unwrap_or(1))
    }

    /// `config.json` in the released key structure; [`Config::from_json`] reads it back as it was. The map to remote
    /// code is left out: there is none beside it.
    pub fn to_json(&self) -> Value {
        let (k, m, e) = (&self.kda, &self.mla, &self.moe);
        let numbers = |kind: Attention| -> Vec<usize> {
            let layers = self.layers.iter().enumerate();
            layers.filter(|(_, l)| l.attention == kind).map(|(i, _)| i + 1).collect()
        };
        let (dense, every) = self.moe_keys();
        let attention = json!({
            "num_attention_heads": m.heads,
            "num_key_value_heads": m.heads,
            "q_lora_rank": m.q_lora_rank,
            "kv_lora_rank": m.kv_lora_rank,
            "qk_nope_head_dim": m.qk_nope_head_dim,
            "qk_rope_head_dim": m.qk_rope_head_dim,
            "v_head_dim": m.v_head_dim,
            "mla_use_nope": true,
            "mla_use_output_gate": m.output_gate,
            "linear_attn_config": {
                "num_heads": k.heads,
                "head_dim": k.head_dim,
                "short_conv_kernel_size": k.conv_kernel,
                "gate_lower_bound": decimal(k.gate_lower_bound),
                "use_full_rank_gate": k.full_rank_gate,
                "full_attn_layers": numbers(Attention::Mla),
                "kda_layers": numbers(Attention::Kda),
            },
            "attn_res_block_size": self.attn_res_block_size,
        });
        let feed_forward = json!({
            "first_k_dense_replace": dense,
            "moe_layer_freq": every,
            "intermediate_size": self.intermediate_size,
            "num_experts": e.experts,
            "num_experts_per_token": e.experts_per_token,
            "num_shared_experts": e.shared_experts,
            "moe_intermediate_size": e.intermediate_size,
            "routed_expert_hidden_size": e.latent_size,
            "latent_moe_use_norm": e.latent_norm,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": e.renormalize,
            "routed_scaling_factor": decimal(e.routed_scaling_factor),
            "use_grouped_topk": true,
            "num_expert_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "quantization_config": quantization(),
            "hidden_act": "situ",
            "activation_situ_beta": decimal(self.situ_beta),
            "activation_situ_linear_beta": decimal(self.situ_linear_beta),
        });
        let text = json!({
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers.len(),
            "rms_norm_eps": decimal(self.rms_norm_eps),
            "max_position_embeddings": self.max_position_embeddings,
            "num_nextn_predict_layers": 0,
            "initializer_range": 0.02,
            "use_cache": true,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
            "transformers_version": "4.56.2",
        });
        json!({
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "ignore_index": -100,
            "image_placeholder": "<|kimi_image_placeholder|>",
            "media_placeholder_token_id": self.bos_token_id.saturating_add(21).min(self.pad_token_id),
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": joined([text, attention, feed_forward]),
            "vision_config": vision_config(self.hidden_size),
        })
    }
}

/// One object of the keys of all `parts`.
fn joined(parts: [Value; 3]) -> Value {
    let objects = parts.into_iter().filter_map(|part| match part {
        Value::Object(object) => Some(object),
        _ => None,
    });
    Value::Object(objects.flatten().collect())
}

fn quantization() -> Value {
    json!({
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": null,
        "global_compression_ratio": null,
        "config_groups": { "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "input_activations": null,
            "output_activations": null,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": true,
                "strategy": "group",
                "group_size": MXFP4_GROUP,
                "dynamic": false,
                "scale_dtype": "torch.uint8",
                "zp_dtype": null,
                "actorder": null,
                "block_structure": null,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    })
}

fn vision_config(hidden_size: usize) -> Value {
    json!({
        "_attn_implementation": "flash_attention_2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": false,
        "init_pos_emb_height": vision::POS_EMB[0],
        "init_pos_emb_width": vision::POS_EMB[1],
        "init_pos_emb_time": 4,
        "linear_bias": false,
        "merge_kernel_size": vision::MERGE,
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": vision::HIDDEN,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": false,
        "patch_size": vision::PATCH,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": vision::QKV_HIDDEN,
        "text_hidden_size": hidden_size,
        "vt_hidden_size": vision::HIDDEN,
        "vt_intermediate_size": vision::INTERMEDIATE,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": vision::LAYERS,
    })
}

fn bf16(name: String, shape: &[usize]) -> Expected {
    Expected { name, dtype: DType::Bf16, shape: shape.to_vec(), padded: false }
}

/// Tensors of the projector from the vision tower to a text model of `hidden_size`. The text model does not read them.
pub(super) fn projector_tensors(hidden_size: usize) -> Vec<Expected> {
    let merged = vision::HIDDEN * vision::MERGE[0] * vision::MERGE[1];
    vec![
        bf16("mm_projector.proj.0.weight".into(), &[merged, merged]),
        bf16("mm_projector.proj.2.weight".into(), &[hidden_size, merged]),
        bf16("mm_projector.post_norm.weight".into(), &[hidden_size]),
    ]
}

/// Tensors of the vision tower. The text model does not read them.
pub(super) fn tower_tensors() -> Vec<Expected> {
    let (h, i, qkv, patch) = (vision::HIDDEN, vision::INTERMEDIATE, vision::QKV_HIDDEN, vision::PATCH);
    let [height, width] = vision::POS_EMB;
    let mut out = vec![
        bf16("vision_tower.patch_embed.proj.weight".into(), &[h, 3, patch, patch]),
        bf16("vision_tower.patch_embed.pos_emb.weight".into(), &[height, width, h]),
    ];
    for block in 0..vision::LAYERS {
        let mut push = |name: &str, shape: &[usize]| {
            out.push(bf16(format!("vision_tower.encoder.blocks.{block}.{name}.weight"), shape));
        };
        push("norm0", &[h]);
        push("norm1", &[h]);
        push("wqkv", &[3 * qkv, h]);
        push("wo", &[h, qkv]);
        push("mlp.fc0", &[i, h]);
        push("mlp.fc1", &[h, i]);
    }
    out.push(bf16("vision_tower.encoder.final_layernorm.weight".into(), &[h]));
    out
}

#[cfg(test)]
mod tests {
    use super::super::names::{
        EXPERT_PARTS, Name, classify, expert_part_bytes, model_tensors, trunk_tensors,
    };
    use super::*;
    use std::path::Path;

    fn bytes(tensors: &[Expected]) -> u64 {
        tensors.iter().map(|t| (t.shape.iter().product::<usize>() * t.dtype.size()) as u64).sum()
    }

    fn read_back(c: &Config) -> Config {
        Config::from_json(c.to_json().to_string().as_bytes(), Path::new("config.json")).unwrap()
    }

    #[test]
    fn every_configuration_reads_back_as_it_was() {
        let released = Config::released();
        assert_eq!(read_back(&released), released);
        let mut other = released.clone();
        other.layers = released_layers(12);
        for (i, layer) in other.layers.iter_mut().enumerate() {
            layer.ffn = if i >= 4 && i % 3 == 0 { Ffn::Moe } else { Ffn::Dense };
        }
        other.kda.full_rank_gate = false;
        other.kda.gate_lower_bound = -3.3;
        other.mla.q_lora_rank = None;
        other.mla.output_gate = false;
        other.moe.latent_size = None;
        other.moe.latent_norm = false;
        other.moe.routed_scaling_factor = 2.446;
        other.moe.renormalize = false;
        other.tie_word_embeddings = true;
        other.attn_res_block_size = Some(5);
        other.rms_norm_eps = 3e-6;
        assert_eq!(read_back(&other), other);
        for layer in &mut other.layers {
            layer.ffn = Ffn::Dense;
        }
        assert_eq!(read_back(&other), other);
    }

    #[test]
    fn layers_that_the_keys_cannot_say_do_not_read_back() {
        let mut c = Config::released();
        c.layers[5].ffn = Ffn::Dense;
        assert_ne!(read_back(&c), c);
    }

    #[test]
    fn released_special_ids_and_layers() {
        let c = Config::released();
        assert_eq!((c.bos_token_id, c.eos_token_id, c.pad_token_id), (163_584, 163_586, 163_839));
        let mla: Vec<usize> = (0..93).filter(|i| c.layers[*i].attention == Attention::Mla).collect();
        let expected: Vec<usize> = (3..92).step_by(4).chain([92]).collect();
        assert_eq!(mla, expected);
        assert_eq!(c.moe_layers(), 92);
    }

    #[test]
    fn census_of_the_release() {
        let c = Config::released();
        let expert: u64 = EXPERT_PARTS.iter().map(|p| expert_part_bytes(&c, *p) as u64).sum();
        assert_eq!(expert, 17_547_264);
        let layer = |i: usize| bytes(&trunk_tensors(&c, i));
        assert_eq!((layer(0), layer(1), layer(3)), (2_341_213_184, 1_267_744_256, 844_335_616));
        let trunk: u64 = (0..93).map(layer).sum();
        assert_eq!(trunk, 108_811_877_376);
        let model = bytes(&model_tensors(&c));
        assert_eq!(model, 4_697_663_488);
        let (projector, tower) = (projector_tensors(c.hidden_size), tower_tensors());
        let vision = bytes(&projector) + bytes(&tower);
        assert_eq!(vision, 894_717_952);
        assert_eq!(92 * 896 * expert + trunk + model + vision, 1_560_860_324_864);
        let count = |i| trunk_tensors(&c, i).len();
        let tensors = 92 * 896 * 6
            + (0..93).map(count).sum::<usize>()
            + model_tensors(&c).len()
            + projector.len()
            + tower.len();
        assert_eq!(tensors, 497_220);
        assert!(projector.iter().chain(&tower).all(|t| classify(&t.name) == Name::Vision));
    }
}
