//! Kernels, their sources, and the pipelines built from them, once each.

use super::device::Gpu;
use crate::error::{Error, Kind, Result};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

/// A kernel: its name and the pieces of WGSL it is made of, `common.wgsl` before them.
#[derive(Debug)]
pub struct Kernel {
    /// The operation, and the stem of its shader file.
    pub name: &'static str,
    /// Pieces in order; the last is the kernel's own file.
    pub pieces: &'static [&'static str],
}

/// Declares a kernel from files in `shaders/`.
macro_rules! kernel {
    ($name:literal: $($file:literal),+) => {
        &$crate::compute::gpu::pipelines::Kernel {
            name: $name,
            pieces: &[$(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/", $file))),+],
        }
    };
}
pub(super) use kernel;

const COMMON: &str = include_str!("../../../shaders/common.wgsl");

/// Compile-time constants of a kernel, by name.
pub type Constants<'a> = &'a [(&'static str, u32)];

impl Kernel {
    /// The whole source with `constants` at its head. `replacement` stands in for the kernel's own file.
    fn source(&self, constants: Constants, replacement: Option<&str>) -> String {
        let mut text = String::with_capacity(8 << 10);
        for (name, value) in constants {
            let _ = writeln!(text, "const {name}: u32 = {value}u;");
        }
        text.push_str(COMMON);
        for (i, piece) in self.pieces.iter().enumerate() {
            let own = i + 1 == self.pieces.len();
            text.push_str(match replacement {
                Some(other) if own => other,
                _ => piece,
            });
        }
        text
    }
}

/// A pipeline and the layout of its one bind group.
pub(super) struct Pipeline {
    pub(super) pipeline: wgpu::ComputePipeline,
    pub(super) layout: wgpu::BindGroupLayout,
}

/// Key: the kernel's name, its pieces (by address: they are constants) and its constants.
type Key = (&'static str, usize, Vec<(&'static str, u32)>);

/// The pipelines built so far.
#[derive(Default)]
pub(super) struct Pipelines(HashMap<Key, Arc<Pipeline>>);

impl Gpu {
    /// The pipeline of `kernel` with `constants`, built on first use.
    ///
    /// # Errors
    /// `Device` when the shader does not compile on this adapter or the device is lost.
    pub(super) fn pipeline(&self, kernel: &'static Kernel, constants: Constants) -> Result<Arc<Pipeline>> {
        let key = (kernel.name, kernel.pieces.as_ptr() as usize, constants.to_vec());
        let mut built = self.pipelines.lock();
        if let Some(p) = built.0.get(&key) {
            return Ok(p.clone());
        }
        self.check()?;
        let replacement =
            self.options.replaced_shaders.iter().find(|(n, _)| n == kernel.name).map(|(_, s)| s.as_str());
        let label = constants.iter().fold(kernel.name.to_owned(), |mut label, (n, v)| {
            let _ = write!(label, " {n}={v}");
            label
        });
        let source = wgpu::ShaderSource::Wgsl(kernel.source(constants, replacement).into());
        let descriptor = wgpu::ShaderModuleDescriptor { label: Some(&label), source };
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let module = if self.options.checked {
            self.device.create_shader_module(descriptor)
        } else {
            // SAFETY: the kernels are this crate's own: every access is guarded against the sizes that the recording
            // side has checked, every loop ends, and no divisor is zero. Tests run them with the checks as well.
            unsafe {
                self.device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
            }
        };
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&label),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: self.options.checked,
                ..Default::default()
            },
            cache: self.pipeline_cache.as_ref(),
        });
        let layout = pipeline.get_bind_group_layout(0);
        if let Some(e) = pollster::block_on(scope.pop()) {
            return Err(Error::new(Kind::Device, format!("kernel {label} does not build"))
                .device(self.name())
                .cause(one_line(&e.to_string())));
        }
        let pipeline = Arc::new(Pipeline { pipeline, layout });
        built.0.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// Groups of a dispatch of `n` groups, folded into two dimensions where one would exceed the adapter's limit; the
    /// kernel rebuilds the linear id (`group_id`) and drops those past the end.
    pub(super) fn fold(&self, n: usize) -> [u32; 2] {
        fold(n, self.limits.max_compute_workgroups_per_dimension)
    }
}

/// `n` groups as `x * y >= n` with neither above `limit`, and fewer than `y` groups to spare.
fn fold(n: usize, limit: u32) -> [u32; 2] {
    let y = n.div_ceil(limit as usize).max(1);
    let x = n.div_ceil(y);
    [x as u32, y as u32]
}

/// An error text without its line breaks.
pub(super) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folds_cover_and_stay_below_the_limit() {
        for n in [0usize, 1, 31, 65_534, 65_535, 65_536, 70_000, 163_840, 5_000_000] {
            let [x, y] = fold(n, 65_535);
            assert!(x <= 65_535 && y <= 65_535);
            let total = x as usize * y as usize;
            assert!(total >= n && total - n < y as usize, "{n} -> {x} x {y}");
        }
    }
}
