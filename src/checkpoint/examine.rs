//! Opening a checkpoint: index, headers and configuration must agree before any weight is read.

use super::config::{Config, Ffn};
use super::folder::{Disk, Folder, OpenShard, is_plain_name};
use super::header;
use super::index::{self, Assignment};
use super::names::{self, DType, EXPERT_PARTS, Expected, Name, expert_part_shape};
use super::shards::{ABSENT, Checkpoint, ExpertTable, INDEX, Shard, TensorRef};
use crate::error::{Error, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many names an error lists.
const LISTED: usize = 3;

/// Takes the problems, and remembers whether it wants more of them.
struct Problems<'a> {
    take: &'a mut dyn FnMut(Error) -> bool,
    enough: bool,
}

impl Problems<'_> {
    fn push(&mut self, e: Error) {
        if !self.enough {
            self.enough = !(self.take)(e);
        }
    }
}

impl Checkpoint {
    /// Opens the checkpoint in `dirs` (the first holds the configuration) and checks its whole structure: every shard
    /// present and as long as its header says, every tensor the configuration implies there with its type and shape.
    pub fn open(dirs: &[PathBuf]) -> Result<Checkpoint> {
        Checkpoint::open_in(Arc::new(Disk::new(dirs)?))
    }

    /// As [`Checkpoint::open`], from any source of files.
    pub fn open_in(folder: Arc<dyn Folder>) -> Result<Checkpoint> {
        let mut first = None;
        let checkpoint = Checkpoint::examine(folder, &mut |e| {
            first = Some(e);
            false
        })?;
        match first {
            Some(e) => Err(e),
            None => Ok(checkpoint),
        }
    }

    /// Opens as far as possible. Every problem goes to `problem`, which says whether to look for more; what follows from
    /// a problem is not told again: tensors of a shard that cannot be read are not also missing. An error that leaves
    /// nothing to look at is returned. Where there was a problem the result is for looking at, not for running.
    pub fn examine(folder: Arc<dyn Folder>, problem: &mut dyn FnMut(Error) -> bool) -> Result<Checkpoint> {
        let mut problems = Problems { take: problem, enough: false };
        let root = folder.root().to_path_buf();
        let file = folder.small("config.json")?.ok_or_else(|| {
            Error::refused("the model folder has no config.json")
                .file(&root)
                .hint("name the folder that holds config.json and the shards")
        })?;
        let config = Config::from_json(file.bytes(), &file.path)?;
        drop(file);
        let mut c = Checkpoint {
            experts: ExpertTable::new(&config),
            folder,
            config,
            shards: Vec::new(),
            tensors: HashMap::new(),
            unknown: Vec::new(),
            count: 0,
            e8m0_scales: 0,
        };
        let assignment = match c.folder.small(INDEX)? {
            Some(file) => Some(index::read(&file, &c.config, &c.experts)?),
            None => None,
        };
        let files = match &assignment {
            Some(a) => a.files.clone(),
            None => c.unindexed()?,
        };
        let opened = c.open_files(&files, assignment.as_ref(), &mut problems)?;
        let mut headers = Headers { assignment: assignment.as_ref(), odd: HashMap::new() };
        for (i, shard) in opened.into_iter().enumerate() {
            if problems.enough {
                return Ok(c);
            }
            if let Some(shard) = shard {
                headers.read(&mut c, i, shard, &mut problems);
            }
        }
        if let Some(a) = &assignment {
            c.check_index(a, &headers.odd, &mut problems);
        }
        c.check_complete(assignment.as_ref(), &mut headers.odd, &mut problems);
        Ok(c)
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

    /// Opens every file, and names all that are missing at once. Every file gets its number in `shards`.
    fn open_files(
        &mut self,
        files: &[String],
        assignment: Option<&Assignment>,
        problems: &mut Problems<'_>,
    ) -> Result<Vec<Option<OpenShard>>> {
        if files.len() >= usize::from(ABSENT) {
            return Err(Error::refused("too many shards")
                .file(self.folder.root())
                .expected(format_args!("fewer than {ABSENT}"), files.len()));
        }
        let root = self.folder.root().to_path_buf();
        let mut opened = Vec::with_capacity(files.len());
        let mut absent = Vec::new();
        for (i, name) in files.iter().enumerate() {
            if !is_plain_name(name) {
                return Err(Error::refused("the index names a file outside the model folder")
                    .file(root.join(INDEX))
                    .expected("a plain file name", format_args!("{name:?}")));
            }
            self.shards.push(Shard {
                path: root.join(name),
                len: 0,
                data_start: 0,
                header_digest: [0; 32],
                reader: Arc::new(&[] as &'static [u8]),
                read: false,
            });
            opened.push(match self.folder.shard(name) {
                Ok(Some(shard)) => Some(shard),
                Ok(None) => {
                    absent.push(i);
                    None
                }
                Err(e) => {
                    problems.push(e);
                    None
                }
            });
        }
        if let Some(first) = absent.first() {
            let lost = assignment.map(|a| a.first_names(*first, LISTED, &self.experts)).unwrap_or_default();
            let names: Vec<&str> = absent.iter().map(|i| files[*i].as_str()).collect();
            problems.push(
                Error::refused(format!(
                    "{} of {} shards are not there: {}; the first tensors lost are {}",
                    absent.len(),
                    files.len(),
                    names.join(", "),
                    lost.join(", ")
                ))
                .file(root)
                .cause(format_args!("{} shards are present", files.len() - absent.len()))
                .hint("resume the download of these files, or name the folder that holds them with a further --model"),
            );
        }
        Ok(opened)
    }

    fn is_read(&self, shard: u16) -> bool {
        self.shards.get(usize::from(shard)).is_some_and(|s| s.read)
    }

    /// Every tensor of the index must lie in the shard it is assigned to.
    fn check_index(&self, a: &Assignment, odd: &Odd, problems: &mut Problems<'_>) {
        let missing = |name: &str, shard: u16| {
            Error::refused("the index names a tensor that its shard does not hold")
                .file(&self.shards[usize::from(shard)].path)
                .tensor(name)
        };
        let mut lost: Vec<(&String, u16)> = a
            .tensors
            .iter()
            .filter(|(name, shard)| {
                let known = self.tensors.contains_key(*name) || odd.contains_key(*name);
                self.is_read(**shard) && !known
            })
            .map(|(name, shard)| (name, *shard))
            .collect();
        lost.sort_unstable();
        for (name, shard) in lost {
            problems.push(missing(name, shard));
        }
        for (at, shard) in a.assigned_experts() {
            if problems.enough {
                return;
            }
            if self.is_read(shard) && self.experts.shard[at] == ABSENT {
                problems.push(missing(&self.experts.name(at), shard));
            }
        }
    }

    /// Every tensor of the configuration must be there, with its type and shape.
    fn check_complete(&mut self, a: Option<&Assignment>, odd: &mut Odd, problems: &mut Problems<'_>) {
        let mut expected = names::model_tensors(&self.config);
        for i in 0..self.config.layers.len() {
            expected.extend(names::trunk_tensors(&self.config, i));
        }
        // Told already: assigned to a shard, but not in it or the shard cannot be read. Without an index any shard
        // that cannot be read may have held it.
        let unread = a.is_none() && self.shards.iter().any(|s| !s.read);
        for e in &expected {
            if problems.enough {
                return;
            }
            if let Some((path, dtype)) = odd.remove(&e.name) {
                problems.push(
                    Error::refused("a tensor has another dtype")
                        .file(path)
                        .tensor(&e.name)
                        .expected(e.dtype, format_args!("{dtype:?}")),
                );
                continue;
            }
            let told = unread || a.is_some_and(|a| a.shard_of(&e.name).is_some());
            match self.tensors.get(&e.name) {
                Some(t) => {
                    if let Err(e) = check_tensor(t, e, &self.shards[usize::from(t.shard)].path) {
                        problems.push(e);
                    }
                }
                None if !told => problems.push(self.missing(&e.name)),
                None => {}
            }
        }
        for (layer, kind) in self.config.layers.iter().enumerate() {
            let experts = if kind.ffn == Ffn::Moe { self.config.moe.experts } else { 0 };
            for expert in 0..experts {
                for (part, p) in EXPERT_PARTS.iter().enumerate() {
                    let Some(at) = self.experts.at(layer, expert, part) else { continue };
                    let told = unread || a.is_some_and(|a| a.expert_shard(at).is_some());
                    if self.experts.shard[at] == ABSENT && !told {
                        problems.push(self.missing(&names::expert_tensor_name(layer, expert, *p)));
                    }
                }
                if problems.enough {
                    return;
                }
            }
        }
        let known: HashSet<&str> = expected.iter().map(|e| e.name.as_str()).collect();
        self.unknown.extend(self.tensors.keys().filter(|n| !known.contains(n.as_str())).cloned());
        self.unknown.extend(odd.keys().cloned());
        self.unknown.sort();
    }

    fn missing(&self, name: &str) -> Error {
        let e = Error::refused("a tensor that the configuration implies is missing")
            .file(self.folder.root())
            .tensor(name);
        let bare = name.strip_prefix("language_model.").is_some_and(|n| {
            self.tensors.contains_key(n) || self.tensors.contains_key(n.strip_prefix("model.").unwrap_or(n))
        });
        if !bare {
            return e;
        }
        e.cause("the checkpoint spells its names without the prefix language_model.")
            .hint("only the released spelling is read: convert the names, or fetch the released files")
    }
}

/// Tensors of a type that no weight of the text model has, with the file they are in.
type Odd = HashMap<String, (PathBuf, Dtype)>;

/// Takes over what the headers say.
struct Headers<'a> {
    assignment: Option<&'a Assignment>,
    odd: Odd,
}

impl Headers<'_> {
    /// Checks a shard's header and takes over the tensors that are assigned to it.
    fn read(&mut self, c: &mut Checkpoint, i: usize, shard: OpenShard, problems: &mut Problems<'_>) {
        // The number of files has been checked.
        let Ok(id) = u16::try_from(i) else { return };
        let header = match header::read(&shard) {
            Ok(header) => header,
            Err(e) => return problems.push(e),
        };
        let path = shard.path.clone();
        c.shards[i] = Shard {
            path: shard.path,
            len: shard.len,
            data_start: header.data_start,
            header_digest: header.digest,
            reader: shard.reader,
            read: true,
        };
        // In the order of the data, so that the same fault always gives the same message.
        for name in header.metadata.offset_keys() {
            let Some(info) = header.metadata.info(&name) else { continue };
            let offset = header.data_start + info.data_offsets.0 as u64;
            match names::classify(&name) {
                Name::Vision => c.count += 1,
                Name::Expert { layer, expert, part } => match c.experts.at(layer, expert, part) {
                    Some(at) => {
                        let entry = Entry { shard: id, path: &path, info, offset };
                        self.expert_part(c, &name, at, part, &entry, problems);
                    }
                    None => c.unknown.push(name),
                },
                Name::Other => {
                    self.tensor(c, name, &Entry { shard: id, path: &path, info, offset }, problems);
                }
            }
        }
    }

    /// A part of an expert; `at` is its position in the table, `part` its number in [`EXPERT_PARTS`].
    fn expert_part(
        &self,
        c: &mut Checkpoint,
        name: &str,
        at: usize,
        part: usize,
        entry: &Entry<'_>,
        problems: &mut Problems<'_>,
    ) {
        let info = entry.info;
        match self.assignment {
            Some(a) if a.expert_shard(at) != Some(entry.shard) => return,
            None if c.experts.shard[at] != ABSENT => {
                return problems.push(duplicate(c, name, c.experts.shard[at], entry.path));
            }
            _ => {}
        }
        c.experts.shard[at] = entry.shard;
        c.experts.offset[at] = entry.offset;
        c.count += 1;
        let scale = EXPERT_PARTS[part].is_scale();
        let right = match header::dtype(info.dtype) {
            Some(DType::U8) => true,
            Some(DType::F8E8M0) => scale,
            _ => false,
        };
        let refuse = |what: &str| Error::refused(what).file(entry.path).tensor(name);
        if !right {
            let wanted = if scale { "U8 or F8_E8M0" } else { "U8" };
            return problems.push(
                refuse("a tensor has another dtype").expected(wanted, format_args!("{:?}", info.dtype)),
            );
        }
        if scale && info.dtype == Dtype::F8_E8M0 {
            c.e8m0_scales += 1;
        }
        let expected = expert_part_shape(&c.config, EXPERT_PARTS[part]);
        if info.shape != expected {
            problems.push(
                refuse("a tensor has another shape")
                    .expected(format_args!("{expected:?}"), format_args!("{:?}", info.shape)),
            );
        }
    }

    fn tensor(&mut self, c: &mut Checkpoint, name: String, entry: &Entry<'_>, problems: &mut Problems<'_>) {
        let Entry { shard, path, info, offset } = *entry;
        match self.assignment {
            Some(a) if a.shard_of(&name) != Some(shard) => return,
            None => {
                if let Some(other) = c.tensors.get(&name) {
                    return problems.push(duplicate(c, &name, other.shard, path));
                }
            }
            _ => {}
        }
        c.count += 1;
        let Some(dtype) = header::dtype(info.dtype) else {
            // Whether it matters is known when the names that the configuration implies are looked up.
            self.odd.insert(name, (path.to_path_buf(), info.dtype));
            return;
        };
        let (from, to) = info.data_offsets;
        let bytes = (to - from) as u64;
        c.tensors.insert(name, TensorRef { shard, dtype, shape: info.shape.clone(), offset, bytes });
    }
}

/// Where a header has a tensor.
struct Entry<'a> {
    shard: u16,
    path: &'a Path,
    info: &'a TensorInfo,
    /// Absolute.
    offset: u64,
}

fn duplicate(c: &Checkpoint, name: &str, first: u16, second: &Path) -> Error {
    Error::refused("a tensor is in two files and no index says which is meant")
        .file(second)
        .tensor(name)
        .cause(format_args!("it is also in {}", c.shards[usize::from(first)].path.display()))
        .hint(format!("add the checkpoint's {INDEX}"))
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
