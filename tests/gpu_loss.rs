//! A GPU that is lost in mid-decode, as a user meets it: exit 1, a cause, the session of the last save, and the way on.

mod common;

use serde_json::Value;
use std::process::{Command, Output};

fn run(args: &[&str], lose_after: Option<u64>) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_trunkline"));
    c.args(args).env_remove("TRUNKLINE_MODEL");
    if let Some(n) = lose_after {
        c.env("TRUNKLINE_LOSE_GPU_AFTER", n.to_string());
    }
    c.output().unwrap()
}

fn last(out: &Output) -> Value {
    let text = String::from_utf8_lossy(&out.stdout);
    let line = text.lines().last().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&out.stderr)));
    serde_json::from_str(line).unwrap()
}

#[test]
fn c24_a_lost_device_ends_the_run_with_a_way_on() {
    let dir = tempfile::tempdir().unwrap();
    let m = common::golden_dir("base").join("ckpt").display().to_string();
    let base = ["generate", "--model", &m, "--ids", "3,1,4", "--max-tokens", "40", "--ignore-eos", "--json"];
    let on_cpu = last(&run(&[&base[..], &["--device", "cpu"]].concat(), None));
    for device in ["gpu", "auto"] {
        let file = dir.path().join(device).display().to_string();
        let gpu =
            [&base[..], &["--allow-software", "--session", &file, "--save-every", "1ms", "--device", device]]
                .concat();
        let lost = run(&gpu, Some(1500));
        let err = String::from_utf8_lossy(&lost.stderr);
        assert_eq!(lost.status.code(), Some(1), "{device}: {err}");
        assert!(err.contains("lost"), "{device}: {err}");
        let hint = err.lines().find(|l| l.starts_with("hint: ")).unwrap_or_else(|| panic!("{device}: {err}"));
        assert!(hint.contains("--device cpu --session"), "{device}: {hint}");
        let error = last(&lost);
        assert_eq!((&error["event"], &error["exit"]), (&"error".into(), &1.into()), "{device}: {error}");
        let reached = error["ids"].as_array().unwrap().len();
        assert!(reached > 0 && reached < 40, "{device}: {reached} tokens before the loss");
        // The way on that the hint names.
        let resumed = run(&[&base[..], &["--device", "cpu", "--session", &file]].concat(), None);
        assert!(resumed.status.success(), "{device}: {}", String::from_utf8_lossy(&resumed.stderr));
        assert_eq!(last(&resumed)["ids"], on_cpu["ids"], "{device}");
    }
}
