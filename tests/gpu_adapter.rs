//! Opening a device, refusals, and what happens when it fails.

use trunkline::Kind;
use trunkline::compute::gpu::adapter::{self, choose};
use trunkline::compute::gpu::reference::{Stored, noise};
use trunkline::compute::gpu::{
    AdapterEntry, AdapterKind, Faults, Gpu, GpuMatrix, GpuOptions, GpuTensor, table,
};

const INSTALL: &str = "no Vulkan adapter: apt-get install -y libvulkan1 mesa-vulkan-drivers";

fn options() -> GpuOptions {
    GpuOptions { allow_software: true, checked: true, ..Default::default() }
}

fn open(options: GpuOptions) -> Gpu {
    Gpu::open(options).unwrap_or_else(|e| panic!("{INSTALL}: {e}"))
}

fn entry(index: usize, name: &str, kind: AdapterKind) -> AdapterEntry {
    AdapterEntry {
        index,
        name: name.into(),
        backend: "vulkan".into(),
        kind,
        driver: "driver 1".into(),
        vram: None,
        binding_limit: 1 << 30,
        buffer_limit: 1 << 30,
        storage_buffers: 8,
        invocations: 256,
        shared_memory: 16 << 10,
        subgroup: (32, 32),
        features: vec![],
    }
}

#[test]
fn adapter_present() {
    let found = adapter::list();
    assert!(!found.is_empty(), "{INSTALL}");
    for a in &found {
        println!("{} features {:?} vram {:?}", a.line(), a.features, a.vram);
        assert_eq!(a.lacks(), None);
        let vram = a.vram.expect("a Vulkan adapter has heaps");
        assert!(vram.total > 0 && vram.free <= vram.total);
    }
    let gpu = open(options());
    println!("{} fma {:?}", gpu.name(), gpu.probe_fma().expect("probe"));
    assert_eq!(gpu.binding_limit(), gpu.adapter().binding_limit / 256 * 256, "the adapter's own limit");
}

#[test]
fn choice_of_adapter() {
    let all = [
        entry(0, "llvmpipe", AdapterKind::Software),
        entry(1, "Iris Xe", AdapterKind::Integrated),
        entry(2, "RTX 3090", AdapterKind::Discrete),
        entry(3, "RTX 4090", AdapterKind::Discrete),
    ];
    assert_eq!(choose(&all, None, false).ok(), Some(2));
    assert_eq!(choose(&all[..2], None, true).ok(), Some(1));
    assert_eq!(choose(&all, Some("4090"), false).ok(), Some(3));
    assert_eq!(choose(&all, Some("iris xe"), false).ok(), Some(1));
    assert_eq!(choose(&all, Some("3"), false).ok(), Some(3));
    assert_eq!(choose(&all[..1], None, true).ok(), Some(0));
    for (list, wanted, allow, says) in [
        (&all[..], Some("Radeon"), false, "3: RTX 4090"),
        (&all[..], Some("RTX"), false, "several"),
        (&all[..], Some("llvmpipe"), false, "software"),
        (&all[..1], None, false, "no hardware adapter"),
        (&all[..0], None, true, "no adapter was found"),
        (&all[..], Some("7"), true, "0: llvmpipe"),
    ] {
        let e = choose(list, wanted, allow).expect_err("must be refused");
        assert_eq!(e.kind(), Kind::Machine);
        assert!(e.to_string().contains(says), "{e}");
    }
    let mut weak = entry(0, "weak", AdapterKind::Discrete);
    weak.storage_buffers = 4;
    assert!(choose(&[weak.clone(), all[1].clone()], None, false).ok() == Some(1));
    assert!(choose(&[weak], Some("0"), false).is_err_and(|e| e.to_string().contains("4 storage buffers")));
}

#[test]
fn a_software_adapter_needs_permission() {
    if adapter::list().iter().any(|a| a.kind != AdapterKind::Software) {
        // With a card in the machine the rule is `choice_of_adapter`'s.
        return assert!(open(GpuOptions::default()).adapter().kind != AdapterKind::Software);
    }
    let e = Gpu::open(GpuOptions::default()).expect_err("not allowed");
    assert_eq!(e.kind().exit_code(), 4);
    assert!(e.hint_text().is_some_and(|h| h.contains("--allow-software")));
}

/// C22: a weight above the binding limit is split; a buffer above it is refused before it is made.
#[test]
fn c22_limits_are_requested_and_kept() {
    let gpu = open(GpuOptions { binding_limit: Some(1 << 20), ..options() });
    assert_eq!(gpu.binding_limit(), 1 << 20);
    let e = GpuTensor::new(&gpu, 1, (1 << 18) + 1, "too large").expect_err("above the limit");
    assert_eq!(e.kind(), Kind::Machine);
    assert!(e.to_string().contains("too large") && e.to_string().contains("1048576"), "{e}");
    let stored = Stored::bf16(&noise(1, 3000 * 512));
    let w = GpuMatrix::upload(&gpu, &stored.matrix(3000, 512), 1, "head").expect("split");
    assert_eq!(w.chunk_count(), 3);
    let e = GpuMatrix::upload(&gpu, &stored.matrix(3000, 512), 3000, "head").expect_err("cannot be split");
    assert_eq!(e.kind(), Kind::Machine);
    gpu.check().expect("a refusal is no failure of the device");
}

/// C24: memory that is out is an error with figures, at the budget and at the driver.
#[test]
fn c24_out_of_memory_is_an_error_with_figures() {
    let gpu = open(GpuOptions { vram_budget: Some(64 << 20), ..options() });
    let first = GpuTensor::new(&gpu, 40 << 10, 256, "first").expect("40 MiB fit");
    assert_eq!(gpu.bytes_used(), 40 << 20);
    let e = GpuTensor::new(&gpu, 30 << 10, 256, "second").expect_err("70 MiB do not");
    assert_eq!(e.kind(), Kind::Machine);
    assert!(e.to_string().contains("41943040 of 67108864"), "{e}");
    drop(first);
    assert_eq!((gpu.bytes_used(), gpu.bytes_peak()), (0, 40 << 20));
    GpuTensor::new(&gpu, 30 << 10, 256, "second").expect("fits now");

    let faults = Faults { fail_allocation: Some(2), ..Default::default() };
    let gpu = open(GpuOptions { faults, ..options() });
    let _kept = (GpuTensor::new(&gpu, 4, 4, "a").expect("a"), GpuTensor::new(&gpu, 4, 4, "b").expect("b"));
    let e = GpuTensor::new(&gpu, 4, 4, "c").expect_err("injected");
    assert_eq!((e.kind(), e.place().tensor.as_deref()), (Kind::Device, Some("c")));
    assert!(e.to_string().contains("64 bytes") && e.to_string().contains("128 bytes in use"), "{e}");
    GpuTensor::new(&gpu, 4, 4, "d").expect("the device itself is well");
}

/// C25: what the validation of wgpu finds ends the run; the buffer keeps its old content instead of zeros.
#[test]
fn c25_a_validation_error_is_fatal() {
    // The kernel asks for more parameters than the recorder binds: the binding is too small.
    let wide = "struct Params { words: array<vec4<u32>, 64> }
        @group(0) @binding(0) var<uniform> p: Params;
        @group(0) @binding(1) var<storage, read> x: array<f32>;
        @group(0) @binding(2) var<storage, read_write> y: array<f32>;
        @compute @workgroup_size(64)
        fn main(@builtin(local_invocation_index) lane: u32) { y[lane] = x[lane] + f32(p.words[63].x); }";
    let gpu = open(GpuOptions { replaced_shaders: vec![("add".into(), wide.into())], ..options() });
    let x = GpuTensor::from_slice(&gpu, 1, 4, &[1.0; 4], "x").expect("x");
    let y = GpuTensor::from_slice(&gpu, 1, 4, &[2.0; 4], "y").expect("y");
    let mut rec = gpu.record("c25");
    let outcome = rec.add(&x, &y).and_then(|()| rec.submit().map(|_| ()));
    let e = outcome.expect_err("must not run");
    assert_eq!(e.kind(), Kind::Device);
    assert!(e.to_string().contains(gpu.name()), "{e}");
    for later in [gpu.download(&y).map(|_| ()), gpu.check(), GpuTensor::new(&gpu, 1, 4, "z").map(|_| ())] {
        assert!(later.is_err_and(|e| e.kind() == Kind::Device), "nothing runs on after it");
    }

    // A tensor of the wrong shape is found before wgpu is asked, and the device stays well.
    let gpu = open(options());
    let x = GpuTensor::from_slice(&gpu, 1, 8, &[1.0; 8], "x").expect("x");
    let short = GpuTensor::from_slice(&gpu, 1, 4, &[2.0; 4], "short").expect("short");
    let mut rec = gpu.record("c25");
    let e = rec.add(&x, &short).expect_err("too small");
    assert_eq!(e.to_string(), "add has the wrong shape: expected 4, found 8");
    drop(rec);
    assert_eq!(gpu.download(&short).expect("well"), [2.0; 4]);
}

#[test]
fn a_kernel_that_does_not_build_is_named() {
    let gpu = open(GpuOptions { replaced_shaders: vec![("add".into(), "fn main( {".into())], ..options() });
    let x = GpuTensor::from_slice(&gpu, 1, 4, &[1.0; 4], "x").expect("x");
    let y = GpuTensor::from_slice(&gpu, 1, 4, &[1.0; 4], "y").expect("y");
    let e = gpu.record("broken").add(&x, &y).expect_err("no WGSL");
    assert_eq!(e.kind(), Kind::Device);
    assert!(e.to_string().contains("kernel add"), "{e}");
}

#[test]
fn a_lost_device_runs_nothing_more() {
    let faults = Faults { lose_after_submits: Some(2), ..Default::default() };
    let gpu = open(GpuOptions { faults, ..options() });
    let x = GpuTensor::from_slice(&gpu, 1, 4, &[1.0; 4], "x").expect("x");
    let y = GpuTensor::from_slice(&gpu, 1, 4, &[2.0; 4], "y").expect("y");
    let step = || {
        let mut rec = gpu.record("step");
        rec.add(&x, &y)?;
        let read = rec.read(&y)?;
        rec.submit()?;
        read.values(&gpu)
    };
    assert_eq!(step().expect("before the loss"), [3.0; 4]);
    for _ in 0..2 {
        let e = step().expect_err("lost");
        assert_eq!(e.kind().exit_code(), 1);
        assert!(e.to_string().contains("lost") && e.to_string().contains(gpu.name()), "{e}");
        assert!(e.hint_text().is_some_and(|h| h.contains("--device cpu")));
    }
    assert!(GpuTensor::new(&gpu, 1, 4, "z").is_err() && x.write(&gpu, &[0.0; 4]).is_err());
}

/// C26: an adapter that computes one operation wrongly is refused by that operation's name.
#[test]
fn c26_a_wrong_kernel_is_named() {
    let right = include_str!("../shaders/rmsnorm.wgsl");
    let wrong = right.replace("+ p.eps)", "+ 2.0 * p.eps + 1e-4)");
    assert_ne!(right, wrong);
    let gpu = open(GpuOptions { replaced_shaders: vec![("rmsnorm".into(), wrong)], ..options() });
    let e = table::self_test(&gpu).expect_err("wrong");
    assert_eq!(e.kind(), Kind::Machine);
    // The latent of attention goes through the same kernel, and nothing else does.
    let text = e.to_string();
    assert!(text.contains("rmsnorm is off") && !text.contains("l2norm"), "{text}");
}

#[test]
fn pipelines_are_cached_where_the_driver_can() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let gpu = open(GpuOptions { pipeline_cache: Some(folder.path().into()), ..options() });
    gpu.probe_fma().expect("one pipeline");
    gpu.save_pipeline_cache().expect("saved");
    let files = std::fs::read_dir(folder.path()).expect("folder").count();
    assert_eq!(files, usize::from(gpu.adapter().features.contains(&"pipeline cache")));
    // And a cache that is not one is dropped.
    for f in std::fs::read_dir(folder.path()).expect("folder").flatten() {
        std::fs::write(f.path(), b"not a cache").expect("overwritten");
    }
    let gpu = open(GpuOptions { pipeline_cache: Some(folder.path().into()), ..options() });
    gpu.probe_fma().expect("builds without it");
}
