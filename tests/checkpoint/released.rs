//! The release at its full size, with holes.

use super::common::tiny::{run, text};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use trunkline::checkpoint::synth::{Preset, SynthOptions, synth};

/// The peak of memory of `verify` on `dir` in bytes, all pages counted, and what it printed.
fn verify_and_watch(dir: &Path) -> (u64, Value) {
    let child = Command::new(env!("CARGO_BIN_EXE_trunkline"))
        .args(["verify", "--json", "--model"])
        .arg(dir)
        .env_remove("TRUNKLINE_MODEL")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let mut peak = 0;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            let now = std::fs::read_to_string(&status).unwrap_or_default();
            let line = now.lines().find_map(|l| l.strip_prefix("VmHWM:"));
            let kilobytes = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            peak = peak.max(kilobytes.unwrap_or(0) * 1024);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        peak
    });
    let output = child.wait_with_output().unwrap();
    drop(stop);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    (watch.join().unwrap(), serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_release_opens_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("k3");
    let begun = Instant::now();
    let options = SynthOptions { preset: Preset::Released, sparse: true, ..SynthOptions::default() };
    let report = synth(&dir, &options, &|_, _| Ok(())).unwrap();
    let written = begun.elapsed();
    assert!(report.bytes < 500_000_000, "{report:?}");
    let begun = Instant::now();
    let (peak, said) = verify_and_watch(&dir);
    println!("written in {written:?}, verified in {:?}, peak {peak} bytes", begun.elapsed());
    assert_eq!(said["shards"], 96);
    assert_eq!(said["tensors"], 497_220);
    assert_eq!(said["experts"], 92 * 896);
    assert!(peak > 0 && peak < 120_000_000, "{peak}");
    let index = std::fs::read_to_string(dir.join("model.safetensors.index.json")).unwrap();
    assert!(index.starts_with(r#"{"metadata":{"total_size":1560860324864}"#));
    assert!(text(&run(&["verify", "--model", dir.to_str().unwrap()]), 0).contains("1.56 TB"));
}
