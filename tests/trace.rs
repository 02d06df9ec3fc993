//! `--trace`: what the timeline of a run holds, on both devices, and that a run without it records nothing.

mod common;

use common::{Golden, golden_dir};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

const SOFTWARE: [&str; 3] = ["--device", "gpu", "--allow-software"];

/// A run of `args` on the base model with the prompt `p2`, whose trace goes to `file`.
fn command(verb: &str, file: Option<&Path>, args: &[&str]) -> Command {
    let ids: Vec<String> =
        Golden::open("base", "golden.safetensors").ids("p2.ids").iter().map(u32::to_string).collect();
    let mut c = Command::new(env!("CARGO_BIN_EXE_trunkline"));
    c.args([verb, "--json", "--ids", &ids.join(","), "--model"]).arg(golden_dir("base").join("ckpt"));
    if let Some(file) = file {
        c.arg("--trace").arg(file);
    }
    c.args(args).env_remove("TRUNKLINE_MODEL").env_remove("RUST_LOG").stdin(Stdio::null());
    c
}

fn last_line(out: &Output) -> Value {
    let text = String::from_utf8(out.stdout.clone()).unwrap();
    let line = text.lines().last().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&out.stderr)));
    serde_json::from_str(line).unwrap()
}

/// One complete event: its track by name, and its times in microseconds.
struct Event {
    track: String,
    name: String,
    ts: f64,
    dur: f64,
    args: Value,
}

impl Event {
    fn layer(&self) -> Option<u64> {
        self.args["layer"].as_u64()
    }
}

fn events(file: &Path) -> Vec<Event> {
    let trace: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(trace["otherData"]["dropped_events"], 0);
    let all = trace["traceEvents"].as_array().unwrap();
    let named = all.iter().filter(|e| e["ph"] == "M" && e["name"] == "thread_name");
    let tracks: HashMap<u64, String> = named
        .map(|e| (e["tid"].as_u64().unwrap(), e["args"]["name"].as_str().unwrap().to_string()))
        .collect();
    all.iter()
        .filter(|e| e["ph"] != "M")
        .map(|e| {
            assert_eq!(e["ph"], "X");
            Event {
                track: tracks[&e["tid"].as_u64().unwrap()].clone(),
                name: e["name"].as_str().unwrap().to_string(),
                ts: e["ts"].as_f64().unwrap(),
                dur: e["dur"].as_f64().unwrap(),
                args: e["args"].clone(),
            }
        })
        .collect()
}

/// Runs `c` to its end; the events of its trace all lie within the run. Also its last line.
fn traced(mut c: Command, file: &Path) -> (Vec<Event>, Value) {
    let start = Instant::now();
    let out = c.output().unwrap();
    let took = start.elapsed().as_micros() as f64;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let events = events(file);
    for e in &events {
        assert!(e.ts >= 0.0 && e.dur >= 0.0 && e.ts + e.dur <= took, "{} {} {}", e.name, e.ts, e.dur);
    }
    (events, last_line(&out))
}

fn on<'e>(events: &'e [Event], track: &'static str) -> impl Iterator<Item = &'e Event> {
    events.iter().filter(move |e| e.track.starts_with(track))
}

fn sum_of_bytes(events: &[Event], track: &'static str) -> u64 {
    on(events, track).map(|e| e.args["bytes"].as_u64().unwrap()).sum()
}

/// The base model's layers, and those of them with routed experts.
fn layers() -> (BTreeSet<u64>, BTreeSet<u64>) {
    use trunkline::checkpoint::config::Ffn;
    let checkpoint =
        trunkline::checkpoint::shards::Checkpoint::open(&[golden_dir("base").join("ckpt")]).unwrap();
    let all = checkpoint.config().layers.iter().enumerate();
    let moe = all.clone().filter(|(_, l)| l.ffn == Ffn::Moe).map(|(i, _)| i as u64).collect();
    (all.map(|(i, _)| i as u64).collect(), moe)
}

/// Events of one track do not overlap: each begins when the one before it has ended.
fn one_after_the_other(events: &[Event], track: &'static str) {
    let mut times: Vec<(f64, f64)> = on(events, track).map(|e| (e.ts, e.ts + e.dur)).collect();
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    for pair in times.windows(2) {
        // The file holds nanoseconds as decimal microseconds.
        assert!(pair[1].0 >= pair[0].1 - 2e-3, "{track}: {pair:?}");
    }
}

#[test]
fn a_run_on_the_cpu_shows_layers_operations_and_every_byte_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.json");
    let (events, done) = traced(command("generate", Some(&file), &["--max-tokens", "3"]), &file);
    let (all, moe) = layers();
    let layers: BTreeSet<u64> = on(&events, "layers").filter_map(Event::layer).collect();
    assert_eq!(layers, all);
    assert_eq!(on(&events, "layers").filter(|e| e.name == "output head").count(), 3, "one a pass");
    for op in ["matmul", "rmsnorm", "mix", "add"] {
        let found: BTreeSet<u64> =
            on(&events, "cpu ops").filter(|e| e.name == op).filter_map(Event::layer).collect();
        assert_eq!(found, all, "{op}");
    }
    for op in ["route", "gather", "scatter", "combine", "situ"] {
        let found: BTreeSet<u64> =
            on(&events, "cpu ops").filter(|e| e.name == op).filter_map(Event::layer).collect();
        assert!(found.is_superset(&moe), "{op} in {found:?} of {moe:?}");
    }
    for op in ["short_conv", "kda_gates", "recurrence", "norm_gate", "append", "attend"] {
        assert!(on(&events, "cpu ops").any(|e| e.name == op && e.layer().is_some()), "{op}");
    }
    assert!(on(&events, "cpu ops").all(|e| e.args["shape"].as_array().is_some_and(|s| s.len() == 2)));
    one_after_the_other(&events, "cpu ops");
    one_after_the_other(&events, "layers");

    assert_eq!(sum_of_bytes(&events, "reads"), done["bytes"]["nvme"].as_u64().unwrap());
    let experts: BTreeSet<u64> =
        on(&events, "reads").filter(|e| e.name.contains("expert")).filter_map(Event::layer).collect();
    assert_eq!(experts, moe);
    assert!(on(&events, "reads").all(|e| e.args["shard"].is_number()));
    assert_eq!(on(&events, "gpu").count() + on(&events, "uploads").count(), 0);
}

#[test]
fn a_run_on_the_gpu_shows_its_passes_by_layer_and_how_certain_their_place_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.json");
    let args = [&SOFTWARE[..], &["--max-tokens", "3"]].concat();
    let (events, done) = traced(command("generate", Some(&file), &args), &file);
    let (all, moe) = layers();
    let passes: Vec<&Event> = on(&events, "gpu").collect();
    assert_eq!(passes[0].track, format!("gpu: {}", done["adapter"].as_str().unwrap()));
    assert!(passes.iter().any(|e| e.name.contains("layer 1 ") && e.name.contains("matvec")));
    assert_eq!(passes.iter().filter_map(|e| e.layer()).collect::<BTreeSet<u64>>(), all);
    let routed = passes.iter().filter(|e| e.name.contains("router")).filter_map(|e| e.layer());
    assert_eq!(routed.collect::<BTreeSet<u64>>(), moe);
    for e in &passes {
        assert!(e.args["uncertainty_us"].as_f64().is_some_and(|u| u >= 0.0), "{} {}", e.name, e.args);
        assert!(e.layer().is_none_or(|l| e.name.starts_with(&format!("layer {l} /"))), "{}", e.name);
    }
    // A pass lies within its layer as the host saw it begin, and before the next read-back ended.
    let head_end = on(&events, "layers").map(|e| e.ts + e.dur).fold(0.0, f64::max);
    let first = on(&events, "layers").map(|e| e.ts).fold(f64::INFINITY, f64::min);
    assert!(passes.iter().all(|e| e.ts >= first && e.ts + e.dur <= head_end));
    assert_eq!(on(&events, "cpu ops").count(), 0);

    assert_eq!(sum_of_bytes(&events, "reads"), done["bytes"]["nvme"].as_u64().unwrap());
    let uploads: BTreeSet<u64> = on(&events, "uploads").filter_map(Event::layer).collect();
    assert_eq!(uploads, all);
    assert!(sum_of_bytes(&events, "uploads") >= done["bytes"]["upload"].as_u64().unwrap());
}

#[test]
fn a_hybrid_run_with_a_streamed_trunk_shows_both_devices_each_with_its_layers() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.json");
    let device = ["--device", "auto", "--allow-software", "--vram", "3MB"];
    let sizes = ["--ram", "1200kB", "--context", "32", "--prefill-chunk", "8", "--max-tokens", "2"];
    let c = command("generate", Some(&file), &[&device[..], &sizes].concat());
    let (events, done) = traced(c, &file);
    assert_eq!(done["device"], "hybrid");
    let cpu: BTreeSet<u64> = on(&events, "cpu ops").filter_map(Event::layer).collect();
    let gpu: BTreeSet<u64> =
        on(&events, "gpu").filter_map(Event::layer).filter(|l| !cpu.contains(l)).collect();
    assert!(!gpu.is_empty());
    assert_eq!(&cpu | &gpu, layers().0);
    assert!(on(&events, "uploads").any(|e| e.name.ends_with("activations")));
    assert_eq!(sum_of_bytes(&events, "reads"), done["bytes"]["nvme"].as_u64().unwrap());
    // Streamed: some layer's trunk is read again by the second pass.
    let mut trunk: Vec<(u64, &str)> = on(&events, "reads")
        .filter(|e| !e.name.contains("expert "))
        .filter_map(|e| Some((e.layer()?, e.name.as_str())))
        .collect();
    let all = trunk.len();
    trunk.sort_unstable();
    trunk.dedup();
    assert!(trunk.len() < all, "{trunk:?}");
}

#[test]
fn eval_is_traced_as_well_and_its_result_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.json");
    let (events, done) = traced(command("eval", Some(&file), &["--prefill-chunk", "8"]), &file);
    assert_eq!(sum_of_bytes(&events, "reads"), done["bytes"]["nvme"].as_u64().unwrap());
    let passes: BTreeSet<u64> = on(&events, "layers").filter_map(|e| e.args["pass"].as_u64()).collect();
    assert_eq!(passes.len() as u64, done["tokens"].as_u64().unwrap().div_ceil(8));
    let plain = command("eval", None, &["--prefill-chunk", "8"]).current_dir(dir.path()).output().unwrap();
    assert_eq!(last_line(&plain)["nll"], done["nll"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no trace unless asked for");
}

#[test]
fn an_interrupted_run_leaves_a_whole_trace() {
    let dir = tempfile::tempdir().unwrap();
    for device in [&[][..], &SOFTWARE] {
        let file = dir.path().join("t.json");
        let args = [device, &["--max-tokens", "3000", "--ignore-eos"]].concat();
        let mut child = command("generate", Some(&file), &args).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("\"token\"") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the run ended early");
        }
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let events = events(&file);
        assert!(on(&events, "layers").any(|e| e.layer() == Some(1)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_failing_run_leaves_a_whole_trace_and_its_own_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.json");
    // More memory than there is to be had with so little: refused after the trace was begun.
    let out = command("generate", Some(&file), &["--ram", "1kB"]).output().unwrap();
    assert_eq!(out.status.code(), Some(4), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(events(&file).len(), 0);

    let missing = dir.path().join("missing/t.json");
    let out = command("generate", Some(&missing), &[]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(!text.contains("\"plan\""), "refused before the run: {text}");
    let err = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(err.contains("the folder of the file to write") && err.contains("missing/t.json"), "{err}");
}
