//! Results on stdout.

use crate::error::{Error, Kind, Result};
use serde::Serialize;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes text to stdout and flushes it, so that a reader sees it at once.
pub fn text(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| Error::io("cannot write to stdout", e))
}

/// Whether the event that ends a failed run has been written.
static ENDED: AtomicBool = AtomicBool::new(false);

/// Ends the JSON of a failed or interrupted run, once: `ids` is what was reached.
pub fn error_event(e: &Error, ids: &[u32]) -> Result<()> {
    if e.kind() == Kind::ClosedPipe || ENDED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    json(&serde_json::json!({
        "event": "error",
        "exit": e.kind().exit_code(),
        "message": e.to_string(),
        "ids": ids,
    }))
}

/// Writes one JSON line to stdout and flushes it.
pub fn json(value: &impl Serialize) -> Result<()> {
    let line = serde_json::to_string(value).map_err(|e| Error::run("cannot encode JSON").cause(e))?;
    text(&format!("{line}\n"))
}
