//! The state of a sequence by name, on the host: what session files hold and tests compare.

use super::Model;
use super::state::{AnyState, LayerState, State};
use crate::compute::backend::{Backend, Section};
use crate::compute::device::Tensor;
use crate::compute::gpu::backend::{GpuBackend, GpuBuf, GpuWork};
use crate::error::{Error, Result};
use std::borrow::Cow;

/// One tensor of a state: its name, and its committed rows.
pub type Named<'a> = (String, Cow<'a, Tensor>);

/// The first `rows` rows of `t`.
fn first_rows(t: &Tensor, rows: usize) -> Tensor {
    Tensor::from_vec(rows, t.cols(), t.host()[..rows * t.cols()].to_vec())
}

impl Model {
    /// The tensors of a state after its last whole step: `layers.{i}.conv_{q,k,v}` `[k-1,P]` and `.s` `[N·D,D]` of KDA
    /// layers, `.latent` `[len,R]` and `.rope` `[len,rope]` of MLA layers.
    pub fn export<'s>(&self, state: &'s State) -> Result<Vec<Named<'s>>> {
        let mut out = Vec::new();
        let mut work = GpuWork::default();
        for (i, layer) in state.layers.iter().enumerate() {
            let name = |part: &str| format!("layers.{i}.{part}");
            match layer {
                AnyState::Cpu(LayerState::Kda { now, .. }) => {
                    for (n, conv) in ["conv_q", "conv_k", "conv_v"].iter().zip(&now.conv) {
                        out.push((name(n), Cow::Borrowed(conv)));
                    }
                    out.push((name("s"), Cow::Borrowed(&now.s)));
                }
                AnyState::Cpu(LayerState::Mla(cache)) => {
                    out.push((name("latent"), Cow::Owned(first_rows(&cache.latent, state.len))));
                    out.push((name("rope"), Cow::Owned(first_rows(&cache.rope, state.len))));
                }
                AnyState::Gpu(layer) => {
                    let gpu = &self.gpu_side()?.gpu;
                    match layer {
                        LayerState::Kda { now, .. } => {
                            let mut device = GpuBackend::new(gpu, &mut work, self.trace.clone());
                            device.section(Section::of_layer(i, "state"))?;
                            let mut take = |t: &GpuBuf| device.download(t).map(Cow::Owned);
                            for (n, conv) in ["conv_q", "conv_k", "conv_v"].iter().zip(&now.conv) {
                                out.push((name(n), take(conv)?));
                            }
                            out.push((name("s"), take(&now.s)?));
                        }
                        LayerState::Mla(cache) => {
                            let (latent, rope) = cache.download(gpu)?;
                            let (shape, len) = (cache.shape(), state.len);
                            let tensor = |cols, values| Cow::Owned(Tensor::from_vec(len, cols, values));
                            out.push((name("latent"), tensor(shape.rank, latent)));
                            out.push((name("rope"), tensor(shape.rope, rope)));
                        }
                    }
                }
            }
        }
        Ok(out)
    }

    /// Makes `state` the one whose tensors `read` gives by name and columns, after `len` positions.
    pub fn import(
        &self,
        state: &mut State,
        len: usize,
        read: &mut dyn FnMut(&str, usize, usize) -> Result<Tensor>,
    ) -> Result<()> {
        let k = &self.config().kda;
        let (p, past) = (k.heads * k.head_dim, k.conv_kernel - 1);
        let shape = super::state::mla_shape(self.config());
        let mut work = GpuWork::default();
        for (i, layer) in state.layers.iter_mut().enumerate() {
            let name = |part: &str| format!("layers.{i}.{part}");
            match layer {
                AnyState::Cpu(LayerState::Kda { now, .. }) => {
                    for (n, conv) in ["conv_q", "conv_k", "conv_v"].iter().zip(&mut now.conv) {
                        *conv = read(&name(n), past, p)?;
                    }
                    now.s = read(&name("s"), p, k.head_dim)?;
                }
                AnyState::Cpu(LayerState::Mla(cache)) => {
                    let latent = read(&name("latent"), len, shape.rank)?;
                    cache.latent.host_mut()[..latent.host().len()].copy_from_slice(latent.host());
                    let rope = read(&name("rope"), len, shape.rope)?;
                    cache.rope.host_mut()[..rope.host().len()].copy_from_slice(rope.host());
                }
                AnyState::Gpu(layer) => {
                    let gpu = &self.gpu_side()?.gpu;
                    match layer {
                        LayerState::Kda { now, .. } => {
                            let mut device = GpuBackend::new(gpu, &mut work, self.trace.clone());
                            device.section(Section::of_layer(i, "state"))?;
                            for (n, conv) in ["conv_q", "conv_k", "conv_v"].iter().zip(&mut now.conv) {
                                device.upload(&read(&name(n), past, p)?, conv)?;
                            }
                            device.upload(&read(&name("s"), p, k.head_dim)?, &mut now.s)?;
                        }
                        LayerState::Mla(cache) => {
                            let latent = read(&name("latent"), len, shape.rank)?;
                            let rope = read(&name("rope"), len, shape.rope)?;
                            cache.restore(gpu, latent.host(), rope.host())?;
                        }
                    }
                }
            }
        }
        state.len = len;
        Ok(())
    }

    pub(super) fn gpu_side(&self) -> Result<&super::gpu::GpuSide> {
        self.gpu.as_ref().ok_or_else(|| Error::run("the state is of another model"))
    }
}
