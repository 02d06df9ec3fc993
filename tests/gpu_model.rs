//! The whole network on a Vulkan adapter, judged by the same reference numbers as the CPU. Without an adapter these
//! tests fail: install libvulkan1 and mesa-vulkan-drivers.

mod common;

use common::reference::DEEP;
use common::{Golden, assert_close, golden_dir};
use std::sync::Arc;
use trunkline::Kind;
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::compute::gpu::{Faults, Gpu, GpuOptions};
use trunkline::model::session::Session;
use trunkline::model::{GpuPlan, Model, Options, Unobserved};

/// Gate of the blocks: they hold exponentials and tanh, which drivers round differently.
const OP: f64 = 3e-5;
const SETS: [&str; 2] = ["base", "toggles"];

fn gpu(options: GpuOptions) -> Gpu {
    match Gpu::open(GpuOptions { allow_software: true, ..options }) {
        Ok(gpu) => gpu,
        Err(e) => panic!("{e}: install a Vulkan driver (apt-get install libvulkan1 mesa-vulkan-drivers)"),
    }
}

fn open(set: &str, gpu: Option<GpuPlan>) -> Result<Arc<Model>, trunkline::Error> {
    let checkpoint = Arc::new(Checkpoint::open(&[golden_dir(set).join("ckpt")])?);
    let model = Model::open(
        checkpoint,
        Options {
            threads: 2,
            context: 256,
            chunk: 64,
            all_logits: true,
            budget: 1 << 30,
            io_depth: 2,
            cancel: Arc::default(),
            gpu,
            ..Options::default()
        },
    )?;
    model.load(&mut Unobserved)?;
    Ok(Arc::new(model))
}

fn whole(set: &str, options: GpuOptions) -> Arc<Model> {
    let plan = GpuPlan { gpu: gpu(options), budget: 1 << 30, everything: true };
    let model = open(set, Some(plan)).unwrap();
    assert_eq!(model.device_name(), "gpu");
    model
}

fn argmax(row: &[f32]) -> u32 {
    trunkline::compute::cpu::vector::argmax(row).unwrap() as u32
}

/// Logits of every position, state and 16 greedy tokens of every prompt, against the reference.
fn passes_the_reference(set: &str, model: &Arc<Model>) {
    let golden = Golden::open(set, "golden.safetensors");
    for prompt in 0..4 {
        let ids = golden.ids(&format!("p{prompt}.ids"));
        let mut session = Session::new(model.clone()).unwrap();
        let mut all = Vec::new();
        session
            .feed_all(&ids, &mut Unobserved, &mut |_, row| {
                all.extend_from_slice(row);
                Ok(())
            })
            .unwrap();
        assert_close(
            &format!("{set} p{prompt}.logits"),
            &all,
            &golden.f32(&format!("p{prompt}.logits")),
            DEEP,
        );
        let vocab = model.config().vocab_size;
        let rows = golden.f32(&format!("p{prompt}.greedy.logits"));
        for (j, token) in golden.ids(&format!("p{prompt}.greedy.tokens")).iter().enumerate() {
            let name = format!("{set} p{prompt}.greedy.logits[{j}]");
            assert_close(&name, session.logits(), &rows[j * vocab..(j + 1) * vocab], DEEP);
            assert_eq!(argmax(session.logits()), *token, "{set} p{prompt} greedy {j}");
            session.step(*token, &mut Unobserved).unwrap();
        }
    }
}

#[test]
fn everything_on_the_gpu_equals_the_reference() {
    for set in SETS {
        let model = whole(set, GpuOptions { poison: true, checked: true, ..GpuOptions::default() });
        common::reference::blocks(set, &model, OP);
        common::reference::trace_and_state(set, &model, &Golden::open(set, "golden.safetensors"));
        passes_the_reference(set, &model);
    }
}

#[test]
fn c22_a_binding_limit_of_1_mib_gives_the_same_bits() {
    let golden = Golden::open("base", "golden.safetensors");
    let ids = golden.ids("p3.ids");
    let logits = |limit: Option<u64>| {
        let model = whole("base", GpuOptions { binding_limit: limit, ..GpuOptions::default() });
        let mut session = Session::new(model).unwrap();
        session.sync(&ids, 16, &mut Unobserved, &mut |_| Ok(())).unwrap();
        session.logits().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    // 32 KiB cuts the head (512 x 128 in bf16) into four.
    let own = logits(None);
    assert!(own == logits(Some(1 << 20)) && own == logits(Some(32 << 10)));
}

#[test]
fn c16_chunks_on_the_gpu_agree() {
    let golden = Golden::open("base", "golden.safetensors");
    let model = whole("base", GpuOptions::default());
    let ids = golden.ids("p4.ids");
    let reference = golden.f32("p4.logits");
    let last = &reference[reference.len() - model.config().vocab_size..];
    for chunk in [1, 7, 16, 64] {
        let mut session = Session::new(model.clone()).unwrap();
        session.sync(&ids, chunk, &mut Unobserved, &mut |_| Ok(())).unwrap();
        assert_close(&format!("chunks of {chunk}"), session.logits(), last, DEEP);
    }
}

#[test]
fn layers_shared_between_gpu_and_cpu_equal_the_reference() {
    let all = {
        let model = whole("toggles", GpuOptions::default());
        model.gpu().map_or(0, |g| g.bytes_used())
    };
    let mut kinds = Vec::new();
    for budget in [0, all * 3 / 4, all, 1 << 30] {
        let plan = GpuPlan { gpu: gpu(GpuOptions::default()), budget, everything: false };
        let model = open("toggles", Some(plan)).unwrap();
        kinds.push((model.device_name(), model.gpu_layers()));
        passes_the_reference("toggles", &model);
    }
    assert_eq!((kinds[0], kinds[3]), (("cpu", 0), ("gpu", 7)), "{kinds:?}");
    assert!(kinds.iter().any(|k| k.0 == "hybrid"), "{kinds:?}");
}

#[test]
fn a_session_moves_between_devices() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.session");
    let golden = Golden::open("base", "golden.safetensors");
    let ids = golden.ids("p3.ids");
    let on_gpu = whole("base", GpuOptions::default());
    let (on_cpu, _) = common::open_golden("base");
    let more = trunkline::model::session_file::Continuation::default();
    for (from, to) in [(&on_gpu, &on_cpu), (&on_cpu, &on_gpu)] {
        let mut session = Session::new(from.clone()).unwrap();
        session.sync(&ids, 16, &mut Unobserved, &mut |_| Ok(())).unwrap();
        trunkline::model::session_file::save(&session, &more, &path).unwrap();
        let (mut moved, _) = trunkline::model::session_file::load(to, &path).unwrap();
        for token in golden.ids("p3.greedy.tokens") {
            assert_eq!(argmax(moved.logits()), token);
            moved.step(token, &mut Unobserved).unwrap();
        }
    }
}

#[test]
fn c24_a_model_that_does_not_fit_is_refused_with_figures() {
    let plan = GpuPlan { gpu: gpu(GpuOptions::default()), budget: 1 << 20, everything: true };
    let e =
        open("base", Some(plan)).err().map(|e| (e.kind(), e.to_string(), e.hint_text().map(str::to_owned)));
    let (kind, text, hint) = e.unwrap();
    assert_eq!(kind, Kind::Machine);
    assert!(text.contains("1048576") && text.contains("bytes"), "{text}");
    assert!(hint.is_some_and(|h| h.contains("--vram")));
}

#[test]
fn c24_memory_that_runs_out_while_loading_is_an_error() {
    let faults = Faults { fail_allocation: Some(40), ..Faults::default() };
    let plan = GpuPlan {
        gpu: gpu(GpuOptions { faults, ..GpuOptions::default() }),
        budget: 1 << 30,
        everything: true,
    };
    let e = open("base", Some(plan)).err().unwrap();
    assert!(matches!(e.kind(), Kind::Device | Kind::Machine), "{e}");
    assert!(e.to_string().contains("out of GPU memory"), "{e}");
}

#[test]
fn a_device_lost_in_mid_decode_leaves_the_last_whole_step() {
    let golden = Golden::open("base", "golden.safetensors");
    let ids = golden.ids("p2.ids");
    let faults = Faults { lose_after_submits: Some(1500), ..Faults::default() };
    let model = whole("base", GpuOptions { faults, ..GpuOptions::default() });
    let mut session = Session::new(model).unwrap();
    session.sync(&ids, 16, &mut Unobserved, &mut |_| Ok(())).unwrap();
    let tokens = golden.ids("p2.greedy.tokens");
    let mut whole_steps = 0;
    let e = tokens.iter().cycle().take(400).find_map(|t| match session.step(*t, &mut Unobserved) {
        Ok(_) => {
            whole_steps += 1;
            None
        }
        Err(e) => Some(e),
    });
    let e = e.expect("the device was to be lost");
    assert_eq!(e.kind(), Kind::Device, "{e}");
    assert!(e.hint_text().is_some_and(|h| h.contains("--device cpu")), "{:?}", e.hint_text());
    assert_eq!(session.tokens().len(), ids.len() + whole_steps);
    // Nothing runs on after it.
    assert_eq!(session.step(1, &mut Unobserved).err().map(|e| e.kind()), Some(Kind::Device));
}
