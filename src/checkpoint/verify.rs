//! All that can be said of a checkpoint without reading its weights.

use super::folder::Folder;
use super::shards::Checkpoint;
use crate::error::{Error, Result};
use crate::text::tokenizer::Tokenizer;
use std::path::PathBuf;
use std::sync::Arc;

/// More problems than this are counted only: a wrong configuration makes one of every tensor.
const KEPT: usize = 1000;
/// How many unknown names a warning lists.
const LISTED: usize = 5;

/// What was found.
#[derive(Debug)]
pub struct Verification {
    /// What the checkpoint is called in messages.
    pub root: PathBuf,
    /// Why it would be refused; the first thousand.
    pub problems: Vec<Error>,
    /// Problems beyond those.
    pub more_problems: usize,
    /// What is odd but does no harm.
    pub warnings: Vec<String>,
    /// Files that the index names.
    pub shards: usize,
    /// Those that are there and whose headers could be read.
    pub shards_read: usize,
    /// Tensors found, the vision part included.
    pub tensors: usize,
    /// Routed experts with all of their parts.
    pub experts: usize,
    /// Sum of the sizes of the shards.
    pub bytes: u64,
    /// Ids of the tokenizer, if there is one.
    pub tokenizer: Option<usize>,
}

impl Verification {
    /// Number of problems.
    pub fn problem_count(&self) -> usize {
        self.problems.len() + self.more_problems
    }

    fn problem(&mut self, e: Error) {
        if self.problems.len() < KEPT {
            self.problems.push(e);
        } else {
            self.more_problems += 1;
        }
    }
}

/// Checks index, headers, sizes, names, types, shapes and the tokenizer, and collects every problem.
pub fn verify(folder: Arc<dyn Folder>) -> Verification {
    let mut v = Verification {
        root: folder.root().to_path_buf(),
        problems: Vec::new(),
        more_problems: 0,
        warnings: Vec::new(),
        shards: 0,
        shards_read: 0,
        tensors: 0,
        experts: 0,
        bytes: 0,
        tokenizer: None,
    };
    let examined = Checkpoint::examine(folder, &mut |e| {
        v.problem(e);
        true
    });
    let checkpoint = match examined {
        Ok(c) => c,
        Err(e) => {
            v.problem(e);
            return v;
        }
    };
    v.shards = checkpoint.shards().len();
    v.shards_read = checkpoint.shards().iter().filter(|s| s.is_read()).count();
    v.tensors = checkpoint.tensor_count();
    v.experts = checkpoint.expert_count();
    v.bytes = checkpoint.shards().iter().map(|s| s.len).sum();
    let unknown = checkpoint.unknown();
    if !unknown.is_empty() {
        let first = &unknown[..unknown.len().min(LISTED)];
        let more = if unknown.len() > LISTED { ", …" } else { "" };
        v.warnings.push(format!(
            "{} tensors have names that the configuration does not imply and are not read: {}{more}",
            unknown.len(),
            first.join(", ")
        ));
    }
    if checkpoint.e8m0_scales() > 0 {
        v.warnings.push(format!(
            "{} scales are typed F8_E8M0 where the release has U8: they are read as the same bytes",
            checkpoint.e8m0_scales()
        ));
    }
    match tokenizer(&checkpoint) {
        Ok(Some(t)) => v.tokenizer = Some(t.vocab_size()),
        Ok(None) => v.warnings.push(
            "there is no tokenizer (tiktoken.model or tokenizer.json): only ids can be given".to_string(),
        ),
        Err(e) => v.problem(e),
    }
    v
}

/// The checkpoint's tokenizer, if it has one.
pub fn tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    let files = checkpoint.tokenizer_files()?;
    let vocab = checkpoint.config().vocab_size;
    if let Some(ranks) = &files.tiktoken_model {
        let config = files.tokenizer_config.as_ref().map(|c| (c.bytes(), c.path.as_path()));
        return Tokenizer::from_bytes(ranks.bytes(), &ranks.path, config, vocab).map(Some);
    }
    match &files.tokenizer_json {
        Some(json) => Tokenizer::from_json(json.bytes(), &json.path, vocab).map(Some),
        None => Ok(None),
    }
}
