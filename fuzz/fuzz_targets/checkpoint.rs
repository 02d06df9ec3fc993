//! Any bytes as index and shard of a tiny model: a checkpoint or an error. The first two bytes say how many of the
//! others are the index; with none there is no index.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::io;
use std::path::Path;
use std::sync::Arc;
use trunkline::checkpoint::folder::{Folder, OpenShard, SmallFile};
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::memory::read::ReadAt;

const CONFIG: &[u8] = include_bytes!("../../tests/data/goldens/base/ckpt/config.json");

struct Files(Vec<(&'static str, Vec<u8>)>);

struct Content(Vec<u8>);

impl ReadAt for Content {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = self.0.get(offset as usize..).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
}

impl Files {
    fn find(&self, name: &str) -> Option<&Vec<u8>> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, bytes)| bytes)
    }
}

impl Folder for Files {
    fn root(&self) -> &Path {
        Path::new("fuzz")
    }
    fn list(&self) -> trunkline::Result<Vec<String>> {
        Ok(self.0.iter().map(|(name, _)| name.to_string()).collect())
    }
    fn small(&self, name: &str) -> trunkline::Result<Option<SmallFile>> {
        Ok(self.find(name).map(|bytes| SmallFile::owned(self.root().join(name), bytes.clone())))
    }
    fn shard(&self, name: &str) -> trunkline::Result<Option<OpenShard>> {
        Ok(self.find(name).map(|bytes| OpenShard {
            path: self.root().join(name),
            len: bytes.len() as u64,
            reader: Arc::new(Content(bytes.clone())),
        }))
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((len, rest)) = bytes.split_first_chunk() else { return };
    let (index, shard) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
    let mut files = Files(vec![("config.json", CONFIG.to_vec()), ("model.safetensors", shard.to_vec())]);
    if !index.is_empty() {
        files.0.push(("model.safetensors.index.json", index.to_vec()));
    }
    if let Err(e) = Checkpoint::open_in(Arc::new(files)) {
        assert!(!e.to_string().is_empty());
    }
});
