//! `trunkline tokenize`

use super::generate::read_text;
use super::{Global, ModelFlags, model, output};
use crate::error::{Error, Result};
use crate::report::progress::Progress;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args)]
pub struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// Text to encode
    #[arg(long, value_name = "TEXT", group = "input")]
    prompt: Option<String>,
    /// File with the text to encode; - is stdin
    #[arg(long, value_name = "FILE", group = "input")]
    prompt_file: Option<PathBuf>,
    /// Turn --ids into text
    #[arg(long, requires = "ids", conflicts_with_all = ["prompt", "prompt_file", "special"])]
    decode: bool,
    /// Ids to decode
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', requires = "decode", group = "input")]
    ids: Option<Vec<u32>>,
    /// Recognise the spellings of special tokens in the text
    #[arg(long)]
    special: bool,
}

pub fn run(f: &Flags, global: &Global) -> Result<()> {
    let text = match (&f.prompt, &f.prompt_file, &f.ids) {
        (Some(t), _, _) => Some(t.clone()),
        (None, Some(path), _) => Some(read_text(path)?),
        (None, None, Some(_)) => None,
        (None, None, None) => {
            return Err(Error::usage("there is nothing to tokenize")
                .hint("give --prompt TEXT, --prompt-file FILE, or --decode --ids 1,2,3"));
        }
    };
    let progress = Progress::start(global.quiet);
    let checkpoint = model::checkpoint(&f.model, &progress)?;
    let tokenizer = model::tokenizer(&checkpoint)?
        .ok_or_else(|| model::no_tokenizer(&checkpoint).hint("name a checkpoint that has one"))?;
    drop(progress);
    let ids = match (&text, &f.ids) {
        (Some(t), _) => tokenizer.encode(t, f.special)?,
        (None, ids) => ids.clone().unwrap_or_default(),
    };
    let decoded = tokenizer.try_decode(&ids)?;
    let pieces: Vec<String> = ids
        .iter()
        .map(|id| String::from_utf8_lossy(tokenizer.token_bytes(*id).unwrap_or_default()).into_owned())
        .collect();
    match (global.json, f.decode) {
        (true, _) => output::json(&json!({"ids": ids, "pieces": pieces, "text": decoded})),
        (false, true) => output::text(&format!("{decoded}\n")),
        (false, false) => {
            let lines: String = ids.iter().zip(&pieces).map(|(id, p)| format!("{id}\t{p:?}\n")).collect();
            output::text(&lines)
        }
    }
}
