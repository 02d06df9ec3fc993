//! A small synthetic checkpoint on disk, and the ways in which checkpoints go wrong.

use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use trunkline::checkpoint::synth::{SynthOptions, synth};

/// Shards of [`TinyCheckpoint::new`]: five layers and what lies outside them.
pub const SHARDS: usize = 6;
/// The index file.
pub const INDEX: &str = "model.safetensors.index.json";

/// A checkpoint in a folder that goes away with it.
pub struct TinyCheckpoint {
    dir: tempfile::TempDir,
    shards: usize,
}

/// One tensor of a shard.
#[derive(Clone)]
pub struct Entry {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl Entry {
    pub fn new(name: &str, dtype: &str, shape: &[usize], data: Vec<u8>) -> Entry {
        Entry { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), data }
    }
}

impl TinyCheckpoint {
    /// Both attentions, a dense layer and routed experts; six shards and an index.
    pub fn new() -> TinyCheckpoint {
        TinyCheckpoint::with(&SynthOptions { layers: Some(5), ..SynthOptions::default() })
    }

    pub fn with(options: &SynthOptions) -> TinyCheckpoint {
        let dir = tempfile::tempdir().unwrap();
        synth(dir.path(), options, &|_, _| Ok(())).unwrap();
        let shards = options.layers.unwrap_or(9) + 1;
        TinyCheckpoint { dir, shards }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
    pub fn dirs(&self) -> [PathBuf; 1] {
        [self.dir.path().to_path_buf()]
    }
    /// File name of shard `n`, counted from 1.
    pub fn shard_name(&self, n: usize) -> String {
        format!("model-{n:05}-of-{:06}.safetensors", self.shards)
    }
    pub fn shard(&self, n: usize) -> PathBuf {
        self.path().join(self.shard_name(n))
    }

    /// Takes the last `bytes` bytes away.
    pub fn cut(&self, n: usize, bytes: u64) {
        let len = std::fs::metadata(self.shard(n)).unwrap().len();
        self.cut_to(n, len - bytes);
    }
    pub fn cut_to(&self, n: usize, len: u64) {
        std::fs::OpenOptions::new().write(true).open(self.shard(n)).unwrap().set_len(len).unwrap();
    }
    pub fn drop_shard(&self, n: usize) {
        std::fs::remove_file(self.shard(n)).unwrap();
    }
    pub fn replace(&self, n: usize, bytes: &[u8]) {
        std::fs::write(self.shard(n), bytes).unwrap();
    }
    /// The pointer file that a clone without the large files leaves.
    pub fn lfs_pointer(&self, n: usize) {
        let text = "version https://git-lfs.github.com/spec/v1\n\
            oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345678901\n";
        self.replace(n, text.as_bytes());
    }

    pub fn entries(&self, n: usize) -> Vec<Entry> {
        let bytes = std::fs::read(self.shard(n)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let mut found: Vec<(usize, Entry)> = Vec::new();
        for (name, info) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let offset = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
            let shape = info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize);
            let entry = Entry {
                name: name.clone(),
                dtype: info["dtype"].as_str().unwrap().to_string(),
                shape: shape.collect(),
                data: bytes[8 + length + offset(0)..8 + length + offset(1)].to_vec(),
            };
            found.push((offset(0), entry));
        }
        found.sort_by_key(|(at, _)| *at);
        found.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Writes shard `n` anew with a fitting header.
    pub fn write(&self, n: usize, entries: &[Entry]) {
        let mut header = Map::new();
        let mut data = Vec::new();
        for e in entries {
            let from = data.len();
            data.extend_from_slice(&e.data);
            let info = json!({"dtype": e.dtype, "shape": e.shape, "data_offsets": [from, data.len()]});
            header.insert(e.name.clone(), info);
        }
        let text = Value::Object(header).to_string();
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.into_bytes());
        bytes.extend(data);
        self.replace(n, &bytes);
    }

    /// Changes the tensors of shard `n`.
    pub fn edit(&self, n: usize, change: impl FnOnce(&mut Vec<Entry>)) {
        let mut entries = self.entries(n);
        change(&mut entries);
        self.write(n, &entries);
    }
    /// Changes every tensor of every shard.
    pub fn edit_each(&self, mut change: impl FnMut(&mut Entry)) {
        for n in 1..=self.shards {
            self.edit(n, |entries| entries.iter_mut().for_each(&mut change));
        }
    }
    pub fn edit_tensor(&self, n: usize, name: &str, change: impl FnOnce(&mut Entry)) {
        self.edit(n, |entries| {
            change(entries.iter_mut().find(|e| e.name == name).unwrap_or_else(|| panic!("no {name}")));
        });
    }

    fn edit_json(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let path = self.path().join(file);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
    }
    pub fn edit_config(&self, change: impl FnOnce(&mut Value)) {
        self.edit_json("config.json", change);
    }
    /// Changes the map of tensors to files.
    pub fn edit_index(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_json(INDEX, |v| change(v["weight_map"].as_object_mut().unwrap()));
    }
    pub fn remove_index(&self) {
        std::fs::remove_file(self.path().join(INDEX)).unwrap();
    }
    /// The index that the shards imply.
    pub fn reindex(&self) {
        let mut map = Map::new();
        for n in 1..=self.shards {
            for e in self.entries(n) {
                map.insert(e.name, json!(self.shard_name(n)));
            }
        }
        self.edit_index(|index| *index = map);
    }
    /// Names without `language_model.` or `language_model.model.`, in shards and index.
    pub fn strip_prefix(&self, prefix: &str) {
        self.edit_each(|e| {
            if let Some(bare) = e.name.strip_prefix(prefix) {
                e.name = bare.to_string();
            }
        });
        self.reindex();
    }

    /// The same files as a Hugging Face cache entry: links in `snapshots/<rev>` to `blobs/`. Returns its folder.
    pub fn hub_cache(&self) -> PathBuf {
        let entry = self.path().join("models--moonshotai--Kimi-K3");
        let snapshot = entry.join("snapshots/0123abcd");
        for folder in [&entry.join("blobs"), &snapshot, &entry.join("refs")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(entry.join("refs/main"), "0123abcd").unwrap();
        let files: Vec<_> = std::fs::read_dir(self.path()).unwrap().map(|e| e.unwrap()).collect();
        for (i, file) in files.iter().filter(|f| f.file_type().unwrap().is_file()).enumerate() {
            std::fs::rename(file.path(), entry.join(format!("blobs/{i:064x}"))).unwrap();
            let link = format!("../../blobs/{i:064x}");
            std::os::unix::fs::symlink(link, snapshot.join(file.file_name())).unwrap();
        }
        entry
    }

    /// Runs a verb of the program on the checkpoint.
    pub fn run(&self, verb: &[&str]) -> Output {
        run(&[verb, &["--model", self.path().to_str().unwrap()]].concat())
    }
}

/// Runs the program.
pub fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trunkline")).args(args).env_remove("TRUNKLINE_MODEL").output().unwrap()
}

/// What a verb said on stderr and stdout, after its exit code was checked.
pub fn text(output: &Output, code: i32) -> String {
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}
