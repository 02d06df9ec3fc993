//! What is carried from token to token.

use crate::checkpoint::config::{Attention, Config};
use crate::compute::device::Tensor;
use crate::compute::ops::mla::{MlaCache, Shape};

/// State of one KDA layer.
#[derive(Debug, Clone)]
pub struct KdaState<T = Tensor> {
    /// Last `conv_kernel - 1` inputs of the q, k and v convolutions, oldest first: each `[k-1, P]`.
    pub conv: [T; 3],
    /// The recurrence's state S, head by head `[Dk, Dv]`: `[N·D, D]`.
    pub s: T,
}

/// State of one layer. A step reads what is committed and writes `next`; [`State::commit`] swaps the two.
#[derive(Debug, Clone)]
pub enum LayerState<T = Tensor, C = MlaCache> {
    /// Recurrent: committed and next.
    Kda {
        /// After the last whole step.
        now: KdaState<T>,
        /// Written by the step in progress.
        next: KdaState<T>,
    },
    /// Append-only: a step writes rows past the committed length.
    Mla(C),
}

/// State of one sequence.
#[derive(Debug, Clone)]
pub struct State {
    /// Per layer.
    pub layers: Vec<LayerState>,
    len: usize,
    capacity: usize,
}

fn kda_zero(config: &Config) -> KdaState {
    let k = &config.kda;
    let p = k.heads * k.head_dim;
    let conv = || Tensor::zeros(k.conv_kernel - 1, p);
    KdaState { conv: [conv(), conv(), conv()], s: Tensor::zeros(p, k.head_dim) }
}

/// Widths of the MLA layers.
pub fn mla_shape(config: &Config) -> Shape {
    let m = &config.mla;
    Shape {
        heads: m.heads,
        nope: m.qk_nope_head_dim,
        rope: m.qk_rope_head_dim,
        value: m.v_head_dim,
        rank: m.kv_lora_rank,
    }
}

impl State {
    /// The state before the first token, with room for `capacity` positions.
    pub fn new(config: &Config, capacity: usize) -> State {
        let layers = config
            .layers
            .iter()
            .map(|l| match l.attention {
                Attention::Kda => LayerState::Kda { now: kda_zero(config), next: kda_zero(config) },
                Attention::Mla => LayerState::Mla(MlaCache::new(mla_shape(config), capacity)),
            })
            .collect();
        State { layers, len: 0, capacity }
    }

    /// Bytes of a state with room for `capacity` positions.
    pub fn bytes(config: &Config, capacity: usize) -> u64 {
        let k = &config.kda;
        let p = (k.heads * k.head_dim) as u64;
        let kda = 2 * 4 * p * (3 * (k.conv_kernel as u64 - 1) + k.head_dim as u64);
        let mla = 4 * capacity as u64 * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) as u64;
        config.layers.iter().map(|l| if l.attention == Attention::Kda { kda } else { mla }).sum()
    }

    /// Positions of the last whole step.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been fed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes what the step of `tokens` tokens wrote the state.
    pub fn commit(&mut self, tokens: usize) {
        for layer in &mut self.layers {
            if let LayerState::Kda { now, next } = layer {
                std::mem::swap(now, next);
            }
        }
        self.len += tokens;
    }

    /// Back to before the first token.
    pub fn reset(&mut self) {
        for layer in &mut self.layers {
            if let LayerState::Kda { now, .. } = layer {
                now.s.host_mut().fill(0.0);
                now.conv.iter_mut().for_each(|c| c.host_mut().fill(0.0));
            }
        }
        self.len = 0;
    }

    /// Declares that the committed buffers hold `len` positions, as after reading them from a session file.
    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len;
    }
}
