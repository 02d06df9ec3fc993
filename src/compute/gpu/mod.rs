//! The GPU side: wgpu and WGSL.
//!
//! [`adapter`] lists and chooses adapters, [`device`] owns the device and turns everything that can go wrong with it
//! into typed errors, [`buffer`] and [`matrix`] hold activations and weights, [`recorder`] records operations without
//! waiting for them. The operations are methods of [`Recorder`], one family a file under `ops`; each has its shader
//! in `shaders/`, named after it. [`table`] runs every operation against a plain reference and names a wrong one.
//!
//! Kernels live within 8 storage buffers, 256 invocations and 16 KiB of shared memory, assume no subgroup size and no
//! optional feature. Sums run in a fixed order, written in each shader, so that a result is the same bits in every run.

pub mod adapter;
pub mod backend;
pub mod buffer;
pub mod device;
pub mod matrix;
mod ops;
pub mod pipelines;
pub mod rates;
pub mod recorder;
pub mod reference;
pub mod table;
pub mod timeline;

pub use adapter::{AdapterEntry, AdapterKind, Vram};
pub use buffer::{GpuSlots, GpuTensor};
pub use device::{Faults, Gpu, GpuOptions};
pub use matrix::{Format, GpuMatrix};
pub use ops::kda::{Decay, KdaGate, KdaStep};
pub use ops::mla;
pub use ops::mla::{AttendScratch, LatentCache, MlaAttend, MlaShape};
pub use ops::moe::{Route, Routing};
pub use ops::values::FloatRules;
pub use recorder::{PassTime, Readback, Recorder, Submission};
pub use table::{ops_table, self_test};
