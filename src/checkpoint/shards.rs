//! Index, shard headers, and where every tensor lies.

use super::config::Config;
use super::folder::{Disk, Folder, OpenShard, SmallFile, is_plain_name};
use super::header;
use super::index::{self, Assignment};
use super::names::{self, DType, EXPERT_PARTS, Expected, Name, expert_part_bytes, expert_part_shape};
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
const ABSENT: u16 = u16::MAX;
/// How many names an error lists.
const LISTED: usize = 3;

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

/// A shard whose header has been checked against its size.
pub struct Shard {
    /// Path.
    pub path: PathBuf,
    /// Size in bytes.
    pub len: u64,
    /// Bytes before the data.
    pub data_start: u64,
    /// Digest of the header.
    header_digest: [u8; 32],
    reader: Arc<dyn ReadAt>,
}

/// Offsets of every part of every routed expert, flat: the release has 494,592 of them.
pub(super) struct ExpertTable {
    experts: usize,
    shard: Vec<u16>,
    offset: Vec<u64>,
}

impl ExpertTable {
    fn new(config: &Config) -> ExpertTable {
        let n = config.layers.len() * config.moe.experts * EXPERT_PARTS.len();
        ExpertTable { experts: config.moe.experts, shard: vec![ABSENT; n], offset: vec![0; n] }
    }

    /// Position of a part in the table, if the configuration has it.
    pub(super) fn at(&self, layer: usize, expert: usize, part: usize) -> Option<usize> {
        let at =
            (layer.checked_mul(self.experts)?.checked_add(expert)?).checked_mul(EXPERT_PARTS.len())? + part;
        (expert < self.experts && at < self.shard.len()).then_some(at)
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
    folder: Arc<dyn Folder>,
    config: Config,
    shards: Vec<Shard>,
    tensors: HashMap<String, TensorRef>,
    experts: ExpertTable,
    /// Names under `language_model.` that the configuration does not imply.
    unknown: Vec<String>,
    /// Tensors that the index and the headers agree on, vision included.
    count: usize,
}

impl Checkpoint {
    /// Opens the checkpoint in `dirs` (the first holds the configuration) and checks its whole structure: every shard
    /// present and as long as its header says, every tensor the configuration implies there with its type and shape.
    pub fn open(dirs: &[PathBuf]) -> Result<Checkpoint> {
        Checkpoint::open_in(Arc::new(Disk::new(dirs)?))
    }

    /// As [`Checkpoint::open`], from any source of files.
    pub fn open_in(folder: Arc<dyn Folder>) -> Result<Checkpoint> {
        let mut problems = Vec::new();
        let checkpoint = Checkpoint::examine(folder, &mut |e| {
            problems.push(e);
            false
        });
        match problems.into_iter().next() {
            Some(first) => Err(first),
            None => checkpoint,
        }
    }

    /// Opens as far as possible. Every problem goes to `problem`, which says whether to look for more; an error that
    /// leaves nothing to look at is returned.
    pub fn examine(folder: Arc<dyn Folder>, problem: &mut dyn FnMut(Error) -> bool) -> Result<Checkpoint> {
        let root = folder.root().to_path_buf();
        let file = folder.small("config.json")?.ok_or_else(|| {
            Error::refused("the model folder has no config.json")
                .file(&root)
                .hint("name the folder that holds config.json and the shards")
        })?;
        let config = Config::from_json(file.bytes(), &file.path)?;
        drop(file);
        let experts = ExpertTable::new(&config);
        let mut c = Checkpoint {
            folder,
            config,
            shards: Vec::new(),
            tensors: HashMap::new(),
            experts,
            unknown: Vec::new(),
            count: 0,
        };
        let assignment = match c.folder.small(INDEX)? {
            Some(file) => Some(index::read(&file, &c.config, &c.experts_shape())?),
            None => None,
        };
        let files = match &assignment {
            Some(a) => a.files.clone(),
            None => c.unindexed()?,
        };
        let opened = c.open_files(&files, assignment.as_ref(), problem)?;
        let mut go_on = true;
        for (i, shard) in opened.into_iter().enumerate() {
            let Some(shard) = shard else { continue };
            if let Err(e) = c.read_header(i, shard, assignment.as_ref()) {
                go_on = problem(e);
                if !go_on {
                    return Ok(c);
                }
            }
        }
        if let Some(a) = &assignment {
            c.check_index(a, &mut |e| {
                go_on = problem(e);
                go_on
            });
        }
        if go_on {
            c.check_complete(problem);
        }
        Ok(c)
    }

    fn experts_shape(&self) -> ExpertTable {
        ExpertTable::new(&self.config)
    }

    /// Shards of a folder without an index.
    fn unindexed(&self) -> Result<Vec<String>> {
        let names = self.folder.list()?;
        let files: Vec<String> = names.into_iter().filter(|n| n.ends_with(".safetensors")).collect();
        match files.is_empty() {
            true => Err(Error::refused("the model folder has no weights")
                .file(self.folder.root())
                .expected(format_args!("{INDEX} and its shards, or *.safetensors"), "neither")),
            false => Ok(files),
        }
    }

    /// Opens every file, and names all that are missing at once.
    fn open_files(
        &self,
        files: &[String],
        assignment: Option<&Assignment>,
        problem: &mut dyn FnMut(Error) -> bool,
    ) -> Result<Vec<Option<OpenShard>>> {
        if files.len() >= usize::from(ABSENT) {
            return Err(Error::refused("too many shards")
                .file(self.folder.root())
                .expected(format_args!("fewer than {ABSENT}"), files.len()));
        }
        let mut opened = Vec::with_capacity(files.len());
        let mut absent = Vec::new();
        for (i, name) in files.iter().enumerate() {
            if !is_plain_name(name) {
                return Err(Error::refused("the index names a file outside the model folder")
                    .file(self.folder.root().join(INDEX))
                    .expected("a plain file name", format_args!("{name:?}")));
            }
            let shard = self.folder.shard(name)?;
            if shard.is_none() {
                absent.push(i);
            }
            opened.push(shard);
        }
        if let Some(first) = absent.first() {
            let mut lost: Vec<&str> = assignment.map(|a| a.first_names(*first, LISTED)).unwrap_or_default();
            lost.sort_unstable();
            let names: Vec<&str> = absent.iter().map(|i| files[*i].as_str()).collect();
            let e = Error::refused(format!(
                "{} of {} shards are not there: {}; the first tensors lost are {}",
                absent.len(),
                files.len(),
                names.join(", "),
                lost.join(", ")
            ))
            .file(self.folder.root())
            .cause(format_args!("{} shards are present", files.len() - absent.len()))
            .hint("resume the download of these files, or name the folder that holds them with a further --model");
            if !problem(e) {
                return Ok(Vec::new());
            }
        }
        Ok(opened)
    }

    /// Checks a shard's header and takes over the tensors that are assigned to it.
    fn read_header(&mut self, i: usize, shard: OpenShard, assignment: Option<&Assignment>) -> Result<()> {
        let header = header::read(&shard)?;
        let id = u16::try_from(i).map_err(|_| Error::refused("too many shards"))?;
        while self.shards.len() < i {
            // A shard that could not be opened keeps its number.
            self.shards.push(Shard {
                path: PathBuf::new(),
                len: 0,
                data_start: 0,
                header_digest: [0; 32],
                reader: Arc::new(&[] as &'static [u8]),
            });
        }
        self.shards.push(Shard {
            path: shard.path.clone(),
            len: shard.len,
            data_start: header.data_start,
            header_digest: header.digest,
            reader: shard.reader,
        });
        let refuse = |what: &str, name: &str| Error::refused(what).file(&shard.path).tensor(name);
        for (name, info) in header.metadata.tensors() {
            let (from, to) = info.data_offsets;
            let offset = header.data_start + from as u64;
            let class = names::classify(&name);
            if class == Name::Vision {
                self.count += 1;
                continue;
            }
            if let Name::Expert { layer, expert, part } = class {
                let Some(at) = self.experts.at(layer, expert, part) else {
                    self.unknown.push(name);
                    continue;
                };
                match assignment {
                    Some(a) if a.expert_shard(at) != Some(id) => continue,
                    None if self.experts.shard[at] != ABSENT => {
                        return Err(self.duplicate(&name, self.experts.shard[at], &shard.path));
                    }
                    _ => {}
                }
                let expected = expert_part_shape(&self.config, EXPERT_PARTS[part]);
                let dtype = header::dtype(info.dtype);
                let right = match dtype {
                    Some(DType::U8) => true,
                    Some(DType::F8E8M0) => EXPERT_PARTS[part].is_scale(),
                    _ => false,
                };
                if !right {
                    let wanted = if EXPERT_PARTS[part].is_scale() { "U8 or F8_E8M0" } else { "U8" };
                    return Err(refuse("a tensor has another dtype", &name)
                        .expected(wanted, format_args!("{:?}", info.dtype)));
                }
                if info.shape != expected {
                    return Err(refuse("a tensor has another shape", &name)
                        .expected(format_args!("{expected:?}"), format_args!("{:?}", info.shape)));
                }
                self.experts.shard[at] = id;
                self.experts.offset[at] = offset;
                self.count += 1;
                continue;
            }
            match assignment {
                Some(a) if a.shard_of(&name) != Some(id) => continue,
                None => {
                    if let Some(other) = self.tensors.get(&name) {
                        return Err(self.duplicate(&name, other.shard, &shard.path));
                    }
                }
                _ => {}
            }
            let Some(dtype) = header::dtype(info.dtype) else {
                return Err(refuse("a tensor has another dtype", &name)
                    .expected("BF16, F32 or U8", format_args!("{:?}", info.dtype)));
            };
            self.tensors.insert(
                name,
                TensorRef { shard: id, dtype, shape: info.shape.clone(), offset, bytes: (to - from) as u64 },
            );
            self.count += 1;
        }
        Ok(())
    }

    fn duplicate(&self, name: &str, first: u16, second: &Path) -> Error {
        Error::refused("a tensor is in two files and no index says which is meant")
            .file(second)
            .tensor(name)
            .cause(format_args!("it is also in {}", self.shards[usize::from(first)].path.display()))
            .hint(format!("add the checkpoint's {INDEX}"))
    }

    /// Every tensor of the index must lie in the shard it is assigned to.
    fn check_index(&self, a: &Assignment, problem: &mut dyn FnMut(Error) -> bool) {
        let missing = |name: &str, shard: u16| {
            Error::refused("the index names a tensor that its shard does not hold")
                .file(&self.shards[usize::from(shard)].path)
                .tensor(name)
        };
        let loaded = |shard: u16| self.shards.get(usize::from(shard)).is_some_and(|s| s.len > 0);
        for (name, shard) in &a.tensors {
            if loaded(*shard) && !self.tensors.contains_key(name) && !problem(missing(name, *shard)) {
                return;
            }
        }
        for (at, shard) in a.experts.iter().enumerate() {
            if *shard != ABSENT && loaded(*shard) && self.experts.shard[at] == ABSENT {
                let part = at % EXPERT_PARTS.len();
                let expert = at / EXPERT_PARTS.len();
                let (layer, expert) = (expert / self.experts.experts, expert % self.experts.experts);
                if !problem(missing(&names::expert_tensor_name(layer, expert, EXPERT_PARTS[part]), *shard)) {
                    return;
                }
            }
        }
    }

    /// Every tensor of the configuration must be there, with its type and shape.
    fn check_complete(&mut self, problem: &mut dyn FnMut(Error) -> bool) {
        let mut expected = names::model_tensors(&self.config);
        for i in 0..self.config.layers.len() {
            expected.extend(names::trunk_tensors(&self.config, i));
        }
        let mut known = std::collections::HashSet::with_capacity(expected.len());
        let bare = |name: &str| {
            name.strip_prefix("language_model.").is_some_and(|n| {
                self.tensors.contains_key(n)
                    || self.tensors.contains_key(n.strip_prefix("model.").unwrap_or(n))
            })
        };
        for e in &expected {
            let result = match self.tensors.get(&e.name) {
                Some(t) => check_tensor(t, e, &self.shards[usize::from(t.shard)].path),
                None => {
                    let missing = Error::refused("a tensor that the configuration implies is missing")
                        .file(self.folder.root())
                        .tensor(&e.name);
                    Err(match bare(&e.name) {
                        true => missing
                            .cause("the checkpoint spells its names without the prefix language_model.")
                            .hint("only the released spelling is read: convert the names, or fetch the released files"),
                        false => missing,
                    })
                }
            };
            known.insert(e.name.clone());
            if let Err(e) = result {
                if !problem(e) {
                    return;
                }
            }
        }
        for (layer, kind) in self.config.layers.iter().enumerate() {
            if kind.ffn != super::config::Ffn::Moe {
                continue;
            }
            for expert in 0..self.config.moe.experts {
                for (part, p) in EXPERT_PARTS.iter().enumerate() {
                    let there = self
                        .experts
                        .at(layer, expert, part)
                        .is_some_and(|at| self.experts.shard[at] != ABSENT);
                    if !there {
                        let e = Error::refused("a tensor that the configuration implies is missing")
                            .file(self.folder.root())
                            .tensor(names::expert_tensor_name(layer, expert, *p));
                        if !problem(e) {
                            return;
                        }
                    }
                }
            }
        }
        self.unknown.extend(self.tensors.keys().filter(|n| !known.contains(*n)).cloned());
        self.unknown.sort();
    }

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
            if part.is_scale() {
                if let Some(bad) = buf[at..at + n].iter().position(|b| *b == 0xff) {
                    return Err(Error::run("an MXFP4 scale byte is 0xFF, which has no value")
                        .file(&self.shards[usize::from(r.shard[i])].path)
                        .tensor(name(i))
                        .range(r.offset[i] + bad as u64, 1));
                }
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

fn check_tensor(t: &TensorRef, e: &Expected, path: &Path) -> Result<()> {
    let refuse = |what: &str| Error::refused(what).file(path).tensor(&e.name);
    if t.dtype != e.dtype {
        return Err(refuse("a tensor has another dtype").expected(e.dtype, t.dtype));
    }
    let right = match (e.padded, t.shape.as_slice(), e.shape.as_slice()) {
        (true, [found], [least]) => found >= least,
        _ => t.shape == e.shape,
    };
    if !right {
        let least = if e.padded { "at least " } else { "" };
        return Err(refuse("a tensor has another shape")
            .expected(format_args!("{least}{:?}", e.shape), format_args!("{:?}", t.shape)));
    }
    Ok(())
}
