//! The program as a user runs it: exit codes, streams, JSON, sessions, interruption.

mod common;

use common::{Golden, golden_dir};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn trunkline(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_trunkline"));
    c.args(args).env_remove("TRUNKLINE_MODEL").env_remove("RUST_LOG").stdin(Stdio::null());
    c
}

fn model(set: &str) -> String {
    golden_dir(set).join("ckpt").display().to_string()
}

fn run(args: &[&str]) -> Output {
    trunkline(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn lines(out: &Output) -> Vec<Value> {
    text(&out.stdout)
        .lines()
        .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")))
        .collect()
}

#[track_caller]
fn fails(out: &Output, code: i32, parts: &[&str]) {
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{err}");
    let line =
        err.lines().find(|l| l.starts_with("error: ")).unwrap_or_else(|| panic!("no error line: {err}"));
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

#[test]
fn generate_gives_the_reference_tokens_in_both_forms() {
    let golden = Golden::open("base", "golden.safetensors");
    let ids: Vec<String> = golden.ids("p3.ids").iter().map(u32::to_string).collect();
    let expected = golden.ids("p3.greedy.tokens");
    let m = model("base");
    let args = ["generate", "--model", &m, "--ids", &ids.join(","), "--max-tokens", "16", "--ignore-eos"];
    let plain = run(&args);
    assert!(plain.status.success(), "{}", text(&plain.stderr));
    let found: Vec<u32> = text(&plain.stdout).split_whitespace().map(|w| w.parse().unwrap()).collect();
    assert_eq!(found, expected);

    let out = run(&[&args[..], &["--json", "--quiet"]].concat());
    assert_eq!(text(&out.stderr), "", "quiet");
    let events = lines(&out);
    let kinds: Vec<&str> = events.iter().filter_map(|e| e["event"].as_str()).collect();
    assert_eq!(kinds[0], "plan");
    assert!(
        kinds[1..17].iter().all(|k| *k == "token") && kinds[17] == "done" && kinds.len() == 18,
        "{kinds:?}"
    );
    let done = &events[17];
    let as_ids = |v: &Value| -> Vec<u32> {
        v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect()
    };
    assert_eq!(as_ids(&done["ids"]), expected);
    assert_eq!(as_ids(&done["prompt_ids"]), golden.ids("p3.ids"));
    assert_eq!(done["finish_reason"], "length");
    assert_eq!(done["device"], "cpu");
    assert!(done["adapter"].is_null());
    assert_eq!(done["usage"]["prompt_tokens"], 33);
    assert_eq!(done["usage"]["completion_tokens"], 16);
    for path in [
        "/timings/load_s",
        "/timings/prefill_s",
        "/timings/decode_s",
        "/timings/tokens_per_s",
        "/bytes/nvme",
        "/bytes/ram",
        "/bytes/vram",
        "/bytes/upload",
        "/experts/requests",
        "/experts/vram_hits",
        "/experts/ram_hits",
        "/experts/misses",
        "/experts/reused_from_earlier_token",
        "/peak/rss",
        "/peak/vram",
    ] {
        assert!(done.pointer(path).is_some_and(Value::is_number), "{path} in {done}");
    }
    let e = &done["experts"];
    let n = |k: &str| e[k].as_u64().unwrap();
    assert!(
        n("misses") > 0 && n("ram_hits") > 0 && n("requests") == n("misses") + n("ram_hits") + n("vram_hits")
    );
}

#[test]
fn a_stop_id_ends_the_text_and_is_counted() {
    let golden = Golden::open("base", "golden.safetensors");
    let expected = golden.ids("p2.greedy.tokens");
    let ids: Vec<String> = golden.ids("p2.ids").iter().map(u32::to_string).collect();
    let (m, stop) = (model("base"), expected[3].to_string());
    let out = run(&[
        "generate",
        "--model",
        &m,
        "--ids",
        &ids.join(","),
        "--stop-id",
        &stop,
        "--ignore-eos",
        "--json",
    ]);
    let events = lines(&out);
    let done = events.last().unwrap();
    assert_eq!(done["finish_reason"], "stop");
    assert_eq!(done["usage"]["completion_tokens"], 4);
}

#[test]
fn bad_usage_exits_2_with_one_line() {
    let m = model("base");
    for (args, part) in [
        (vec!["generate", "--model", &m], "prompt"),
        (vec!["generate", "--model", &m, "--ids", "1,512"], "512"),
        (vec!["generate", "--model", &m, "--ids", "1", "--temperature", "-1"], "--temperature"),
        (vec!["generate", "--model", &m, "--ids", "1", "--top-p", "0"], "--top-p"),
        (vec!["generate", "--model", &m, "--ids", "1,2,3", "--context", "2"], "context"),
        (vec!["generate", "--model", &m, "--ids", "1", "--context", "5000"], "4096"),
        (vec!["generate", "--model", &m, "--prompt-file", "/nonexistent/p.txt"], "p.txt"),
        (vec!["eval", "--model", &m, "--ids", "1"], "2"),
        (vec!["compare", "--ops", "--model", &m], "--model"),
        (vec!["compare", "--card", "--model", &m], "--model"),
        (vec!["compare", "--ops", "--threads", "2"], "--threads"),
    ] {
        fails(&run(&args), 2, &[part]);
    }
    for args in [
        vec!["generate", "--no-such-flag"],
        vec!["generate", "--ids", "1", "--prompt", "x"],
        vec!["generate", "--ids", "x"],
        vec!["generate", "--max-tokens", "0"],
        vec!["generate", "--save-every", "5s", "--ids", "1"],
        vec!["generate", "--ram", "lots", "--ids", "1"],
        vec!["generate", "--io-depth", "999999999", "--ids", "1"],
        vec!["generate", "--threads", "0", "--ids", "1"],
        vec!["no-such-verb"],
        vec![],
    ] {
        assert_eq!(run(&args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn refusals_exit_3_and_name_the_file() {
    fails(&run(&["generate", "--model", "/nonexistent/model", "--ids", "1"]), 3, &["/nonexistent/model"]);
    let empty = tempfile::tempdir().unwrap();
    let dir = empty.path().display().to_string();
    fails(&run(&["generate", "--model", &dir, "--ids", "1"]), 3, &["config.json"]);
    let m = model("base");
    fails(&run(&["generate", "--model", &m, "--prompt", "x"]), 3, &["no tokenizer", "tiktoken.model"]);
}

#[test]
fn a_budget_below_the_least_exits_4_with_the_sum() {
    let m = model("base");
    let out = run(&["generate", "--model", &m, "--ids", "1", "--ram", "1MB"]);
    fails(&out, 4, &["does not fit", "1000000", "state"]);
    // And one that forces the trunk to be streamed gives the same ids.
    let streamed = run(&[
        "generate",
        "--model",
        &m,
        "--ids",
        "1,2,3",
        "--max-tokens",
        "8",
        "--context",
        "64",
        "--ram",
        "2MB",
        "--json",
    ]);
    let whole =
        run(&["generate", "--model", &m, "--ids", "1,2,3", "--max-tokens", "8", "--context", "64", "--json"]);
    let (a, b) = (lines(&streamed), lines(&whole));
    assert!(a[0]["memory"]["streamed"].as_u64().unwrap() > 0, "{}", a[0]);
    assert_eq!(b[0]["memory"]["streamed"], 0);
    assert_eq!(a.last().unwrap()["ids"], b.last().unwrap()["ids"]);
    assert!(a.last().unwrap()["bytes"]["nvme"].as_u64() > b.last().unwrap()["bytes"]["nvme"].as_u64());
}

#[test]
fn eval_agrees_with_the_reference_logits() {
    let golden = Golden::open("toggles", "golden.safetensors");
    let ids = golden.ids("p3.ids");
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let (m, file) = (model("toggles"), path.display().to_string());
    let out = run(&[
        "eval",
        "--model",
        &m,
        "--ids",
        &list.join(","),
        "--logits",
        &file,
        "--json",
        "--prefill-chunk",
        "7",
    ]);
    let done = lines(&out).pop().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!(logits.shape(), [ids.len(), 500]);
    let values: Vec<f32> =
        logits.data().chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    let reference = golden.f32("p3.logits");
    common::assert_close("eval logits", &values, &reference, 3e-4);
    let mut nll = 0.0;
    for (t, next) in ids[1..].iter().enumerate() {
        let row: Vec<f64> = reference[t * 500..(t + 1) * 500].iter().map(|v| f64::from(*v)).collect();
        let max = row.iter().copied().fold(f64::MIN, f64::max);
        nll += max + row.iter().map(|v| (v - max).exp()).sum::<f64>().ln() - row[*next as usize];
    }
    nll /= (ids.len() - 1) as f64;
    let found = done["nll"].as_f64().unwrap();
    assert!((found - nll).abs() <= 1e-3 * nll, "{found} for {nll}");
    assert!((done["perplexity"].as_f64().unwrap() - found.exp()).abs() <= 1e-6 * found.exp());
    assert_eq!(done["tokens"], ids.len());
}

#[test]
fn a_session_goes_on_with_the_ids_of_an_unbroken_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.session").display().to_string();
    let m = model("base");
    for sampling in [&[][..], &["--temperature", "1.3", "--top-p", "0.9", "--seed", "7"][..]] {
        let base =
            [&["generate", "--model", &m, "--ids", "5,6,7", "--json", "--ignore-eos"][..], sampling].concat();
        let ids = |extra: &[&str]| {
            let out = run(&[&base[..], extra].concat());
            assert!(out.status.success(), "{}", text(&out.stderr));
            lines(&out).pop().unwrap()["ids"].clone()
        };
        let unbroken = ids(&["--max-tokens", "20"]);
        let _ = std::fs::remove_file(&file);
        let first = ids(&["--max-tokens", "8", "--session", &file]);
        assert_eq!(first.as_array().unwrap()[..], unbroken.as_array().unwrap()[..8]);
        assert_eq!(ids(&["--max-tokens", "20", "--session", &file]), unbroken);
        assert_eq!(
            ids(&["--max-tokens", "20", "--session", &file]),
            unbroken,
            "a finished run is the same again"
        );
        // Without a prompt the session itself is continued.
        let more =
            run(&[
                &[
                    "generate",
                    "--model",
                    &m,
                    "--json",
                    "--ignore-eos",
                    "--max-tokens",
                    "3",
                    "--session",
                    &file,
                ][..],
                sampling,
            ]
            .concat());
        let done = lines(&more).pop().unwrap();
        assert_eq!(done["usage"]["prompt_tokens"], 23, "{done}");
        // Another way to choose the ids is not continued with the old ones.
        let other = run(&[
            &base[..],
            &["--max-tokens", "20", "--session", &file, "--seed", "8", "--temperature", "2"],
        ]
        .concat());
        assert!(other.status.code() == Some(2) || lines(&other).pop().unwrap()["ids"] != unbroken);
    }
}

#[test]
fn a_foreign_session_exits_3() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.session").display().to_string();
    let (base, toggles) = (model("base"), model("toggles"));
    assert!(
        run(&["generate", "--model", &base, "--ids", "1", "--max-tokens", "2", "--session", &file])
            .status
            .success()
    );
    fails(
        &run(&["generate", "--model", &toggles, "--ids", "1", "--max-tokens", "2", "--session", &file]),
        3,
        &["s.session", "another model"],
    );
}

/// Starts a generation that would run for minutes, and returns once it has printed some tokens.
fn long_run(
    session: &Path,
    extra: &[&str],
) -> (std::process::Child, BufReader<std::process::ChildStdout>, Vec<Value>) {
    let (m, file) = (model("base"), session.display().to_string());
    let args = [
        "generate",
        "--model",
        &m,
        "--ids",
        "3,1,4",
        "--max-tokens",
        "4000",
        "--ignore-eos",
        "--json",
        "--session",
        &file,
    ];
    let mut child = trunkline(&[&args[..], extra].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut events = Vec::new();
    while events.len() < 40 {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "ended early: {events:?}");
        events.push(serde_json::from_str(&line).unwrap());
    }
    (child, out, events)
}

fn unbroken(n: usize) -> Vec<Value> {
    let m = model("base");
    let out = run(&[
        "generate",
        "--model",
        &m,
        "--ids",
        "3,1,4",
        "--max-tokens",
        &n.to_string(),
        "--ignore-eos",
        "--json",
    ]);
    lines(&out).pop().unwrap()["ids"].as_array().unwrap().clone()
}

#[test]
fn ctrl_c_saves_the_session_and_exits_130() {
    let dir = tempfile::tempdir().unwrap();
    let session = dir.path().join("s.session");
    let (mut child, mut out, _) = long_run(&session, &[]);
    let asked = Instant::now();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(child.id() as i32).unwrap(),
        rustix::process::Signal::INT,
    )
    .unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(asked.elapsed() < Duration::from_secs(10));
    let last: Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "error");
    assert_eq!(last["exit"], 130);
    assert!(!rest.contains("\"done\""));
    let reached = last["ids"].as_array().unwrap().clone();
    let n = reached.len() + 10;
    let m = model("base");
    let (file, max) = (session.display().to_string(), n.to_string());
    let resumed = run(&[
        "generate",
        "--model",
        &m,
        "--ids",
        "3,1,4",
        "--max-tokens",
        &max,
        "--ignore-eos",
        "--json",
        "--session",
        &file,
    ]);
    let ids = lines(&resumed).pop().unwrap()["ids"].as_array().unwrap().clone();
    assert_eq!(ids[..reached.len()], reached);
    assert_eq!(ids, unbroken(n));
}

#[test]
fn c13_kill_9_leaves_a_whole_session_and_no_done_line() {
    let dir = tempfile::tempdir().unwrap();
    let session = dir.path().join("s.session");
    let (mut child, mut out, events) = long_run(&session, &["--save-every", "1ms"]);
    child.kill().unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    child.wait().unwrap();
    assert!(!rest.contains("\"done\""));
    let m = model("base");
    let file = session.display().to_string();
    let resumed = run(&[
        "generate",
        "--model",
        &m,
        "--ids",
        "3,1,4",
        "--max-tokens",
        "60",
        "--ignore-eos",
        "--json",
        "--session",
        &file,
    ]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    assert_eq!(lines(&resumed).pop().unwrap()["ids"].as_array().unwrap()[..], unbroken(60)[..]);
    // What was printed before the kill was not lost but for one interval: the prefill at least was taken over.
    assert!(text(&resumed.stderr).contains("taken over"), "{}", text(&resumed.stderr));
    assert!(events.len() >= 40);
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let m = model("base");
    let mut child =
        trunkline(&["generate", "--model", &m, "--ids", "1", "--max-tokens", "2000", "--ignore-eos"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    let mut first = [0u8; 1];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut first).unwrap();
    drop(out);
    let status = child.wait_with_output().unwrap();
    assert_eq!(status.status.code(), Some(0), "{}", text(&status.stderr));
    assert!(!text(&status.stderr).contains("error"), "{}", text(&status.stderr));
}

#[test]
fn help_and_version_are_complete() {
    assert!(text(&run(&["--version"]).stdout).starts_with("trunkline 0."));
    let help = text(&run(&["--help"]).stdout);
    for verb in ["generate", "eval", "compare", "tokenize", "verify", "synth"] {
        assert!(help.contains(verb), "{verb}");
        let own = run(&[verb, "--help"]);
        assert!(own.status.success() && own.stdout.len() > 200, "{verb}");
    }
}

#[test]
fn c18_a_value_that_is_not_finite_ends_the_run() {
    let c = common::tiny::TinyCheckpoint::new();
    let m = c.path().display().to_string();
    let good =
        run(&["generate", "--model", &m, "--ids", "1,2,3", "--max-tokens", "3", "--json", "--ignore-eos"]);
    assert_eq!(lines(&good).last().unwrap()["event"], "done");
    c.edit_tensor(common::tiny::SHARDS, "language_model.model.norm.weight", |t| {
        t.data[..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    let bad =
        run(&["generate", "--model", &m, "--ids", "1,2,3", "--max-tokens", "3", "--json", "--ignore-eos"]);
    fails(&bad, 1, &["not finite", "position 2"]);
    let events = lines(&bad);
    assert!(events.iter().all(|e| e["event"] != "token" && e["event"] != "done"), "{events:?}");
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["exit"]), (&"error".into(), &1.into()));
}

#[test]
fn what_is_no_regular_file_is_never_replaced() {
    let m = model("base");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().display().to_string();
    for args in [
        vec!["eval", "--model", &m, "--ids", "1,2,3", "--logits", &folder],
        vec!["generate", "--model", &m, "--ids", "1", "--session", &folder],
        vec!["generate", "--model", &m, "--ids", "1", "--trace", &folder],
    ] {
        fails(&run(&args), 1, &["no regular file", &folder]);
    }
    assert!(dir.path().is_dir());
    // A link is followed, not replaced.
    let (file, link) = (dir.path().join("s.session"), dir.path().join("link"));
    std::fs::write(&file, b"").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let out = run(&["eval", "--model", &m, "--ids", "1,2,3", "--logits", &link.display().to_string()]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(link.is_symlink() && std::fs::metadata(&file).unwrap().len() > 1000);
}

#[test]
fn usage_errors_are_one_line_and_name_the_flag() {
    for (args, part) in [
        (vec!["generate", "--bogus"], "--bogus"),
        (vec!["generate", "--max-tokens", "-5"], "--max-tokens"),
        (vec!["generate", "--ids", "1", "--prompt", "x"], "--prompt"),
    ] {
        let out = run(&args);
        fails(&out, 2, &[part]);
        let err = text(&out.stderr);
        assert!(err.lines().all(|l| l.starts_with("error: ") || l.starts_with("hint: ")), "{err}");
    }
}

#[test]
fn an_early_failure_ends_its_json_too() {
    let m = model("base");
    let out = run(&["generate", "--model", &m, "--ids", "512", "--json"]);
    let events = lines(&out);
    assert_eq!((events.len(), &events[0]["event"], &events[0]["exit"]), (1, &"error".into(), &2.into()));
}

#[test]
fn folders_of_different_models_are_refused() {
    let (a, b) = (model("base"), model("toggles"));
    fails(
        &run(&["generate", "--model", &a, "--model", &b, "--ids", "1"]),
        3,
        &["different models", "toggles"],
    );
}
