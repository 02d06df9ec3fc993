//! Index, shard headers, and where every tensor lies.

use super::config::Config;
use super::folder::{Folder, SmallFile};
use super::names::{self, DType, EXPERT_PARTS, expert_part_bytes};
use crate::error::{Error, Result};
use crate::memory::read::{ReadAt, read_exact_at};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The index file of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// Changes when a state computed by another version of the reader must not be reused.
const FINGERPRINT_VERSION: &[u8] = b"trunkline checkpoint 1";
/// Marks an expert part that was not found.
pub(super) const ABSENT: u16 = u16::MAX;

/// Where a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef {
    /// Index into [`Checkpoint::shards`].
    pub shard: u16,
    /// Type of the stored values.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// Absolute offset in the file.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Where the six parts of a routed expert lie, in the order of [`EXPERT_PARTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRef {
    /// Shard of each part.
    pub shard: [u16; 6],
    /// Absolute offset of each part in its file.
    pub offset: [u64; 6],
}

impl ExpertRef {
    /// Shard and offset of the one run that the parts make, if they are neighbours in order, as in the release.
    pub fn run(&self, config: &Config) -> Option<(u16, u64)> {
        let mut at = self.offset[0];
        for (i, part) in EXPERT_PARTS.iter().enumerate() {
            if self.shard[i] != self.shard[0] || self.offset[i] != at {
                return None;
            }
            at += expert_part_bytes(config, *part) as u64;
        }
        Some((self.shard[0], self.offset[0]))
    }
}

/// A shard whose header has been checked against its size. One that could not be read (which only
/// [`Checkpoint::examine`] leaves) keeps its number and path, and has no bytes.
pub struct Shard {
    /// Path.
    pub path: PathBuf,
    /// Size in bytes.
    pub len: u64,
    /// Bytes before the data.
    pub data_start: u64,
    /// Digest of the header.
    pub(super) header_digest: [u8; 32],
    pub(super) reader: Arc<dyn ReadAt>,
    /// Whether the header was read.
    pub(super) read: bool,
}

impl Shard {
    /// Whether its header was read.
    pub fn is_read(&self) -> bool {
        self.read
    }
}

/// Offsets of every part of every routed expert, flat: the release has 494,592 of them.
pub(super) struct ExpertTable {
    pub(super) experts: usize,
    pub(super) shard: Vec<u16>,
    pub(super) offset: Vec<u64>,
}

impl ExpertTable {
    pub(super) fn new(config: &Config) -> ExpertTable {
        let n = config.layers.len() * config.moe.experts * EXPERT_PARTS.len();
        ExpertTable { experts: config.moe.experts, shard: vec![ABSENT; n], offset: vec![0; n] }
    }

    /// Position of a part in the table, if the configuration has it.
    pub(super) fn at(&self, layer: usize, expert: usize, part: usize) -> Option<usize> {
        let at = (layer.checked_mul(self.experts)?.checked_add(expert)?).checked_mul(EXPERT_PARTS.len())?;
        let at = at.checked_add(part)?;
        (expert < self.experts && at < self.shard.len()).then_some(at)
    }

    /// Name of the part at a position.
    pub(super) fn name(&self, at: usize) -> String {
        let (expert, part) = (at / EXPERT_PARTS.len(), at % EXPERT_PARTS.len());
        names::expert_tensor_name(expert / self.experts, expert % self.experts, EXPERT_PARTS[part])
    }
}

/// The tokenizer's files, as far as the checkpoint has them.
#[derive(Default)]
pub struct TokenizerFiles {
    /// `tiktoken.model`
    pub tiktoken_model: Option<SmallFile>,
    /// `tokenizer.json`
    pub tokenizer_json: Option<SmallFile>,
    /// `tokenizer_config.json`
    pub tokenizer_config: Option<SmallFile>,
    /// `generation_config.json`
    pub generation_config: Option<SmallFile>,
}

/// An opened checkpoint: everything is known but no weight has been read.
pub struct Checkpoint {
    pub(super) folder: Arc<dyn Folder>,
    pub(super) config: Config,
    pub(super) shards: Vec<Shard>,
    pub(super) tensors: HashMap<String, TensorRef>,
    pub(super) experts: ExpertTable,
    /// Names under `language_model.` that the configuration does not imply.
    pub(super) unknown: Vec<String>,
    /// Tensors that the index and the headers agree on, vision included.
    pub(super) count: usize,
    /// Scales of experts that are spelled F8_E8M0.
    pub(super) e8m0_scales: usize,
}

impl Checkpoint {
    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }
    /// What the files are called in messages.
    pub fn root(&self) -> &Path {
        self.folder.root()
    }
    /// The shards, by number.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }
    /// Names under `language_model.` that the network does not use.
    pub fn unknown(&self) -> &[String] {
        &self.unknown
    }
    /// Tensors found, the skipped vision ones included.
    pub fn tensor_count(&self) -> usize {
        self.count
    }

    /// Scales of routed experts whose type is spelled F8_E8M0 instead of U8.
    pub fn e8m0_scales(&self) -> usize {
        self.e8m0_scales
    }
    /// Routed experts with all of their parts.
    pub fn expert_count(&self) -> usize {
        self.experts.shard.chunks_exact(EXPERT_PARTS.len()).filter(|e| !e.contains(&ABSENT)).count()
    }

    /// Where a tensor lies that is no part of a routed expert.
    pub fn tensor(&self, name: &str) -> Result<&TensorRef> {
        self.tensors.get(name).ok_or_else(|| {
            Error::refused("a tensor that the configuration implies is missing")
                .file(self.root())
                .tensor(name)
        })
    }

    /// Where a routed expert lies.
    pub fn expert(&self, layer: usize, expert: usize) -> Result<ExpertRef> {
        let mut found = ExpertRef { shard: [0; 6], offset: [0; 6] };
        for (part, p) in EXPERT_PARTS.iter().enumerate() {
            let at = self.experts.at(layer, expert, part).filter(|at| self.experts.shard[*at] != ABSENT);
            let Some(at) = at else {
                return Err(Error::refused("a tensor that the configuration implies is missing")
                    .file(self.root())
                    .tensor(names::expert_tensor_name(layer, expert, *p)));
            };
            found.shard[part] = self.experts.shard[at];
            found.offset[part] = self.experts.offset[at];
        }
        Ok(found)
    }

    /// Reads from shard `shard`.
    pub fn reader(&self, shard: u16) -> &Arc<dyn ReadAt> {
        &self.shards[usize::from(shard)].reader
    }

    /// Reads a whole tensor. `name` is for messages.
    pub fn read_tensor(&self, t: &TensorRef, name: &str, buf: &mut [u8]) -> Result<()> {
        let shard = &self.shards[usize::from(t.shard)];
        read_exact_at(shard.reader.as_ref(), &shard.path, buf, t.offset).map_err(|e| e.tensor(name))
    }

    /// Reads the six parts of an expert one after the other into `buf`: one read where they are neighbours. A scale byte
    /// 0xFF, which has no value, ends it.
    pub fn read_expert(&self, layer: usize, expert: usize, buf: &mut [u8]) -> Result<()> {
        let r = self.expert(layer, expert)?;
        let name = |part: usize| names::expert_tensor_name(layer, expert, EXPERT_PARTS[part]);
        if let Some((shard, offset)) = r.run(&self.config) {
            let s = &self.shards[usize::from(shard)];
            read_exact_at(s.reader.as_ref(), &s.path, buf, offset).map_err(|e| e.tensor(name(0)))?;
        } else {
            let mut at = 0;
            for (i, part) in EXPERT_PARTS.iter().enumerate() {
                let n = expert_part_bytes(&self.config, *part);
                let s = &self.shards[usize::from(r.shard[i])];
                read_exact_at(s.reader.as_ref(), &s.path, &mut buf[at..at + n], r.offset[i])
                    .map_err(|e| e.tensor(name(i)))?;
                at += n;
            }
        }
        let mut at = 0;
        for (i, part) in EXPERT_PARTS.iter().enumerate() {
            let n = expert_part_bytes(&self.config, *part);
            if part.is_scale()
                && let Some(bad) = buf[at..at + n].iter().position(|b| *b == 0xff)
            {
                return Err(Error::run("an MXFP4 scale byte is 0xFF, which has no value")
                    .file(&self.shards[usize::from(r.shard[i])].path)
                    .tensor(name(i))
                    .range(r.offset[i] + bad as u64, 1));
            }
            at += n;
        }
        Ok(())
    }

    /// The tokenizer's files.
    pub fn tokenizer_files(&self) -> Result<TokenizerFiles> {
        Ok(TokenizerFiles {
            tiktoken_model: self.folder.small("tiktoken.model")?,
            tokenizer_json: self.folder.small("tokenizer.json")?,
            tokenizer_config: self.folder.small("tokenizer_config.json")?,
            generation_config: self.folder.small("generation_config.json")?,
        })
    }

    /// A digest of configuration, index, tokenizer and shard headers: what makes a saved state this model's.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        let mut digest = Sha256::new();
        digest.update(FINGERPRINT_VERSION);
        for name in ["config.json", INDEX, "tiktoken.model", "tokenizer.json", "tokenizer_config.json"] {
            let file = self.folder.small(name)?;
            let bytes = file.as_ref().map_or(&[][..], SmallFile::bytes);
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        }
        for shard in &self.shards {
            digest.update(shard.len.to_le_bytes());
            digest.update(shard.header_digest);
        }
        Ok(digest.finalize().into())
    }
}
