//! What is carried from token to token.

use super::layer::DeviceState;
use crate::checkpoint::config::{Attention, Config};
use crate::compute::device::{Cpu, Tensor};
use crate::compute::gpu::LatentCache;
use crate::compute::gpu::backend::GpuBuf;
use crate::compute::ops::mla::{MlaCache, Shape};
use crate::error::Result;

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

impl<T, C> LayerState<T, C> {
    fn commit(&mut self) {
        if let LayerState::Kda { now, next } = self {
            std::mem::swap(now, next);
        }
    }
}

/// State of one layer, where the layer is computed.
pub enum AnyState {
    /// In host memory.
    Cpu(DeviceState<&'static Cpu>),
    /// On the GPU.
    Gpu(LayerState<GpuBuf, LatentCache>),
}

/// State of one sequence.
#[derive(Default)]
pub struct State {
    /// Per layer.
    pub(super) layers: Vec<AnyState>,
    pub(super) len: usize,
    pub(super) capacity: usize,
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

/// Bytes of the state of layer `i` with room for `capacity` positions.
pub fn layer_bytes(config: &Config, i: usize, capacity: usize) -> u64 {
    let k = &config.kda;
    match config.layers[i].attention {
        Attention::Kda => {
            let p = (k.heads * k.head_dim) as u64;
            2 * 4 * p * (3 * (k.conv_kernel as u64 - 1) + k.head_dim as u64)
        }
        Attention::Mla => {
            4 * capacity as u64 * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) as u64
        }
    }
}

impl State {
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
    pub(super) fn commit(&mut self, tokens: usize) -> Result<()> {
        self.len += tokens;
        for layer in &mut self.layers {
            match layer {
                AnyState::Cpu(s) => s.commit(),
                AnyState::Gpu(LayerState::Mla(cache)) => cache.set_len(self.len)?,
                AnyState::Gpu(s) => s.commit(),
            }
        }
        Ok(())
    }
}
