//! Synthetic checkpoints in the released layout: the whole network with random weights, from toy width for tests and
//! demonstration to the release's own size with holes.

mod layout;
mod values;

use super::config::{Config, MoeConfig};
use super::released::{released_layers, special_ids};
use super::shards::INDEX;
use crate::error::{Error, Result};
use layout::{BLOCK, Layout, Shard};
use rayon::prelude::*;
use serde_json::json;
use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use values::Values;

/// Bytes that one thread makes and writes at a time.
const PIECE: u64 = 1 << 20;
/// No width or count may be larger: products of three stay within 64 bits.
const LARGEST: usize = 1 << 20;
/// The vocabulary that the tiny tokenizer has: it is written wherever the model's is as large.
const TINY_VOCAB: usize = 2048;
/// Files of the tiny tokenizer.
const TINY_TOKENIZER: [(&str, &[u8]); 2] = [
    ("tiktoken.model", include_bytes!("../../assets/tokenizer-tiny/tiktoken.model")),
    ("tokenizer_config.json", include_bytes!("../../assets/tokenizer-tiny/tokenizer_config.json")),
];

/// Where the widths come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preset {
    /// The whole graph at toy width, with a tokenizer: under 4 MB.
    #[default]
    Tiny,
    /// The released widths with 5 layers and 64 experts, no tokenizer: 11.5 GB.
    Slice,
    /// The release: 1.56 TB, of use with holes only.
    Released,
}

/// What is to be written.
#[derive(Debug, Clone, Default)]
pub struct SynthOptions {
    /// Where the widths come from.
    pub preset: Preset,
    /// Layers; the pattern is the release's.
    pub layers: Option<usize>,
    /// Routed experts E.
    pub experts: Option<usize>,
    /// Experts chosen K.
    pub experts_per_token: Option<usize>,
    /// Hidden width H.
    pub hidden: Option<usize>,
    /// Vocabulary V.
    pub vocab: Option<usize>,
    /// Width of the dense MLP.
    pub intermediate: Option<usize>,
    /// Width I of an expert.
    pub moe_intermediate: Option<usize>,
    /// Latent width L of the experts.
    pub latent: Option<usize>,
    /// Heads N of both attentions.
    pub heads: Option<usize>,
    /// Chooses the values.
    pub seed: u64,
    /// Leave holes where the large tensors lie: they read as zeros.
    pub sparse: bool,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SynthReport {
    /// Files.
    pub files: usize,
    /// Bytes written, about what the drive holds.
    pub bytes: u64,
    /// Sum of the sizes of the files, holes included.
    pub apparent_bytes: u64,
}

/// The configuration of a preset.
fn preset(preset: Preset) -> Config {
    let mut c = Config::released();
    match preset {
        Preset::Released => {}
        Preset::Slice => {
            c.layers = released_layers(5);
            c.moe.experts = 64;
            c.vocab_size = 16_384;
        }
        Preset::Tiny => {
            c.layers = released_layers(9);
            c.hidden_size = 96;
            c.vocab_size = TINY_VOCAB;
            c.kda.heads = 4;
            c.kda.head_dim = 16;
            c.mla.heads = 4;
            c.mla.q_lora_rank = Some(32);
            c.mla.kv_lora_rank = 32;
            c.mla.qk_nope_head_dim = 16;
            c.mla.qk_rope_head_dim = 8;
            c.mla.v_head_dim = 16;
            c.intermediate_size = 256;
            c.moe = MoeConfig {
                experts: 16,
                experts_per_token: 4,
                intermediate_size: 64,
                latent_size: Some(64),
                ..c.moe
            };
            c.attn_res_block_size = Some(4);
            c.max_position_embeddings = 8192;
        }
    }
    c
}

/// The configuration that `options` describe. One that could not be opened again is refused as a usage error.
pub fn config(options: &SynthOptions) -> Result<Config> {
    let mut c = preset(options.preset);
    let set = |to: &mut usize, value: Option<usize>, what: &str| match value {
        Some(n) if !(1..=LARGEST).contains(&n) => {
            Err(Error::usage(format!("{what} cannot be that many"))
                .expected(format_args!("1 to {LARGEST}"), n))
        }
        Some(n) => {
            *to = n;
            Ok(())
        }
        None => Ok(()),
    };
    let mut layers = c.layers.len();
    set(&mut layers, options.layers, "layers")?;
    c.layers = released_layers(layers);
    set(&mut c.moe.experts, options.experts, "experts")?;
    set(&mut c.moe.experts_per_token, options.experts_per_token, "experts per token")?;
    set(&mut c.hidden_size, options.hidden, "hidden values")?;
    set(&mut c.vocab_size, options.vocab, "tokens in the vocabulary")?;
    set(&mut c.intermediate_size, options.intermediate, "intermediate values")?;
    set(&mut c.moe.intermediate_size, options.moe_intermediate, "intermediate values of an expert")?;
    if let Some(latent) = &mut c.moe.latent_size {
        set(latent, options.latent, "latent values")?;
    }
    set(&mut c.kda.heads, options.heads, "heads")?;
    set(&mut c.mla.heads, options.heads, "heads")?;
    (c.bos_token_id, c.eos_token_id, c.pad_token_id) = special_ids(c.vocab_size);
    let read = Config::from_json(c.to_json().to_string().as_bytes(), Path::new("config.json"))
        .map_err(|e| Error::usage("no checkpoint has such a configuration").cause(e))?;
    if read != c {
        return Err(Error::usage("no checkpoint has such a configuration")
            .cause("the released keys cannot say which of its layers have experts"));
    }
    Ok(c)
}

/// Files made so far; they are removed again unless the work ends well.
struct Files<'a> {
    dir: &'a Path,
    made_dir: bool,
    made: Vec<PathBuf>,
    keep: bool,
}

impl<'a> Files<'a> {
    /// An empty folder.
    fn begin(dir: &'a Path) -> Result<Files<'a>> {
        let made_dir = !dir.exists();
        let fail = |e| Error::io("cannot make the folder", e).file(dir);
        if made_dir {
            std::fs::create_dir_all(dir).map_err(fail)?;
        } else if !dir.is_dir() {
            return Err(Error::usage("the target is not a folder").file(dir));
        } else if std::fs::read_dir(dir).map_err(fail)?.next().is_some() {
            return Err(Error::usage("the folder is not empty")
                .file(dir)
                .hint("name a folder that is empty or not there yet"));
        }
        Ok(Files { dir, made_dir, made: Vec::new(), keep: false })
    }

    /// A new file under a temporary name.
    fn create(&mut self, name: &str) -> Result<(File, PathBuf)> {
        let path = self.dir.join(format!(".{name}.part"));
        self.made.push(path.clone());
        let file = File::create_new(&path).map_err(|e| Error::io("cannot make a file", e).file(&path))?;
        Ok((file, path))
    }

    /// Gives a file its name.
    fn name(&mut self, temporary: &Path, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        std::fs::rename(temporary, &path).map_err(|e| Error::io("cannot name a file", e).file(&path))?;
        self.made.retain(|p| p != temporary);
        self.made.push(path);
        Ok(())
    }

    /// A small file, whole.
    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<u64> {
        let (mut file, temporary) = self.create(name)?;
        file.write_all(bytes).map_err(|e| Error::io("cannot write", e).file(&temporary))?;
        self.name(&temporary, name)?;
        Ok(bytes.len() as u64)
    }
}

impl Drop for Files<'_> {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        for path in &self.made {
            if let Err(e) = std::fs::remove_file(path) {
                log::warn!("cannot remove {}: {e}", path.display());
            }
        }
        if self.made_dir
            && let Err(e) = std::fs::remove_dir(self.dir)
        {
            log::warn!("cannot remove {}: {e}", self.dir.display());
        }
    }
}

/// Sizes of a checkpoint before it is written.
#[derive(Default, Clone, Copy)]
struct Census {
    /// Sum over the tensors, as the index says it.
    tensors: u64,
    /// Sizes of the shards.
    apparent: u64,
    /// Bytes to write, headers included.
    written: u64,
    /// Space that the written parts and the index take.
    space: u64,
}

impl Census {
    fn of(shard: &Shard, layout: &Layout<'_>) -> Census {
        let data_start = shard.header.len() as u64;
        let mut c = Census { apparent: shard.len, written: data_start, ..Census::default() };
        for t in &shard.tensors {
            c.tensors += t.bytes;
            // A line of the index is the name and the file's.
            c.space += t.tensor.name.len() as u64 + 48;
            for range in layout.written(t, data_start) {
                c.written += range.end - range.start;
                // A range touches one block more than it fills.
                c.space += if layout.sparse { BLOCK } else { 0 };
            }
        }
        c.space += c.written + BLOCK;
        c
    }

    fn add(self, o: Census) -> Census {
        Census {
            tensors: self.tensors + o.tensors,
            apparent: self.apparent + o.apparent,
            written: self.written + o.written,
            space: self.space + o.space,
        }
    }
}

/// Refuses a drive with less than `needed` bytes free.
fn check_space(dir: &Path, needed: u64, free: u64) -> Result<()> {
    if needed <= free {
        return Ok(());
    }
    Err(Error::machine("there is not enough space for the checkpoint")
        .file(dir)
        .expected(format_args!("{needed} bytes free"), free)
        .hint("name a folder on a larger drive, or fewer --layers or --experts; --sparse leaves holes"))
}

/// Writes a checkpoint into `dir`, which must be empty or not there yet. The same options give the same bytes on every
/// machine. `progress` hears of the bytes done and the bytes to do, from any thread; an error that it returns ends the
/// work, and what was written is removed.
pub fn synth(
    dir: &Path,
    options: &SynthOptions,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<SynthReport> {
    let config = config(options)?;
    let layout =
        Layout { config: &config, vision: options.preset == Preset::Released, sparse: options.sparse };
    let mut files = Files::begin(dir)?;
    let census = (0..layout.shards())
        .into_par_iter()
        .map(|i| Census::of(&layout.shard(i), &layout))
        .reduce(Census::default, Census::add);
    let fs = rustix::fs::statvfs(dir)
        .map_err(|e| Error::io("cannot find out how much space is free", e.into()).file(dir))?;
    check_space(dir, census.space, fs.f_bavail.saturating_mul(fs.f_frsize))?;

    let mut report = SynthReport { files: 0, bytes: 0, apparent_bytes: 0 };
    let (index, index_path) = files.create(INDEX)?;
    let mut index = BufWriter::new(index);
    let fail = |e| Error::io("cannot write", e).file(&index_path);
    write!(index, "{{\"metadata\":{{\"total_size\":{}}},\"weight_map\":{{", census.tensors).map_err(fail)?;
    let done = AtomicU64::new(0);
    let mut separator = "\n";
    for i in 0..layout.shards() {
        let shard = layout.shard(i);
        let name = layout.file(i);
        let (file, path) = files.create(&name)?;
        let count = |n: u64| progress(done.fetch_add(n, Ordering::Relaxed) + n, census.written);
        write_shard(&file, &path, &shard, &layout, options.seed, &count)?;
        files.name(&path, &name)?;
        for t in &shard.tensors {
            write!(index, "{separator}{}:{}", json!(t.tensor.name), json!(name)).map_err(fail)?;
            separator = ",\n";
        }
        report.files += 1;
        report.apparent_bytes += shard.len;
    }
    index.write_all(b"\n}}\n").and_then(|()| index.flush()).map_err(fail)?;
    let index_bytes = index.get_ref().metadata().map_err(fail)?.len();
    drop(index);

    let pretty = |value: &serde_json::Value| format!("{value:#}\n").into_bytes();
    let mut small: Vec<(&str, Vec<u8>)> = Vec::new();
    if config.vocab_size == TINY_VOCAB {
        small.extend(TINY_TOKENIZER.iter().map(|(name, bytes)| (*name, bytes.to_vec())));
    }
    let generation =
        json!({ "max_length": config.max_position_embeddings, "eos_token_id": config.eos_token_id });
    small.push(("generation_config.json", pretty(&generation)));
    let mut small_bytes = index_bytes;
    for (name, bytes) in &small {
        small_bytes += files.put(name, bytes)?;
    }
    // Last, so that a folder with a configuration is whole.
    files.name(&index_path, INDEX)?;
    small_bytes += files.put("config.json", &pretty(&config.to_json()))?;
    report.files += small.len() + 2;
    report.bytes = census.written + small_bytes;
    report.apparent_bytes += small_bytes;
    files.keep = true;
    Ok(report)
}

thread_local! {
    /// Bytes of a piece and random words for them: kept, for fresh memory costs more than the values.
    static BUFFERS: RefCell<(Vec<u8>, Vec<u8>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Writes one shard; pieces of it in parallel.
fn write_shard(
    file: &File,
    path: &Path,
    shard: &Shard,
    layout: &Layout<'_>,
    seed: u64,
    count: &(dyn Fn(u64) -> Result<()> + Sync),
) -> Result<()> {
    let fail = |e| Error::io("cannot write", e).file(path);
    let data_start = shard.header.len() as u64;
    file.set_len(shard.len).map_err(fail)?;
    file.write_all_at(&shard.header, 0).map_err(fail)?;
    count(data_start)?;
    let pieces = |range: Range<u64>| {
        let end = range.end;
        range.step_by(PIECE as usize).map(move |from| from..end.min(from + PIECE))
    };
    shard.tensors.par_iter().try_for_each(|t| {
        let ranges: Vec<Range<u64>> = layout.written(t, data_start).into_iter().flat_map(pieces).collect();
        if ranges.is_empty() {
            return Ok(());
        }
        let values = Values::new(layout.config, &t.tensor, seed);
        ranges.into_par_iter().try_for_each(|range| {
            let n = range.end - range.start;
            let at = data_start + t.at + range.start;
            BUFFERS.with_borrow_mut(|(out, scratch)| {
                out.resize(n as usize, 0);
                values.write(range.start, out, scratch);
                file.write_all_at(out, at).map_err(|e| fail(e).tensor(&t.tensor.name).range(at, n))
            })?;
            count(n)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::shards::Checkpoint;
    use crate::error::Kind;

    fn quiet(_: u64, _: u64) -> Result<()> {
        Ok(())
    }

    fn read(dir: &Path) -> Vec<(String, Vec<u8>)> {
        let mut files: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap())
            .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
            .collect();
        files.sort();
        files
    }

    #[test]
    fn the_same_seed_gives_the_same_files_on_any_number_of_threads() {
        let write = |seed, threads| {
            let dir = tempfile::tempdir().unwrap();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let options = SynthOptions { seed, ..SynthOptions::default() };
            let report = pool.install(|| synth(dir.path(), &options, &quiet)).unwrap();
            let files = read(dir.path());
            assert_eq!(report.files, files.len());
            let sizes: u64 = files.iter().map(|(_, b)| b.len() as u64).sum();
            assert_eq!((report.bytes, report.apparent_bytes), (sizes, sizes));
            assert!(sizes < 4_000_000, "{sizes}");
            files
        };
        let first = write(3, 1);
        assert!(first == write(3, 3));
        assert!(first != write(4, 2));
        assert!(first.iter().all(|(name, _)| !name.starts_with('.')), "no temporary file is left");
    }

    #[test]
    fn what_is_written_opens_again() {
        let dir = tempfile::tempdir().unwrap();
        for (name, sparse) in [("whole", false), ("sparse", true)] {
            let dir = dir.path().join(name);
            let options = SynthOptions { layers: Some(6), experts: Some(5), sparse, ..Default::default() };
            synth(&dir, &options, &quiet).unwrap();
            let c = Checkpoint::open(&[dir]).unwrap();
            assert_eq!(*c.config(), config(&options).unwrap());
            assert!(c.unknown().is_empty());
            assert!(c.expert(3, 4).unwrap().run(c.config()).is_some(), "an expert is one run");
            let mut bytes = vec![0; 6528];
            c.read_expert(3, 4, &mut bytes).unwrap();
            assert_eq!(bytes.iter().all(|b| *b == 0), sparse);
        }
    }

    #[test]
    fn a_folder_with_files_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("mine"), "kept").unwrap();
        let e = synth(dir.path(), &SynthOptions::default(), &quiet).unwrap_err();
        assert_eq!(e.kind(), Kind::Usage);
        assert_eq!(read(dir.path()), [("mine".to_string(), b"kept".to_vec())]);
    }

    #[test]
    fn an_interruption_leaves_nothing_behind() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new");
        let stop = |done, total| if done > total / 2 { Err(Error::interrupted()) } else { Ok(()) };
        let e = synth(&dir, &SynthOptions::default(), &stop).unwrap_err();
        assert_eq!(e.kind(), Kind::Interrupted);
        assert!(!dir.exists());
    }

    #[test]
    fn space_is_checked_with_figures() {
        let e = check_space(Path::new("there"), 1000, 999).unwrap_err();
        assert_eq!(e.kind(), Kind::Machine);
        let text = e.to_string();
        assert!(text.contains("1000") && text.contains("999") && text.contains("there"), "{text}");
        check_space(Path::new("there"), 1000, 1000).unwrap();
    }

    #[test]
    fn impossible_configurations_are_usage_errors() {
        for (options, named) in [
            (SynthOptions { experts_per_token: Some(17), ..Default::default() }, "num_experts_per_token"),
            (SynthOptions { moe_intermediate: Some(33), ..Default::default() }, "moe_intermediate_size"),
            (SynthOptions { layers: Some(0), ..Default::default() }, "layers"),
            (SynthOptions { vocab: Some(2), ..Default::default() }, "eos_token_id"),
            (SynthOptions { hidden: Some(LARGEST + 1), ..Default::default() }, "hidden"),
        ] {
            let e = config(&options).unwrap_err();
            assert_eq!(e.kind(), Kind::Usage);
            assert!(e.to_string().contains(named), "{e}");
        }
    }

    #[test]
    fn released_layout_has_the_released_totals() {
        let config = Config::released();
        let layout = Layout { config: &config, vision: true, sparse: true };
        assert_eq!(layout.shards(), 96);
        assert_eq!(layout.file(95), "model-00096-of-000096.safetensors");
        let census = [93, 94, 95].map(|i| Census::of(&layout.shard(i), &layout));
        assert_eq!(census[0].tensors, 4_697_663_488);
        assert_eq!(census[1].tensors + census[2].tensors, 894_717_952);
        let layer = layout.shard(3);
        assert_eq!(layer.tensors.len(), 14 + 8 + 896 * 6);
        let written = Census::of(&layer, &layout).written;
        assert!(written < 5_000_000, "{written}");
    }
}
