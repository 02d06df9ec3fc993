//! The layers that live on the GPU.

use super::layer::{Experts, UseExpert};
use super::transfer;
use super::weights::{Expert, Head, Layer};
use super::{Model, Observer};
use crate::checkpoint::config::{Config, Ffn};
use crate::checkpoint::names::{EXPERT_PARTS, expert_part_bytes};
use crate::compute::gpu::backend::{GpuBackend, GpuBuf, GpuWork};
use crate::compute::gpu::{Gpu, GpuMatrix};
use crate::error::{Error, Result};
use crate::memory::experts::read_expert;
use crate::memory::slab::Slab;
use std::sync::Arc;
use std::sync::OnceLock;

/// A layer on the GPU: its trunk and all its routed experts.
pub struct GpuLayer {
    /// Trunk.
    pub trunk: Layer<GpuMatrix, GpuBuf>,
    /// Routed experts by number; none in a dense layer.
    pub experts: Vec<Expert<GpuMatrix>>,
}

/// The GPU's side of a model.
pub struct GpuSide {
    /// The device.
    pub gpu: Gpu,
    layers: Vec<OnceLock<GpuLayer>>,
    head: OnceLock<Head<GpuMatrix, GpuBuf>>,
}

/// Experts that lie on the GPU already.
pub struct ResidentExperts<'a>(pub &'a GpuLayer);

impl<'g> Experts<GpuBackend<'g>> for ResidentExperts<'_> {
    fn for_each(
        &mut self,
        device: &mut GpuBackend<'g>,
        layer: usize,
        experts: &[u32],
        _pass: u64,
        f: &mut UseExpert<'_, GpuBackend<'g>>,
    ) -> Result<()> {
        for e in experts {
            let expert =
                self.0.experts.get(*e as usize).ok_or_else(|| {
                    Error::run("the router chose an expert that does not exist").layer(layer)
                })?;
            f(device, *e, expert)?;
        }
        Ok(())
    }
}

impl GpuSide {
    /// A side whose layers are still to be loaded.
    pub fn new(gpu: Gpu, config: &Config) -> GpuSide {
        GpuSide {
            gpu,
            layers: config.layers.iter().map(|_| OnceLock::new()).collect(),
            head: OnceLock::new(),
        }
    }

    /// Layer `i`.
    pub fn layer(&self, i: usize) -> Result<&GpuLayer> {
        self.layers[i].get().ok_or_else(|| Error::run("a layer of the GPU is not loaded").layer(i))
    }

    /// The output head.
    pub fn head(&self) -> Result<&Head<GpuMatrix, GpuBuf>> {
        self.head.get().ok_or_else(|| Error::run("the output head of the GPU is not loaded"))
    }
}

impl Model {
    /// Uploads the layers that belong on the GPU, one at a time: the host never holds more than one layer's trunk and one
    /// expert of them.
    pub(super) fn load_gpu(&self, seen: &mut dyn Observer) -> Result<()> {
        let Some(side) = &self.gpu else { return Ok(()) };
        let config = self.config();
        let n = config.layers.len();
        let mut work = GpuWork::default();
        let mut device = GpuBackend::new(&side.gpu, &mut work, self.trace.clone());
        let bytes: usize = EXPERT_PARTS.iter().map(|p| expert_part_bytes(config, *p)).sum();
        for i in (0..n).filter(|i| self.on_gpu[*i]) {
            seen.layer(i, n);
            self.check_cancelled()?;
            let host = Layer::bind(config, i, &self.trunk.read_once(i)?)?;
            let trunk = transfer::layer(&mut device, config, i, &host).map_err(|e| e.layer(i))?;
            drop(host);
            self.counters.upload_bytes.add(self.trunk.unit(i).bytes());
            let mut experts = Vec::new();
            if config.layers[i].ffn == Ffn::Moe {
                for e in 0..config.moe.experts {
                    self.check_cancelled()?;
                    let mut slab = Slab::new(bytes)?;
                    read_expert(&self.checkpoint, (i, e), &mut slab, &self.counters, &self.trace)?;
                    let slab = Arc::new(slab);
                    let host = Expert::bind(config, &slab)?;
                    experts.push(transfer::expert(&mut device, i, e, &host).map_err(|e| e.layer(i))?);
                    self.counters.upload_bytes.add(bytes as u64);
                }
            }
            // A layer is loaded once; a second call finds it there.
            let _ = side.layers[i].set(GpuLayer { trunk, experts });
        }
        if self.on_gpu[n] {
            seen.layer(n, n);
            let host = Head::bind(config, &self.trunk.read_once(n)?)?;
            let head = transfer::head(&mut device, &host)?;
            self.counters.upload_bytes.add(self.trunk.unit(n).bytes());
            let _ = side.head.set(head);
        }
        Ok(())
    }
}
