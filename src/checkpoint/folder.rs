//! Where the files of a checkpoint come from: folders on disk, or bytes in the program.

use crate::error::{Error, Result};
use crate::memory::read::ReadAt;
use memmap2::Mmap;
use std::borrow::Cow;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// A small file held whole.
pub struct SmallFile {
    /// For messages.
    pub path: PathBuf,
    contents: Contents,
}

enum Contents {
    Mapped(Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
    Empty,
}

impl SmallFile {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.contents {
            Contents::Mapped(m) => m,
            Contents::Static(b) => b,
            Contents::Owned(b) => b,
            Contents::Empty => &[],
        }
    }

    /// A file made in memory.
    pub fn owned(path: PathBuf, bytes: Vec<u8>) -> SmallFile {
        SmallFile { path, contents: Contents::Owned(bytes) }
    }

    /// A file that lies in the program.
    pub fn embedded(path: PathBuf, bytes: &'static [u8]) -> SmallFile {
        SmallFile { path, contents: Contents::Static(bytes) }
    }
}

/// An open shard.
pub struct OpenShard {
    /// For messages.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub len: u64,
    /// Its bytes.
    pub reader: Arc<dyn ReadAt>,
}

/// A source of checkpoint files by name.
pub trait Folder: Send + Sync {
    /// What it is called in messages.
    fn root(&self) -> &Path;
    /// Names of the files in it.
    fn list(&self) -> Result<Vec<String>>;
    /// A small file, or `None` where there is none of this name.
    fn small(&self, name: &str) -> Result<Option<SmallFile>>;
    /// A shard, or `None` where there is none of this name.
    fn shard(&self, name: &str) -> Result<Option<OpenShard>>;
}

/// Folders on disk: the first holds the configuration, shards may lie in any.
pub struct Disk {
    dirs: Vec<PathBuf>,
}

impl Disk {
    /// Finds the folders that `paths` name: a checkpoint folder, or a Hugging Face cache entry (`models--…` with
    /// `snapshots/<rev>`).
    pub fn new(paths: &[PathBuf]) -> Result<Disk> {
        let dirs = paths.iter().map(|p| resolve(p)).collect::<Result<Vec<_>>>()?;
        if dirs.is_empty() {
            return Err(Error::usage("no model folder was named").hint("give --model PATH"));
        }
        // A further folder may hold copies of the small files, but not those of another model.
        let config = |d: &PathBuf| std::fs::read(d.join("config.json")).ok();
        if let Some(first) = dirs.first().and_then(config)
            && let Some(other) = dirs.iter().skip(1).find(|d| config(d).is_some_and(|c| c != first))
        {
            return Err(Error::refused("the folders hold different models")
                .file(other)
                .expected("the config.json of the first folder, or none", "another"));
        }
        Ok(Disk { dirs })
    }
}

/// The folder that holds the files of the checkpoint named by `path`.
fn resolve(path: &Path) -> Result<PathBuf> {
    let meta = std::fs::metadata(path)
        .map_err(|e| Error::refused("cannot open the model folder").file(path).cause(e))?;
    if !meta.is_dir() {
        return Err(Error::refused("the model is not a folder")
            .file(path)
            .hint("name the folder that holds config.json and the shards"));
    }
    let snapshots = path.join("snapshots");
    if path.join("config.json").exists() || !snapshots.is_dir() {
        return Ok(path.to_path_buf());
    }
    let mut revisions: Vec<PathBuf> =
        std::fs::read_dir(&snapshots).and_then(|d| d.map(|e| e.map(|e| e.path())).collect()).map_err(
            |e| Error::refused("cannot list the snapshots of the cache entry").file(&snapshots).cause(e),
        )?;
    revisions.retain(|p| p.is_dir());
    revisions.sort();
    let main = std::fs::read_to_string(path.join("refs/main")).ok();
    let chosen = main.and_then(|rev| {
        let rev = rev.trim().to_string();
        revisions.iter().find(|p| p.file_name().is_some_and(|n| n.to_string_lossy() == rev))
    });
    match (chosen, revisions.as_slice()) {
        (Some(dir), _) | (None, [dir]) => Ok(dir.clone()),
        (None, all) => {
            let names: Vec<Cow<'_, str>> =
                all.iter().filter_map(|p| p.file_name()).map(|n| n.to_string_lossy()).collect();
            Err(Error::refused("the cache entry does not say which revision to use")
                .file(path)
                .expected("one revision, or refs/main", names.join(", "))
                .hint("name one of the folders in snapshots/"))
        }
    }
}

/// A file name without a way out of its folder.
pub fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(n)), None) if n == name)
}

fn open(path: &Path) -> Result<Option<(File, u64)>> {
    let fail = |e: std::io::Error| Error::refused("cannot open a file of the checkpoint").file(path).cause(e);
    let file = match File::open(path) {
        Ok(f) => f,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return match std::fs::symlink_metadata(path) {
                Ok(_) => {
                    Err(fail(e).hint("the link points to a file that is not there: resume the download"))
                }
                Err(_) => Ok(None),
            };
        }
        Err(e) => return Err(fail(e)),
    };
    let meta = file.metadata().map_err(fail)?;
    if !meta.is_file() {
        return Err(Error::refused("a file of the checkpoint is no regular file").file(path));
    }
    Ok(Some((file, meta.len())))
}

impl Folder for Disk {
    fn root(&self) -> &Path {
        self.dirs.first().map_or(Path::new(""), PathBuf::as_path)
    }

    fn list(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for dir in &self.dirs {
            let fail = |e| Error::refused("cannot list the model folder").file(dir).cause(e);
            for entry in std::fs::read_dir(dir).map_err(fail)? {
                names.push(entry.map_err(fail)?.file_name().to_string_lossy().into_owned());
            }
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    fn small(&self, name: &str) -> Result<Option<SmallFile>> {
        let path = self.root().join(name);
        let Some((file, len)) = open(&path)? else { return Ok(None) };
        if len == 0 {
            return Ok(Some(SmallFile { path, contents: Contents::Empty }));
        }
        // SAFETY: the map is read only. A file that another program cuts while it is mapped would fault; headers, index
        // and tokenizer are mapped for the time of opening only, and weights are never mapped.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|e| Error::refused("cannot map a file of the checkpoint").file(&path).cause(e))?;
        Ok(Some(SmallFile { path, contents: Contents::Mapped(map) }))
    }

    fn shard(&self, name: &str) -> Result<Option<OpenShard>> {
        for dir in &self.dirs {
            let path = dir.join(name);
            if let Some((file, len)) = open(&path)? {
                return Ok(Some(OpenShard { path, len, reader: Arc::new(file) }));
            }
        }
        Ok(None)
    }
}

/// Files that lie in the program.
pub struct Embedded {
    /// What it is called in messages.
    pub name: PathBuf,
    /// Name and bytes of each file.
    pub files: &'static [(&'static str, &'static [u8])],
}

impl Embedded {
    fn find(&self, name: &str) -> Option<&'static [u8]> {
        self.files.iter().find(|(n, _)| *n == name).map(|(_, b)| *b)
    }
}

impl Folder for Embedded {
    fn root(&self) -> &Path {
        &self.name
    }
    fn list(&self) -> Result<Vec<String>> {
        Ok(self.files.iter().map(|(n, _)| n.to_string()).collect())
    }
    fn small(&self, name: &str) -> Result<Option<SmallFile>> {
        Ok(self.find(name).map(|b| SmallFile::embedded(self.name.join(name), b)))
    }
    fn shard(&self, name: &str) -> Result<Option<OpenShard>> {
        Ok(self.find(name).map(|b| OpenShard {
            path: self.name.join(name),
            len: b.len() as u64,
            reader: Arc::new(b),
        }))
    }
}
