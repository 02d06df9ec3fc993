//! What the GPU tests share. Not every test binary uses all of it.
#![allow(dead_code)]

use std::sync::OnceLock;
use trunkline::compute::gpu::reference::{self as plain, Stored, worst};
use trunkline::compute::gpu::*;

/// Two devices serve all tests: one with every check and NaN in each new buffer, one as a release runs.
pub fn gpu(checked: bool) -> &'static Gpu {
    static CHECKED: OnceLock<Gpu> = OnceLock::new();
    static PLAIN: OnceLock<Gpu> = OnceLock::new();
    let open = || {
        let options = GpuOptions { allow_software: true, checked, poison: checked, ..Default::default() };
        Gpu::open(options)
            .unwrap_or_else(|e| panic!("{e}; apt-get install -y libvulkan1 mesa-vulkan-drivers"))
    };
    if checked { CHECKED.get_or_init(open) } else { PLAIN.get_or_init(open) }
}

/// A device that may bind 1 MiB at most.
pub fn narrow() -> Gpu {
    let options =
        GpuOptions { allow_software: true, binding_limit: Some(1 << 20), poison: true, ..Default::default() };
    Gpu::open(options).expect("an adapter")
}

pub fn tensor(gpu: &Gpu, rows: usize, values: &[f32]) -> GpuTensor {
    GpuTensor::from_slice(gpu, rows, values.len() / rows, values, "input").expect("upload")
}

pub fn room(gpu: &Gpu, rows: usize, cols: usize) -> GpuTensor {
    GpuTensor::new(gpu, rows, cols, "output").expect("room")
}

/// Records `body`, submits, and gives the values of `out`.
pub fn run(
    gpu: &Gpu,
    out: &GpuTensor,
    body: impl FnOnce(&mut Recorder) -> trunkline::Result<()>,
) -> Vec<f32> {
    let mut rec = gpu.record("test");
    body(&mut rec).expect("recorded");
    let read = rec.read(out).expect("read");
    rec.submit().expect("submitted");
    read.values(gpu).expect("values")
}

pub fn product(gpu: &Gpu, stored: &Stored, rows: usize, cols: usize, x: &[f32]) -> Vec<f32> {
    let w = GpuMatrix::upload(gpu, &stored.matrix(rows, cols), 1, "weight").expect("weight");
    let tokens = x.len() / cols;
    let out = room(gpu, tokens, rows);
    run(gpu, &out, |r| r.matmul(&w, &tensor(gpu, tokens, x), &out))
}

pub fn within(what: &str, got: &[f32], want: &[f64], gate: f64) {
    let err = worst(got, want);
    println!("{what}: {err:.2e}");
    assert!(err <= gate, "{what}: {err:e} > {gate:e}");
}

pub fn same_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differ = got.iter().zip(want).filter(|(g, w)| g.to_bits() != w.to_bits()).count();
    assert_eq!(differ, 0, "{what}: {differ} of {} differ", got.len());
}

/// Mirrors round products and sums separately; on a card that fuses they are no mirrors.
pub fn mirrors_hold(gpu: &Gpu) -> bool {
    let fma = gpu.probe_fma().expect("probe");
    assert!(!gpu.is_software() || !fma.contracts, "a software adapter that contracts: {fma:?}");
    !fma.contracts
}

pub type Weights = (&'static str, fn(u64, usize, usize) -> Stored);
pub const FORMATS: [Weights; 3] = [
    ("f32", |s, r, c| Stored::f32(&plain::noise(s, r * c))),
    ("bf16", |s, r, c| Stored::bf16(&plain::noise(s, r * c))),
    ("mxfp4", Stored::mxfp4),
];
