//! The dense part of the model: which matrices stay in memory, and which go through the ring.

use super::io::Priority;
use super::read::{SECTOR, lead, region_bytes};
use super::slab::Slab;
use super::stream::{Reading, Run, Stream, StreamPlan, Streamed, slab_bytes};
use crate::checkpoint::names::DType;
use crate::checkpoint::shards::{Checkpoint, TensorRef};
use crate::compute::device::{Format, Weight};
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::channel;

/// The most one task reads at a time, so that several are in flight for one layer.
const PIECE: usize = 8 << 20;

/// Tensors that are read into memory together. Neighbours in a file are read as one run.
#[derive(Debug, Clone, Default)]
struct Group {
    /// A run and where its region begins in the slab.
    runs: Vec<(Run, usize, String)>,
    tensors: HashMap<String, usize>,
    bytes: usize,
}

impl Group {
    fn new(mut found: Vec<(&str, &TensorRef)>) -> Result<Group> {
        found.sort_by_key(|(_, t)| (t.shard, t.offset));
        let too_large = || Error::run("a layer is too large for this machine's addresses");
        let mut group = Group::default();
        for (name, t) in found {
            let bytes = usize::try_from(t.bytes).map_err(|_| too_large())?;
            match group.runs.last_mut() {
                Some((r, ..)) if r.shard == t.shard && r.offset + r.bytes as u64 == t.offset => {
                    r.bytes += bytes;
                }
                _ => {
                    let run = Run { shard: t.shard, offset: t.offset, bytes };
                    group.runs.push((run, group.bytes.next_multiple_of(SECTOR), name.to_string()));
                }
            }
            if let Some((r, at, _)) = group.runs.last() {
                group.tensors.insert(name.to_string(), at + lead(r.offset) + r.bytes - bytes);
                group.bytes = at + region_bytes(r.offset, r.bytes);
            }
        }
        Ok(group)
    }

    /// The pieces that runs are read in, each with where its region begins in the slab. They end at whole sectors of the
    /// file, so that no two share one.
    fn pieces(&self) -> Vec<(Run, usize, &str)> {
        let mut pieces = Vec::new();
        for (run, at, name) in &self.runs {
            let mut done = 0;
            while done < run.bytes {
                let offset = run.offset + done as u64;
                let bytes = (PIECE - lead(offset)).min(run.bytes - done);
                let start = at + lead(run.offset) + done - lead(offset);
                pieces.push((Run { shard: run.shard, offset, bytes }, start, name.as_str()));
                done += bytes;
            }
        }
        pieces
    }

    /// Reads everything, several pieces at a time.
    fn read(&self, layer: Option<usize>, reading: &Reading) -> Result<Arc<Slab>> {
        let pieces = self.pieces();
        let ranges = pieces.iter().map(|(run, at, _)| *at..at + region_bytes(run.offset, run.bytes));
        let (regions, slab) = Slab::new(self.bytes)?.split(ranges)?;
        let (sender, arrived) = channel();
        for ((run, _, name), mut region) in pieces.iter().copied().zip(regions) {
            let (sender, job, name) = (sender.clone(), reading.clone(), name.to_string());
            reading.io.submit(Priority::Demand, move || {
                let result = job.read(run, region.bytes_mut(), layer, &name);
                // The region is given up before the waiting side hears of it.
                drop(region);
                let _ = sender.send(result);
            });
        }
        for _ in &pieces {
            reading.wait(&arrived)?;
        }
        slab.join().map(Arc::new)
    }
}

/// A set of tensors that is used together: a layer's trunk, or the output head.
pub struct Unit {
    layer: Option<usize>,
    tensors: HashMap<String, TensorRef>,
    /// Matrices in the order of use, and whether each must be at hand as a whole.
    matrices: Vec<(String, bool)>,
    bytes: u64,
}

impl Unit {
    /// The named tensors of a layer (`None`: of the output head). `matrices` lists those that may be streamed, in the
    /// order in which a pass uses them, each with whether it is used as a whole; the others always stay in memory.
    pub fn new(
        checkpoint: &Checkpoint,
        layer: Option<usize>,
        names: &[String],
        matrices: Vec<(String, bool)>,
    ) -> Result<Unit> {
        let mut tensors = HashMap::new();
        for name in names {
            tensors.insert(name.clone(), checkpoint.tensor(name)?.clone());
        }
        if let Some((name, _)) = matrices.iter().find(|(name, _)| !tensors.contains_key(name)) {
            return Err(Error::run("a streamed matrix is no tensor of its layer").tensor(name));
        }
        let bytes = tensors.values().map(|t| t.bytes).sum();
        Ok(Unit { layer, tensors, matrices, bytes })
    }

    /// Bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of each matrix, in the order of use.
    pub fn matrix_bytes(&self) -> Vec<u64> {
        self.matrices.iter().map(|(name, _)| self.tensors[name].bytes).collect()
    }

    /// Values of the tensors that are no matrices.
    pub fn small_values(&self) -> u64 {
        let is_matrix = |name: &String| self.matrices.iter().any(|(m, _)| m == name);
        let values = |t: &TensorRef| t.shape.iter().product::<usize>() as u64;
        self.tensors.iter().filter(|(name, _)| !is_matrix(name)).map(|(_, t)| values(t)).sum()
    }

    /// Bytes of a ring slab that its matrices need, in blocks of at most `block` bytes.
    pub fn slab_bytes(&self, block: usize) -> usize {
        self.matrices
            .iter()
            .map(|(name, whole)| slab_bytes(&self.tensors[name], block, *whole))
            .max()
            .unwrap_or(0)
    }
}

/// Where the tensors of a unit are.
pub struct Held {
    tensors: HashMap<String, TensorRef>,
    resident: Vec<(Arc<Slab>, HashMap<String, usize>)>,
    streamed: HashMap<String, Streamed>,
    stream: Option<Arc<Stream>>,
}

impl Held {
    /// A tensor as a weight `[rows, cols]`: a vector counts as one row, a convolution `[P,1,k]` as P rows of k.
    pub fn weight(&self, name: &str) -> Result<Weight> {
        let t = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::refused("a tensor the configuration implies was not bound").tensor(name))?;
        let format = match t.dtype {
            DType::F32 => Format::F32,
            DType::Bf16 => Format::Bf16,
            other => {
                return Err(Error::refused("unexpected dtype").tensor(name).expected("BF16 or F32", other));
            }
        };
        let (rows, cols) = match t.shape.as_slice() {
            [n] => (1, *n),
            [r, c] | [r, 1, c] => (*r, *c),
            other => {
                return Err(Error::refused("unexpected shape")
                    .tensor(name)
                    .expected("[n] or [n, m]", format_args!("{other:?}")));
            }
        };
        if let (Some(s), Some(stream)) = (self.streamed.get(name), &self.stream) {
            return Ok(Weight::streamed(stream.clone(), s.blocks.start, s.rows, rows, cols, format));
        }
        let found = self.resident.iter().find_map(|(slab, at)| Some((slab, at.get(name)?)));
        let (slab, at) = found.ok_or_else(|| Error::run("a tensor was not read").tensor(name))?;
        Weight::new(slab.clone(), *at, rows, cols, format).map_err(|e| e.tensor(name))
    }
}

/// Every unit of the trunk.
pub struct Trunk {
    units: Vec<Unit>,
    /// Matrices of each unit that stay in memory.
    resident: Vec<Vec<bool>>,
    streamed: Vec<HashMap<String, Streamed>>,
    stream: Option<Arc<Stream>>,
    reading: Reading,
}

/// What a trunk is made of.
pub struct TrunkParts {
    /// The units, in the order of use.
    pub units: Vec<Unit>,
    /// Which matrices of each stay in memory.
    pub resident: Vec<Vec<bool>>,
    /// Units that another device holds: nothing of them is streamed here.
    pub elsewhere: Vec<bool>,
    /// The most bytes of a block.
    pub block: usize,
    /// Buffers of the ring.
    pub slabs: usize,
    /// How to read.
    pub reading: Reading,
}

impl Trunk {
    /// A trunk of which nothing has been read yet.
    pub fn new(parts: TrunkParts) -> Trunk {
        let TrunkParts { units, resident, elsewhere, block, slabs, reading } = parts;
        let mut plan = StreamPlan::default();
        let mut streamed: Vec<HashMap<String, Streamed>> = Vec::with_capacity(units.len());
        for ((unit, resident), elsewhere) in units.iter().zip(&resident).zip(&elsewhere) {
            let mut of_unit = HashMap::new();
            for ((name, whole), _) in
                unit.matrices.iter().zip(resident).filter(|(_, resident)| !**resident && !elsewhere)
            {
                let s = plan.push(name, &unit.tensors[name], unit.layer, block, *whole);
                of_unit.insert(name.clone(), s);
            }
            streamed.push(of_unit);
        }
        let stream = (!plan.is_empty()).then(|| Arc::new(Stream::new(plan, slabs, reading.clone())));
        Trunk { units, resident, streamed, stream, reading }
    }

    /// Unit `i`.
    pub fn unit(&self, i: usize) -> &Unit {
        &self.units[i]
    }

    /// Whether all of unit `i` stays in memory.
    pub fn is_resident(&self, i: usize) -> bool {
        self.resident[i].iter().all(|r| *r)
    }

    /// Whether anything is streamed.
    pub fn streams(&self) -> bool {
        self.stream.is_some()
    }

    fn read(&self, i: usize, wanted: impl Fn(&str) -> bool) -> Result<Held> {
        let unit = &self.units[i];
        let found = unit.tensors.iter().filter(|(name, _)| wanted(name)).map(|(n, t)| (n.as_str(), t));
        let group = Group::new(found.collect())?;
        let slab = group.read(unit.layer, &self.reading)?;
        Ok(Held {
            tensors: unit.tensors.clone(),
            resident: vec![(slab, group.tensors)],
            streamed: HashMap::new(),
            stream: None,
        })
    }

    /// All of unit `i`, read for this call alone.
    pub fn read_once(&self, i: usize) -> Result<Held> {
        self.read(i, |_| true)
    }

    /// Unit `i` as it is placed: reads what stays in memory. The tensors that are no matrices are in a slab of their own,
    /// which whoever widens them need not keep.
    pub fn hold(&self, i: usize) -> Result<Held> {
        let unit = &self.units[i];
        let is_matrix = |name: &str| unit.matrices.iter().any(|(m, _)| m == name);
        if self.is_resident(i) {
            return self.read_once(i);
        }
        let mut held = self.read(i, |name| !is_matrix(name))?;
        for ((name, _), _) in unit.matrices.iter().zip(&self.resident[i]).filter(|(_, resident)| **resident) {
            held.resident.extend(self.read(i, |n| n == name)?.resident);
        }
        held.streamed = self.streamed[i].clone();
        held.stream = self.stream.clone();
        Ok(held)
    }
}
