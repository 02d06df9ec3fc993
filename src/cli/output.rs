//! Results on stdout.

use crate::error::{Error, Result};
use serde::Serialize;
use std::io::Write;

/// Writes text to stdout and flushes it, so that a reader sees it at once.
pub fn text(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| Error::io("cannot write to stdout", e))
}

/// Writes one JSON line to stdout and flushes it.
pub fn json(value: &impl Serialize) -> Result<()> {
    let line = serde_json::to_string(value).map_err(|e| Error::run("cannot encode JSON").cause(e))?;
    text(&format!("{line}\n"))
}
