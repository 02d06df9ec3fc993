//! From names to tensors: what a layer's slab holds.

use crate::checkpoint::config::{Attention, Config, Ffn};
use crate::checkpoint::names::{EMBED, LM_HEAD, layer_prefix};
use crate::checkpoint::names::{EXPERT_PARTS, ExpertPart, expert_part_bytes, expert_part_shape};
use crate::compute::device::{Format, Tensor, Weight};
use crate::error::{Error, Result};
use crate::memory::slab::Slab;
use crate::memory::trunk::Held;
use std::sync::Arc;

/// Prefix of the model-level tensors.
pub const MODEL: &str = "language_model.model.";

/// Gate, up and down of a SiTU-GLU.
pub struct Mlp<W = Weight> {
    /// `[width,in]`
    pub gate: W,
    /// `[width,in]`
    pub up: W,
    /// `[out,width]`
    pub down: W,
}

/// The KDA output gate: one matrix, or two of low rank.
pub enum Gate<W = Weight> {
    /// `[P,H]`
    Full(W),
    /// `[D,H]` then `[P,D]`
    LowRank(W, W),
}

/// Weights of a KDA layer's attention.
pub struct Kda<W = Weight, T = Tensor> {
    /// q, k, v `[P,H]`
    pub qkv: [W; 3],
    /// Taps of the q, k, v convolutions, outermost first: `[k,P]`
    pub conv: [T; 3],
    /// `[D,H]`
    pub f_a: W,
    /// `[P,D]`
    pub f_b: W,
    /// `[N,H]`
    pub b: W,
    /// `A_log` of the heads, without its padding `[1,N]`
    pub a_log: T,
    /// `[1,P]`
    pub dt_bias: T,
    /// `[1,D]`
    pub o_norm: T,
    /// Output gate.
    pub gate: Gate<W>,
    /// `[H,P]`
    pub o: W,
}

/// The MLA query: one matrix, or a normalised low-rank pair.
pub enum Query<W = Weight, T = Tensor> {
    /// `[N·(nope+rope), H]`
    Full(W),
    /// `[q_rank,H]`, norm `[1,q_rank]`, `[N·(nope+rope), q_rank]`
    LowRank(W, T, W),
}

/// Weights of an MLA layer's attention.
pub struct Mla<W = Weight, T = Tensor> {
    /// Query projection.
    pub q: Query<W, T>,
    /// `[R+rope, H]`
    pub kv_a: W,
    /// `[1,R]`
    pub kv_norm: T,
    /// `[N·(nope+value), R]`
    pub kv_b: W,
    /// `[N·value, H]`
    pub gate: Option<W>,
    /// `[H, N·value]`
    pub o: W,
}

/// Trunk weights of a mixture-of-experts layer.
pub struct Moe<W = Weight, T = Tensor> {
    /// Router `[E,H]`
    pub router: W,
    /// Selection bias `[1,E]`
    pub bias: T,
    /// Into and out of the latent width: `[L,H]`, `[H,L]`
    pub latent: Option<(W, W)>,
    /// Norm of the aggregate `[1,L]`
    pub norm: Option<T>,
    /// The shared experts as one MLP.
    pub shared: Option<Mlp<W>>,
}

/// Attention of a layer.
pub enum AttentionWeights<W = Weight, T = Tensor> {
    /// Kimi Delta Attention.
    Kda(Kda<W, T>),
    /// Gated multi-head latent attention.
    Mla(Mla<W, T>),
}

/// Feed-forward of a layer.
pub enum FfnWeights<W = Weight, T = Tensor> {
    /// One MLP.
    Dense(Mlp<W>),
    /// Routed and shared experts.
    Moe(Moe<W, T>),
}

/// Trunk of one layer.
pub struct Layer<W = Weight, T = Tensor> {
    /// `[1,H]`
    pub input_norm: T,
    /// `[1,H]`
    pub post_norm: T,
    /// Folded mix before the attention `[1,H]`
    pub attn_mix: T,
    /// Folded mix before the feed-forward `[1,H]`
    pub ffn_mix: T,
    /// Attention.
    pub attention: AttentionWeights<W, T>,
    /// Feed-forward.
    pub ffn: FfnWeights<W, T>,
}

/// Output norm, mix and head.
pub struct Head<W = Weight, T = Tensor> {
    /// Folded output mix `[1,H]`
    pub mix: T,
    /// `[1,H]`
    pub norm: T,
    /// `[V,H]`
    pub lm_head: W,
}

/// The matrices of layer `i` in the order in which [`super::layer::Pass`] uses them, each with whether it is used as a
/// whole: what a streamed layer is read by.
pub fn matrices(config: &Config, i: usize) -> Vec<(String, bool)> {
    let kind = &config.layers[i];
    let mut names: Vec<&str> = match kind.attention {
        Attention::Kda => vec!["q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj"],
        Attention::Mla if config.mla.q_lora_rank.is_some() => {
            vec!["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]
        }
        Attention::Mla => vec!["q_proj", "kv_a_proj_with_mqa"],
    };
    match kind.attention {
        Attention::Kda if config.kda.full_rank_gate => names.push("g_proj"),
        Attention::Kda => names.extend(["g_a_proj", "g_b_proj"]),
        Attention::Mla => {
            names.extend(config.mla.output_gate.then_some("g_proj"));
            names.push("kv_b_proj");
        }
    }
    names.push("o_proj");
    let (part, ffn) = match kind.ffn {
        Ffn::Dense => ("mlp", vec!["gate_proj", "up_proj", "down_proj"]),
        Ffn::Moe => {
            let (latent, shared) = (config.moe.latent_size.is_some(), config.moe.shared_experts > 0);
            let mut ffn = vec!["gate"];
            ffn.extend(latent.then_some("routed_expert_down_proj"));
            if shared {
                ffn.extend([
                    "shared_experts.gate_proj",
                    "shared_experts.up_proj",
                    "shared_experts.down_proj",
                ]);
            }
            ffn.extend(latent.then_some("routed_expert_up_proj"));
            ("block_sparse_moe", ffn)
        }
    };
    let prefix = layer_prefix(i);
    let attention = names.into_iter().map(|n| (format!("{prefix}self_attn.{n}.weight"), n == "kv_b_proj"));
    attention.chain(ffn.into_iter().map(|n| (format!("{prefix}{part}.{n}.weight"), false))).collect()
}

/// Finds the tensors of a unit by name.
struct Binder<'a> {
    held: &'a Held,
    prefix: String,
}

impl Binder<'_> {
    fn weight(&self, name: &str) -> Result<Weight> {
        self.held.weight(&format!("{}{name}", self.prefix))
    }

    /// The values widened to f32.
    fn vector(&self, name: &str) -> Result<Tensor> {
        let rows = self.weight(name)?.whole()?;
        let matrix = rows.matrix();
        let mut out = Tensor::zeros(matrix.rows, matrix.cols);
        for r in 0..matrix.rows {
            matrix.widen_row(r, out.row_mut(r));
        }
        Ok(out)
    }

    /// `norm_w · proj_w`, the one vector that a residual mix needs.
    fn mix(&self, name: &str) -> Result<Tensor> {
        let mut w = self.vector(&format!("{name}_norm.weight"))?;
        let proj = self.vector(&format!("{name}_proj.weight"))?;
        for (w, p) in w.host_mut().iter_mut().zip(proj.host()) {
            *w *= p;
        }
        Ok(w)
    }

    fn mlp(&self, name: &str) -> Result<Mlp> {
        Ok(Mlp {
            gate: self.weight(&format!("{name}.gate_proj.weight"))?,
            up: self.weight(&format!("{name}.up_proj.weight"))?,
            down: self.weight(&format!("{name}.down_proj.weight"))?,
        })
    }

    fn conv(&self, name: &str) -> Result<Tensor> {
        let w = self.vector(name)?;
        let (p, taps) = (w.rows(), w.cols());
        let mut out = Tensor::zeros(taps, p);
        for c in 0..p {
            for j in 0..taps {
                out.row_mut(j)[c] = w.row(c)[j];
            }
        }
        Ok(out)
    }

    fn kda(&self, config: &Config) -> Result<Kda> {
        let heads = config.kda.heads;
        // Stored with padding: only the first entries belong to heads.
        let a_log = self.vector("self_attn.A_log")?;
        let Some(a_log) = a_log.host().get(..heads) else {
            return Err(Error::refused("A_log is too short")
                .tensor(format!("{}self_attn.A_log", self.prefix))
                .expected(heads, a_log.cols()));
        };
        Ok(Kda {
            qkv: [
                self.weight("self_attn.q_proj.weight")?,
                self.weight("self_attn.k_proj.weight")?,
                self.weight("self_attn.v_proj.weight")?,
            ],
            conv: [
                self.conv("self_attn.q_conv1d.weight")?,
                self.conv("self_attn.k_conv1d.weight")?,
                self.conv("self_attn.v_conv1d.weight")?,
            ],
            f_a: self.weight("self_attn.f_a_proj.weight")?,
            f_b: self.weight("self_attn.f_b_proj.weight")?,
            b: self.weight("self_attn.b_proj.weight")?,
            a_log: Tensor::from_vec(1, heads, a_log.to_vec()),
            dt_bias: self.vector("self_attn.dt_bias")?,
            o_norm: self.vector("self_attn.o_norm.weight")?,
            gate: if config.kda.full_rank_gate {
                Gate::Full(self.weight("self_attn.g_proj.weight")?)
            } else {
                Gate::LowRank(
                    self.weight("self_attn.g_a_proj.weight")?,
                    self.weight("self_attn.g_b_proj.weight")?,
                )
            },
            o: self.weight("self_attn.o_proj.weight")?,
        })
    }

    fn mla(&self, config: &Config) -> Result<Mla> {
        Ok(Mla {
            q: match config.mla.q_lora_rank {
                None => Query::Full(self.weight("self_attn.q_proj.weight")?),
                Some(_) => Query::LowRank(
                    self.weight("self_attn.q_a_proj.weight")?,
                    self.vector("self_attn.q_a_layernorm.weight")?,
                    self.weight("self_attn.q_b_proj.weight")?,
                ),
            },
            kv_a: self.weight("self_attn.kv_a_proj_with_mqa.weight")?,
            kv_norm: self.vector("self_attn.kv_a_layernorm.weight")?,
            kv_b: self.weight("self_attn.kv_b_proj.weight")?,
            gate: match config.mla.output_gate {
                true => Some(self.weight("self_attn.g_proj.weight")?),
                false => None,
            },
            o: self.weight("self_attn.o_proj.weight")?,
        })
    }

    fn moe(&self, config: &Config) -> Result<Moe> {
        let latent = match config.moe.latent_size {
            None => None,
            Some(_) => Some((
                self.weight("block_sparse_moe.routed_expert_down_proj.weight")?,
                self.weight("block_sparse_moe.routed_expert_up_proj.weight")?,
            )),
        };
        Ok(Moe {
            router: self.weight("block_sparse_moe.gate.weight")?,
            bias: self.vector("block_sparse_moe.gate.e_score_correction_bias")?,
            latent,
            norm: match config.moe.latent_norm {
                true => Some(self.vector("block_sparse_moe.routed_expert_norm.weight")?),
                false => None,
            },
            shared: match config.moe.shared_experts {
                0 => None,
                _ => Some(self.mlp("block_sparse_moe.shared_experts")?),
            },
        })
    }
}

impl Layer {
    /// Binds the trunk of layer `i`.
    pub fn bind(config: &Config, i: usize, held: &Held) -> Result<Layer> {
        let b = Binder { held, prefix: layer_prefix(i) };
        let kind = &config.layers[i];
        Ok(Layer {
            input_norm: b.vector("input_layernorm.weight")?,
            post_norm: b.vector("post_attention_layernorm.weight")?,
            attn_mix: b.mix("self_attention_res")?,
            ffn_mix: b.mix("mlp_res")?,
            attention: match kind.attention {
                Attention::Kda => AttentionWeights::Kda(b.kda(config)?),
                Attention::Mla => AttentionWeights::Mla(b.mla(config)?),
            },
            ffn: match kind.ffn {
                Ffn::Dense => FfnWeights::Dense(b.mlp("mlp")?),
                Ffn::Moe => FfnWeights::Moe(b.moe(config)?),
            },
        })
    }
}

impl Head {
    /// Binds output mix, norm and head; a tied head is the embedding.
    pub fn bind(config: &Config, held: &Held) -> Result<Head> {
        let b = Binder { held, prefix: MODEL.to_string() };
        let whole = Binder { held, prefix: String::new() };
        Ok(Head {
            mix: b.mix("output_attn_res")?,
            norm: b.vector("norm.weight")?,
            lm_head: whole.weight(if config.tie_word_embeddings { EMBED } else { LM_HEAD })?,
        })
    }
}

/// The three products of a routed expert.
pub struct Expert<W = Weight> {
    /// Gate `[I,L]`
    pub w1: W,
    /// Down `[L,I]`
    pub w2: W,
    /// Up `[I,L]`
    pub w3: W,
}

impl Expert {
    /// Binds the six parts that lie in `slab` one after the other.
    pub fn bind(config: &Config, slab: &Arc<Slab>) -> Result<Expert> {
        let mut at = [0usize; 6];
        let mut end = 0;
        for (start, part) in at.iter_mut().zip(EXPERT_PARTS) {
            *start = end;
            end += expert_part_bytes(config, part);
        }
        let weight = |packed: usize, part: ExpertPart| {
            let [rows, half] = expert_part_shape(config, part);
            Weight::new(
                slab.clone(),
                at[packed],
                rows,
                2 * half,
                Format::Mxfp4 { scale_offset: at[packed + 1] },
            )
        };
        Ok(Expert {
            w1: weight(0, ExpertPart::W1Packed)?,
            w2: weight(2, ExpertPart::W2Packed)?,
            w3: weight(4, ExpertPart::W3Packed)?,
        })
    }
}
