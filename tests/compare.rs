//! `compare`: the report itself, and the program as a user runs it, on a Vulkan adapter. Without an adapter these tests
//! fail: install libvulkan1 and mesa-vulkan-drivers.

mod common;

use common::{Golden, golden_dir};
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use trunkline::Kind;
use trunkline::checkpoint::demo;
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::compute::gpu::reference::noise;
use trunkline::compute::gpu::{Gpu, GpuOptions};
use trunkline::model::{GpuPlan, Model, Options, Unobserved};
use trunkline::report::compare::{Comparison, First, MARGIN_GATE, OpsReport};

fn gpu(options: GpuOptions) -> Gpu {
    match Gpu::open(GpuOptions { allow_software: true, ..options }) {
        Ok(gpu) => gpu,
        Err(e) => panic!("{e}: install a Vulkan driver (apt-get install libvulkan1 mesa-vulkan-drivers)"),
    }
}

fn open(checkpoint: &Arc<Checkpoint>, context: usize, gpu: Option<Gpu>) -> Arc<Model> {
    let options = Options {
        threads: 2,
        context,
        chunk: 64,
        all_logits: true,
        budget: 1 << 30,
        io_depth: 2,
        cancel: Arc::default(),
        gpu: gpu.map(|gpu| GpuPlan { gpu, budget: 1 << 30, everything: true }),
        ..Options::default()
    };
    let model = Model::open(checkpoint.clone(), options).unwrap();
    model.load(&mut Unobserved).unwrap();
    Arc::new(model)
}

fn compare(checkpoint: &Arc<Checkpoint>, ids: &[u32], second: Option<Gpu>) -> Comparison {
    let first = First::run(&open(checkpoint, ids.len(), None), ids, 64, 0.0, &mut Unobserved).unwrap();
    first.against(&open(checkpoint, ids.len(), second), 0.0, None, &mut Unobserved).unwrap()
}

fn golden() -> (Arc<Checkpoint>, Vec<u32>) {
    let ids = Golden::open("base", "golden.safetensors").ids("p3.ids");
    (Arc::new(Checkpoint::open(&[golden_dir("base").join("ckpt")]).unwrap()), ids)
}

fn rmsnorm(change: &str) -> GpuOptions {
    let right = include_str!("../shaders/rmsnorm.wgsl");
    let wrong = right.replace("+ p.eps)", change);
    assert_ne!(right, wrong);
    GpuOptions { replaced_shaders: vec![("rmsnorm".into(), wrong)], ..GpuOptions::default() }
}

/// Where the CPU's two best logits are apart, the GPU's greedy token is the CPU's, over 500 positions; the others are listed.
#[test]
fn greedy_tokens_and_nll_over_500_positions_of_the_demo() {
    let checkpoint = Arc::new(demo::open().unwrap());
    let vocab = checkpoint.config().vocab_size as f32;
    let ids: Vec<u32> = noise(500, 500).iter().map(|x| ((x.abs() * vocab) as u32).min(2047)).collect();
    let c = compare(&checkpoint, &ids, Some(gpu(GpuOptions::default())));
    println!("{}", c.text());
    assert!(c.passed, "{:?}", c.failures);
    assert_eq!(
        (c.positions, c.greedy.of, c.devices[0].device, c.devices[1].device),
        (500, 500, "cpu", "gpu")
    );
    assert_eq!(c.greedy.agree + c.greedy.disagreements.len(), 500);
    assert!(c.greedy.disagreements.iter().all(|d| d.margin <= MARGIN_GATE), "{:?}", c.greedy.disagreements);
    assert!(c.logits.error > 0.0 && c.logits.error <= 3e-4, "{}", c.logits.error);
    let [a, b] = [c.devices[0].nll, c.devices[1].nll];
    assert!(a > 1.0 && format!("{a:.4}") == format!("{b:.4}"), "{a} and {b}");
    // Nine layers and the head, each observed.
    assert_eq!(c.layers.len(), 10);
    for l in &c.layers {
        assert!(l.out > 0.0 && l.out <= l.worst && l.worst <= 3e-4, "{l:?}");
        assert_eq!(l.experts_differ, 0, "{l:?}");
    }
}

#[test]
fn a_device_equals_itself_and_a_wrong_kernel_is_seen_in_the_layers() {
    let (checkpoint, ids) = golden();
    let same = compare(&checkpoint, &ids, None);
    assert!(same.passed && same.logits.error == 0.0 && same.greedy.agree == ids.len());
    assert!(same.layers.iter().all(|l| l.worst == 0.0));

    let wrong = compare(&checkpoint, &ids, Some(gpu(rmsnorm("+ 0.5)"))));
    assert!(!wrong.passed && wrong.logits.error > 1e-2, "{}", wrong.logits.error);
    assert!(wrong.failures[0].contains("logits"), "{:?}", wrong.failures);
    let bad = wrong.greedy.disagreements.iter().filter(|d| d.margin > MARGIN_GATE).count();
    assert_eq!(wrong.failures.len(), 1 + bad);
    assert!(bad > 0 && wrong.layers[0].worst > 1e-2, "{:?}", wrong.layers[0]);
    assert!(wrong.text().ends_with("FAILED\n") && wrong.text().contains("WRONG"));
}

/// C26: an adapter that computes one operation wrongly is told by that operation's name.
#[test]
fn c26_the_op_table_names_a_wrong_kernel() {
    let report = OpsReport::run(&gpu(rmsnorm("+ 2.0 * p.eps + 1e-4)"))).unwrap();
    assert!(!report.passed);
    assert!(report.failures.iter().any(|f| f.contains("op rmsnorm is off by")), "{:?}", report.failures);
    for o in &report.ops {
        // The latent of attention goes through the same kernel, and nothing else does.
        assert!(o.passed || ["rmsnorm", "mla_attend"].contains(&o.op), "{o:?}");
    }
    assert!(report.text().lines().any(|l| l.starts_with("rmsnorm") && l.ends_with("WRONG")));
}

#[test]
fn a_single_token_is_refused() {
    let (checkpoint, _) = golden();
    let e = First::run(&open(&checkpoint, 4, None), &[1], 64, 0.0, &mut Unobserved).err().unwrap();
    assert_eq!(e.kind(), Kind::Usage);
}

fn trunkline(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_trunkline"));
    c.args(args).env_remove("TRUNKLINE_MODEL").env_remove("RUST_LOG").stdin(Stdio::null());
    c
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The one JSON object of a run.
fn object(out: &Output) -> Value {
    let text = text(&out.stdout);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_program_compares_a_folder() {
    let model = golden_dir("base").join("ckpt").display().to_string();
    let (_, ids) = golden();
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    let ids = ids.join(",");
    let args = ["compare", "--model", &model, "--ids", &ids, "--allow-software", "--prefill-chunk", "16"];
    let out = trunkline(&[&args[..], &["--json", "--quiet"]].concat()).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(text(&out.stderr), "");
    let v = object(&out);
    assert_eq!(
        (v["passed"].as_bool(), v["positions"].as_u64(), v["chunk"].as_u64()),
        (Some(true), Some(33), Some(16))
    );
    assert_eq!(v["failures"], serde_json::json!([]));
    assert_eq!(
        (v["devices"][0]["device"].as_str(), v["devices"][1]["device"].as_str()),
        (Some("cpu"), Some("gpu"))
    );
    assert!(v["devices"][0]["adapter"].is_null() && v["devices"][1]["adapter"].is_string());
    for device in [0, 1] {
        for key in ["nll", "perplexity", "load_s"] {
            assert!(v["devices"][device][key].is_number(), "{key}");
        }
        assert_eq!(v["devices"][device]["prefill"]["tokens"], 17);
        assert_eq!(v["devices"][device]["decode"]["tokens"], 16);
        assert!(v["devices"][device]["decode"]["tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(v["ops"]["passed"], true);
    assert_eq!(v["greedy"]["agree"], 33);
    assert!(v["logits"]["error"].as_f64().unwrap() <= v["logits"]["gate"].as_f64().unwrap());
    for l in v["layers"].as_array().unwrap() {
        assert!(l["out"].is_number() && l["worst"].is_number() && l["worst_point"].is_string(), "{l}");
    }

    // The table, in the other order and with part of the layers on the adapter.
    let out = trunkline(&[&args[..], &["--devices", "auto,cpu", "--vram", "2MB"]].concat()).output().unwrap();
    let table = text(&out.stdout);
    assert!(out.status.success(), "{}", text(&out.stderr));
    for part in ["rmsnorm", "head", "logits", "greedy tokens agree at 33 of 33", "hybrid", "decode tokens/s"]
    {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
    assert!(table.ends_with("\npassed\n"), "{table}");
}

#[test]
fn the_op_table_as_json() {
    let out = trunkline(&["compare", "--ops", "--json", "--allow-software"]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let v = object(&out);
    assert_eq!(v["passed"], true);
    for key in ["name", "backend", "kind", "driver"] {
        assert!(v["adapter"][key].as_str().is_some_and(|s| !s.is_empty()), "{key}");
    }
    let ops = v["ops"].as_array().unwrap();
    for name in ["matvec bf16", "matvec mxfp4", "rmsnorm", "kda_step", "mla_attend", "router"] {
        let op = ops.iter().find(|o| o["op"] == name).unwrap_or_else(|| panic!("{name}"));
        assert!(
            op["error"].as_f64().unwrap() <= op["gate"].as_f64().unwrap() && op["passed"] == true,
            "{op}"
        );
    }
}

#[test]
fn refusals() {
    let model = golden_dir("base").join("ckpt").display().to_string();
    for args in [
        vec!["--model", &model],
        vec!["--ids", "1"],
        vec!["--ids", "1,2,3", "--context", "2"],
        vec!["--ids", "1,2", "--devices", "cpu"],
        vec!["--ids", "1,2", "--devices", "cpu,tpu"],
        vec!["--ids", "1,2", "--devices", "cpu,cpu", "--allow-software"],
        vec!["--ids", "1,2", "--prompt", "x"],
        vec!["--ids", "1,2", "--device", "gpu"],
        vec!["--ops", "--ids", "1,2"],
    ] {
        let out = trunkline(&["compare"]).args(&args).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text(&out.stderr));
    }
    for args in [&["compare", "--allow-software"][..], &["compare", "--ops"]] {
        let out = trunkline(args).env("VK_ICD_FILENAMES", "/nonexistent").output().unwrap();
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(4), "{err}");
        assert!(
            err.contains("no adapter was found") && err.contains("hint: install a Vulkan driver"),
            "{err}"
        );
        assert_eq!(text(&out.stdout), "");
    }
}

/// The report on a card, at a software adapter's sizes.
#[test]
fn a_card_is_reported_with_parity_rates_and_tokens_per_second() {
    let temporary = tempfile::tempdir().unwrap();
    let out = trunkline(&["compare", "--card", "--json", "--allow-software"])
        .env("TMPDIR", temporary.path())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let v = object(&out);
    assert_eq!(
        (v["passed"].as_bool(), v["trunkline"].as_str()),
        (Some(true), Some(env!("CARGO_PKG_VERSION")))
    );
    for path in
        ["/adapter/name", "/adapter/driver", "/adapter/kind", "/system/os", "/system/isa", "/slice/widths"]
    {
        assert!(v.pointer(path).and_then(Value::as_str).is_some_and(|s| !s.is_empty()), "{path}");
    }
    assert_eq!((v["slice"]["layers"].as_u64(), v["parity"]["positions"].as_u64()), (Some(2), Some(24)));
    assert_eq!(v["parity"]["devices"][1]["device"], "gpu");
    assert_eq!(v["parity"]["ops"]["passed"], true);
    assert_eq!(v["decode_tokens_per_s"], v["parity"]["devices"][1]["decode"]["tokens_per_s"]);
    assert_eq!(
        (v["copy"]["kernel"].as_str(), v["copy"]["share_of_copy"].as_f64()),
        (Some("copy"), Some(1.0))
    );
    let kernels = v["kernels"].as_array().unwrap();
    let names: Vec<&str> = kernels.iter().filter_map(|k| k["kernel"].as_str()).collect();
    assert_eq!(names, ["matvec bf16", "matvec mxfp4", "matvec f32", "rmsnorm", "kda_step", "mla_attend"]);
    let copy = v["copy"]["gb_per_s"].as_f64().unwrap();
    for k in kernels {
        let n = |key: &str| k[key].as_f64().unwrap_or_else(|| panic!("{key} in {k}"));
        assert!(n("gb_per_s") > 0.0 && n("calls") >= 80.0, "{k}");
        assert!((n("gb_per_s") - n("bytes") / n("seconds") / 1e9).abs() <= 1e-6 * n("gb_per_s"), "{k}");
        assert!((n("share_of_copy") - n("gb_per_s") / copy).abs() <= 1e-6 * n("share_of_copy"), "{k}");
        let range = k["seconds_range"].as_array().unwrap();
        assert!(
            range[0].as_f64().unwrap() <= n("seconds") && n("seconds") <= range[1].as_f64().unwrap(),
            "{k}"
        );
        assert!(["device", "host"].contains(&k["clock"].as_str().unwrap()), "{k}");
    }
    // The slice is gone.
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);

    let out = trunkline(&["compare", "--card"]).env("VK_ICD_FILENAMES", "/nonexistent").output().unwrap();
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(4), "{err}");
    assert!(err.contains("no adapter was found") && err.contains("hint: install a Vulkan driver"), "{err}");
}
