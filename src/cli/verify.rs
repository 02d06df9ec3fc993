//! `trunkline verify`

use super::{Global, ModelFlags, output};
use crate::checkpoint::demo;
use crate::checkpoint::folder::{Disk, Folder};
use crate::checkpoint::verify::{Verification, verify};
use crate::error::{Error, Result};
use crate::report::progress::{Progress, human};
use clap::Args;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Args)]
pub struct Flags {
    #[command(flatten)]
    model: ModelFlags,
}

pub fn run(flags: &Flags, global: &Global) -> Result<()> {
    let progress = Progress::start(global.quiet || global.json);
    progress.phase("verifying");
    let folder: Arc<dyn Folder> = match flags.model.model.as_slice() {
        [] => {
            progress.say("no --model: verifying the embedded demo checkpoint");
            demo::folder()
        }
        paths => Arc::new(Disk::new(paths)?),
    };
    let found = verify(folder);
    drop(progress);
    if global.json {
        output::json(&as_json(&found))?;
    } else {
        output::text(&as_text(&found))?;
    }
    match found.problem_count() {
        0 => Ok(()),
        1 => Err(Error::refused("the checkpoint has a problem").file(&found.root)),
        n => Err(Error::refused(format!("the checkpoint has {n} problems")).file(&found.root)),
    }
}

fn as_json(v: &Verification) -> Value {
    let problem = |e: &Error| {
        let place = e.place();
        json!({
            "message": e.to_string(),
            "hint": e.hint_text(),
            "file": place.file,
            "tensor": place.tensor,
            "key": place.key,
        })
    };
    json!({
        "model": v.root,
        "ok": v.problem_count() == 0,
        "shards": v.shards,
        "shards_read": v.shards_read,
        "tensors": v.tensors,
        "experts": v.experts,
        "bytes": v.bytes,
        "tokenizer": v.tokenizer.map(|ids| json!({ "ids": ids })),
        "problem_count": v.problem_count(),
        "problems": v.problems.iter().map(problem).collect::<Vec<_>>(),
        "warnings": v.warnings,
    })
}

fn as_text(v: &Verification) -> String {
    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments<'_>| {
        out.push_str(&text.to_string());
        out.push('\n');
    };
    for e in &v.problems {
        line(format_args!("problem: {e}"));
        if let Some(hint) = e.hint_text() {
            line(format_args!("  hint: {hint}"));
        }
    }
    if v.more_problems > 0 {
        line(format_args!("and {} more problems", v.more_problems));
    }
    for w in &v.warnings {
        line(format_args!("warning: {w}"));
    }
    let tokenizer = match v.tokenizer {
        Some(ids) => format!("tokenizer with {ids} ids"),
        None => "no tokenizer".to_string(),
    };
    line(format_args!(
        "{}: {} of {} shards, {} tensors, {} routed experts, {}, {tokenizer}",
        v.root.display(),
        v.shards_read,
        v.shards,
        v.tensors,
        v.experts,
        human(v.bytes),
    ));
    if v.problem_count() == 0 {
        line(format_args!("no problems found"));
    }
    out
}
