//! A timeline of a run in the JSON that Perfetto and Chrome open: what was computed, read and uploaded, and when.
//!
//! Nothing is recorded, and no clock is read, unless a trace was asked for: the places that are timed hold an
//! `Option` and [`begin`] looks at it.

use super::target;
use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::json;
use std::borrow::Cow;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Events kept, some 150 MB of them; later ones are counted and left out.
const LIMIT: usize = 1 << 20;

/// The line of the timeline that an event lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Track<'a> {
    /// Whole layers, as the pass goes through them.
    Layers,
    /// Operations on the CPU.
    CpuOps,
    /// Reads from the checkpoint's files: a line for each thread that reads.
    Reads,
    /// Copies to the GPU, as long as the host is busy with them.
    Uploads,
    /// Passes on the GPU of this name.
    Gpu(&'a str),
}

/// What is known about an event beside its time.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Details {
    /// Zero-based layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Bytes read or copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Rows and columns of an operation's result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape: Option<[usize; 2]>,
    /// Number of the shard that was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<u16>,
    /// Forward pass, counted from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass: Option<u64>,
    /// How far the event may lie from its true time, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncertainty_us: Option<f64>,
}

struct Event {
    track: usize,
    name: Cow<'static, str>,
    /// Since the start of the trace.
    begin: Duration,
    length: Duration,
    details: Details,
}

#[derive(Default)]
struct Recorded {
    tracks: Vec<String>,
    events: Vec<Event>,
    dropped: u64,
}

/// The events of a run.
pub struct Trace {
    start: Instant,
    recorded: Mutex<Recorded>,
}

/// Something that is being timed.
pub struct Span<'t> {
    trace: &'t Trace,
    from: Instant,
}

/// Begins to time something, if there is a trace.
pub fn begin(trace: &Option<Arc<Trace>>) -> Option<Span<'_>> {
    trace.as_deref().map(|trace| Span { trace, from: Instant::now() })
}

impl Span<'_> {
    /// Ends it now.
    pub fn end(self, track: Track<'_>, name: impl Into<Cow<'static, str>>, details: Details) {
        let from = self.from.saturating_duration_since(self.trace.start);
        self.trace.add(track, name, from, self.from.elapsed(), details);
    }
}

impl Default for Trace {
    fn default() -> Trace {
        Trace::new()
    }
}

impl Trace {
    /// An empty trace that starts now.
    pub fn new() -> Trace {
        Trace { start: Instant::now(), recorded: Mutex::default() }
    }

    /// The time on the trace's clock at `at`.
    pub fn at(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.start)
    }

    /// Records an event that began `begin` after the start of the trace. Past the limit it is only counted.
    pub fn add(
        &self,
        track: Track<'_>,
        name: impl Into<Cow<'static, str>>,
        begin: Duration,
        length: Duration,
        details: Details,
    ) {
        let thread = std::thread::current();
        let label: Cow<'_, str> = match track {
            Track::Layers => "layers".into(),
            Track::CpuOps => "cpu ops".into(),
            Track::Reads => format!("reads: {}", thread.name().unwrap_or("unnamed thread")).into(),
            Track::Uploads => "uploads".into(),
            Track::Gpu(adapter) => format!("gpu: {adapter}").into(),
        };
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.events.len() == LIMIT {
            recorded.dropped += 1;
            return;
        }
        let track = recorded.tracks.iter().position(|t| *t == label).unwrap_or_else(|| {
            recorded.tracks.push(label.into_owned());
            recorded.tracks.len() - 1
        });
        recorded.events.push(Event { track, name: name.into(), begin, length, details });
    }

    /// Writes everything recorded so far as one JSON object.
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        #[derive(Serialize)]
        struct Complete<'e> {
            name: &'e str,
            ph: &'static str,
            pid: usize,
            tid: usize,
            ts: f64,
            dur: f64,
            args: &'e Details,
        }
        let micros = |d: Duration| d.as_nanos() as f64 / 1e3;
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
        serde_json::to_writer(&mut *out, &json!({"dropped_events": recorded.dropped}))?;
        writeln!(out, ",\"traceEvents\":[")?;
        serde_json::to_writer(
            &mut *out,
            &json!({"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "trunkline"}}),
        )?;
        for (i, track) in recorded.tracks.iter().enumerate() {
            let meta =
                json!({"name": "thread_name", "ph": "M", "pid": 1, "tid": i + 1, "args": {"name": track}});
            out.write_all(b",\n")?;
            serde_json::to_writer(&mut *out, &meta)?;
        }
        for e in &recorded.events {
            let event = Complete {
                name: &e.name,
                ph: "X",
                pid: 1,
                tid: e.track + 1,
                ts: micros(e.begin),
                dur: micros(e.length),
                args: &e.details,
            };
            out.write_all(b",\n")?;
            serde_json::to_writer(&mut *out, &event)?;
        }
        out.write_all(b"\n]}\n")
    }
}

/// The file that a trace is written to when the run ends: it takes its name only when it is whole.
struct TraceFile {
    out: BufWriter<tempfile::NamedTempFile>,
    path: PathBuf,
}

impl TraceFile {
    /// Opened before the run: a place that cannot be written is told before hours of work.
    fn create(path: &Path) -> Result<TraceFile> {
        let fail = |e| Error::io("cannot write the trace", e).file(path);
        let path = target::resolve(path)?;
        let file = target::unfinished(&path, ".trunkline-trace-").map_err(fail)?;
        Ok(TraceFile { out: BufWriter::new(file), path })
    }

    fn finish(mut self, trace: &Trace) -> Result<()> {
        let fail = |e| Error::io("cannot write the trace", e).file(&self.path);
        trace.write(&mut self.out).map_err(fail)?;
        let file = self.out.into_inner().map_err(|e| fail(e.into_error()))?;
        file.persist(&self.path).map_err(|e| fail(e.error))?;
        Ok(())
    }
}

/// Runs `body`, with a trace where a `path` is given for one. The trace is written when `body` ends, whether it
/// succeeded, failed or was interrupted. Its own error comes before that of writing the trace.
pub fn recorded<R>(path: Option<&Path>, body: impl FnOnce(Option<Arc<Trace>>) -> Result<R>) -> Result<R> {
    let Some(path) = path else { return body(None) };
    let file = TraceFile::create(path)?;
    let trace = Arc::new(Trace::new());
    let result = body(Some(trace.clone()));
    let written = file.finish(&trace);
    let dropped = trace.recorded.lock().unwrap_or_else(PoisonError::into_inner).dropped;
    if dropped > 0 {
        log::warn!("the trace holds the first {LIMIT} events; {dropped} later ones are left out");
    }
    match (result, written) {
        (Err(e), Err(lost)) => {
            log::warn!("{lost}");
            Err(e)
        }
        (result, written) => written.and(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use serde_json::Value;

    #[test]
    fn an_untraced_run_times_nothing() {
        assert!(begin(&None).is_none());
        recorded(None, |trace| {
            assert!(trace.is_none());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_failed_run_leaves_a_whole_trace_and_its_own_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let failed: Result<()> = recorded(Some(&path), |trace| {
            let span = begin(&trace).unwrap();
            let details = Details { layer: Some(3), bytes: Some(7), ..Details::default() };
            span.end(Track::Gpu("a \"quoted\" name"), "op", details);
            Err(Error::interrupted())
        });
        assert_eq!(failed.unwrap_err().kind(), Kind::Interrupted);
        let found: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let events = found["traceEvents"].as_array().unwrap();
        assert_eq!(events[1]["args"]["name"], "gpu: a \"quoted\" name");
        assert_eq!(events[2]["args"], json!({"layer": 3, "bytes": 7}));
        assert_eq!(events[2]["tid"], events[1]["tid"]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn a_place_that_cannot_be_written_is_told_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("missing/t.json"), folder.path().to_path_buf()] {
            let e = recorded::<()>(Some(&path), |_| panic!("the run began")).unwrap_err();
            assert_eq!(e.kind(), Kind::Io);
            assert_eq!(e.place().file.as_ref(), Some(&path));
        }
    }
}
