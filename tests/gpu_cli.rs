//! `--device` as a user meets it, with and without an adapter. The tests that need one fail where there is none: install
//! libvulkan1 and mesa-vulkan-drivers.

mod common;

use std::process::{Command, Output, Stdio};
use trunkline::compute::gpu::{AdapterKind, adapter};

/// A run on the adapters of this machine.
fn run(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_trunkline"));
    c.args(["generate", "--json"]).args(args);
    c.env_remove("TRUNKLINE_MODEL").env_remove("RUST_LOG").stdin(Stdio::null());
    c
}

/// A short run of the embedded demo on the adapters of this machine.
fn generate(args: &[&str]) -> Command {
    run(&[&["--max-tokens", "2"], args].concat())
}

/// The same on a machine without any.
fn without_adapter(args: &[&str]) -> Output {
    generate(args).env("VK_ICD_FILENAMES", "/nonexistent").output().unwrap()
}

fn error(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn done(out: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let last = text.lines().last().unwrap_or_else(|| panic!("{}", error(out)));
    serde_json::from_str(last).unwrap()
}

#[test]
fn gpu_without_an_adapter_exits_4() {
    let out = without_adapter(&["--device", "gpu"]);
    assert_eq!(out.status.code(), Some(4), "{}", error(&out));
    let err = error(&out);
    assert!(err.contains("error: no usable adapter: no adapter was found"), "{err}");
    assert!(err.contains("hint: ") && err.contains("--device cpu"), "{err}");
}

#[test]
fn auto_without_an_adapter_runs_on_the_cpu_and_says_so_once() {
    for args in [&[][..], &["--device", "auto"]] {
        let out = without_adapter(args);
        assert_eq!(out.status.code(), Some(0), "{}", error(&out));
        let said = error(&out).lines().filter(|l| l.starts_with("no GPU: ") && l.contains("CPU")).count();
        assert_eq!(said, 1, "{}", error(&out));
        let done = done(&out);
        assert_eq!((done["device"].as_str(), done["adapter"].is_null()), (Some("cpu"), true));
    }
    // A named adapter that is not there is a mistake to be told.
    let out = without_adapter(&["--adapter", "RTX"]);
    assert_eq!(out.status.code(), Some(4), "{}", error(&out));
}

#[test]
fn a_software_adapter_is_taken_only_when_allowed() {
    let found = adapter::list();
    assert!(!found.is_empty(), "no Vulkan adapter: apt-get install -y libvulkan1 mesa-vulkan-drivers");
    let out = generate(&["--device", "gpu", "--allow-software"]).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", error(&out));
    assert_eq!(done(&out)["device"], "gpu");
    if found.iter().any(|a| a.kind != AdapterKind::Software) {
        // With a card in the machine there is nothing to refuse.
        return assert_eq!(generate(&["--device", "gpu"]).output().unwrap().status.code(), Some(0));
    }
    let out = generate(&["--device", "gpu"]).output().unwrap();
    let err = error(&out);
    assert_eq!(out.status.code(), Some(4), "{err}");
    // The list of what was found.
    assert!(found.iter().all(|a| err.contains(&a.line())), "{err}");
    assert!(err.contains("hint: pass --allow-software"), "{err}");
    let out = generate(&[]).output().unwrap();
    assert_eq!((out.status.code(), done(&out)["device"].as_str()), (Some(0), Some("cpu")));
    assert!(error(&out).contains("no GPU: no hardware adapter"), "{}", error(&out));
}

#[test]
fn adapter_flags_mean_nothing_on_the_cpu() {
    for flag in [&["--allow-software"][..], &["--adapter", "0"], &["--vram", "1GB"], &["--gpu-debug"]] {
        let out = generate(&[&["--device", "cpu"], flag].concat()).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{}", error(&out));
        assert!(error(&out).contains(flag[0]), "{}", error(&out));
    }
    let out = generate(&["--device", "cpu", "--vram", "0"]).output().unwrap();
    assert_eq!((out.status.code(), done(&out)["device"].as_str()), (Some(0), Some("cpu")));
}

#[test]
fn layers_move_to_the_gpu_as_vram_grows() {
    let golden = common::Golden::open("base", "golden.safetensors");
    let m = common::golden_dir("base").join("ckpt").display().to_string();
    let ids: Vec<String> = golden.ids("p3.ids").iter().map(u32::to_string).collect();
    let mut layers = Vec::new();
    for vram in ["0", "2MB", "4MB", "64MB"] {
        let args =
            ["--model", &m, "--ids", &ids.join(","), "--max-tokens", "16", "--ignore-eos", "--context", "64"];
        let device = ["--device", "auto", "--allow-software", "--vram", vram, "--prefill-chunk", "16"];
        let out = run(&[&args[..], &device[..]].concat()).output().unwrap();
        assert!(out.status.success(), "{vram}: {}", error(&out));
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let plan: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        layers.push((plan["gpu_layers"].as_u64().unwrap(), plan["device"].as_str().unwrap().to_owned()));
        let done = done(&out);
        let found: Vec<u32> =
            done["ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
        assert_eq!(found, golden.ids("p3.greedy.tokens"), "--vram {vram}");
    }
    assert_eq!((layers[0].0, layers[3].0), (0, 9), "{layers:?}");
    assert!(layers[1].0 >= 1 && layers[2].0 > layers[1].0 && layers[2].0 < 9, "{layers:?}");
    assert_eq!(layers.iter().map(|l| l.1.as_str()).collect::<Vec<_>>(), ["cpu", "hybrid", "hybrid", "gpu"]);
}
