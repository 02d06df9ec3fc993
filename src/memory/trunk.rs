//! The dense part of the model: which layers stay in memory, and the ring through which the others stream.

use super::read::read_exact_at;
use super::slab::{Slab, SlabPool};
use crate::checkpoint::shards::{Checkpoint, TensorRef};
use crate::error::{Error, Kind, Result};
use crate::report::counters::Counters;
use crate::report::trace::{Details, Trace, Track, begin};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// The most one task reads at a time, so that several are in flight for one layer.
const PIECE: usize = 32 << 20;
/// Tensors in a slab begin at multiples of this when they are not read as one run.
const TENSOR_ALIGN: u64 = 64;
/// Slabs of the ring: the one in use and the one being read.
const RING: usize = 2;

/// One read: `bytes` of a shard to `at` in the slab.
#[derive(Debug, Clone)]
struct Run {
    shard: u16,
    offset: u64,
    bytes: u64,
    at: u64,
    name: String,
}

/// A set of tensors that is resident or read together: a layer's trunk, or the output head.
#[derive(Debug, Clone)]
pub struct Unit {
    runs: Vec<Run>,
    tensors: HashMap<String, (u64, TensorRef)>,
    bytes: u64,
}

impl Unit {
    /// Lays out the named tensors. Neighbours in a file are read as one run, as the release allows for every layer.
    pub fn new(checkpoint: &Checkpoint, names: &[String]) -> Result<Unit> {
        let mut found = Vec::with_capacity(names.len());
        for name in names {
            found.push((name.clone(), checkpoint.tensor(name)?.clone()));
        }
        found.sort_by_key(|(_, t)| (t.shard, t.offset));
        let mut unit = Unit { runs: Vec::new(), tensors: HashMap::new(), bytes: 0 };
        for (name, t) in found {
            match unit.runs.last_mut() {
                Some(r) if r.shard == t.shard && r.offset + r.bytes == t.offset => r.bytes += t.bytes,
                _ => {
                    let at = unit.bytes.next_multiple_of(TENSOR_ALIGN);
                    unit.runs.push(Run {
                        shard: t.shard,
                        offset: t.offset,
                        bytes: t.bytes,
                        at,
                        name: name.clone(),
                    });
                }
            }
            if let Some(r) = unit.runs.last() {
                unit.bytes = r.at + r.bytes;
                unit.tensors.insert(name, (unit.bytes - t.bytes, t));
            }
        }
        Ok(unit)
    }

    /// Bytes of the slab that holds the unit.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the unit takes.
    pub fn reads(&self) -> usize {
        self.runs.len()
    }

    /// Where in the slab a tensor begins, and what it is.
    pub fn find(&self, name: &str) -> Option<(usize, &TensorRef)> {
        self.tensors.get(name).and_then(|(at, t)| Some((usize::try_from(*at).ok()?, t)))
    }
}

/// What the readers share.
struct Shared {
    checkpoint: Arc<Checkpoint>,
    units: Vec<Unit>,
    counters: Arc<Counters>,
    cancel: Arc<AtomicBool>,
    io: Arc<rayon::ThreadPool>,
    trace: Option<Arc<Trace>>,
    ring: Option<Arc<SlabPool>>,
}

impl Shared {
    fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Reads unit `i`.
    fn read(&self, i: usize, slab: &mut Slab) -> Result<()> {
        let unit = &self.units[i];
        // The last unit is the output head.
        let layer = (i + 1 < self.units.len()).then_some(i);
        let mut rest = slab.bytes_mut();
        let mut start = 0u64;
        let mut jobs = Vec::new();
        for run in &unit.runs {
            let skip = usize::try_from(run.at - start).map_err(|_| Error::run("a unit is too large"))?;
            let len = usize::try_from(run.bytes).map_err(|_| Error::run("a unit is too large"))?;
            let (head, tail) = rest
                .split_at_mut_checked(skip + len)
                .ok_or_else(|| Error::run("a buffer is too small for its layer"))?;
            for (i, piece) in head[skip..].chunks_mut(PIECE).enumerate() {
                jobs.push((run, (i * PIECE) as u64, piece));
            }
            rest = tail;
            start = run.at + run.bytes;
        }
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        self.io.scope(|scope| {
            for (run, at, piece) in jobs {
                let failed = &failed;
                scope.spawn(move |_| {
                    let span = begin(&self.trace);
                    let result = if self.cancelled() {
                        Err(Error::interrupted())
                    } else {
                        let path = &self.checkpoint.shards()[usize::from(run.shard)].path;
                        read_exact_at(
                            self.checkpoint.reader(run.shard).as_ref(),
                            path,
                            piece,
                            run.offset + at,
                        )
                        .map_err(|e| e.tensor(run.name.clone()))
                    };
                    match result {
                        Ok(()) => {
                            let bytes = piece.len() as u64;
                            self.counters.nvme_bytes.add(bytes);
                            if let Some(span) = span {
                                let (bytes, shard) = (Some(bytes), Some(run.shard));
                                let details = Details { layer, bytes, shard, ..Details::default() };
                                span.end(Track::Reads, run.name.clone(), details);
                            }
                        }
                        Err(e) => {
                            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                        }
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// Every unit of the trunk: resident, or streamed in order through a ring of two slabs.
pub struct Trunk {
    shared: Arc<Shared>,
    resident: Vec<Option<OnceLock<Arc<Slab>>>>,
    pending: Mutex<HashMap<usize, Receiver<Result<Slab>>>>,
}

/// What a trunk is made of.
pub struct TrunkParts {
    /// The files.
    pub checkpoint: Arc<Checkpoint>,
    /// The units, in the order of use.
    pub units: Vec<Unit>,
    /// Which of them stay in memory.
    pub resident: Vec<bool>,
    /// Where reads are counted.
    pub counters: Arc<Counters>,
    /// Set when the user wants to stop.
    pub cancel: Arc<AtomicBool>,
    /// The threads that read.
    pub io: Arc<rayon::ThreadPool>,
    /// Where reads are recorded, if they are.
    pub trace: Option<Arc<Trace>>,
}

impl Trunk {
    /// A trunk of which nothing has been read yet.
    pub fn new(parts: TrunkParts) -> Trunk {
        let TrunkParts { checkpoint, units, resident, counters, cancel, io, trace } = parts;
        let largest = units.iter().zip(&resident).filter(|(_, r)| !**r).map(|(u, _)| u.bytes()).max();
        let ring = largest.and_then(|b| usize::try_from(b).ok()).map(|b| SlabPool::new(b, RING));
        Trunk {
            resident: resident.iter().map(|r| r.then(OnceLock::new)).collect(),
            shared: Arc::new(Shared { checkpoint, units, counters, cancel, io, trace, ring }),
            pending: Mutex::default(),
        }
    }

    /// The layout of unit `i`.
    pub fn unit(&self, i: usize) -> &Unit {
        &self.shared.units[i]
    }

    /// Units that stay in memory.
    pub fn resident_units(&self) -> usize {
        self.resident.iter().flatten().count()
    }

    /// Whether unit `i` stays in memory.
    pub fn is_resident(&self, i: usize) -> bool {
        self.resident[i].is_some()
    }

    /// The bytes of unit `i`, read for this call alone.
    pub fn read_once(&self, i: usize) -> Result<Arc<Slab>> {
        let bytes = usize::try_from(self.unit(i).bytes()).map_err(|_| Error::run("a unit is too large"))?;
        let mut slab = Slab::new(bytes)?;
        self.shared.read(i, &mut slab)?;
        Ok(Arc::new(slab))
    }

    /// The bytes of unit `i`: at hand, or once its read has arrived. Starts the read of the next streamed unit.
    pub fn fetch(&self, i: usize) -> Result<Arc<Slab>> {
        if let Some(cell) = &self.resident[i] {
            if let Some(slab) = cell.get() {
                return Ok(slab.clone());
            }
            let bytes =
                usize::try_from(self.unit(i).bytes()).map_err(|_| Error::run("a unit is too large"))?;
            let mut slab = Slab::new(bytes)?;
            self.shared.read(i, &mut slab)?;
            return Ok(cell.get_or_init(|| Arc::new(slab)).clone());
        }
        let slab = loop {
            self.start(i);
            match self.wait(i) {
                // A read that an earlier interruption ended: the run goes on now, so it is read again.
                Err(e) if e.kind() == Kind::Interrupted && !self.shared.cancelled() => {}
                result => break result?,
            }
        };
        let n = self.resident.len();
        if let Some(next) = (1..=n).map(|d| (i + d) % n).find(|j| self.resident[*j].is_none())
            && next != i
        {
            self.start(next);
        }
        Ok(Arc::new(slab))
    }

    /// Waits for the read of unit `i` that [`Trunk::start`] began.
    fn wait(&self, i: usize) -> Result<Slab> {
        let waiting = self.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&i);
        let Some(receiver) = waiting else { return Err(Error::run("a streamed layer was asked for twice")) };
        loop {
            match receiver.recv_timeout(Duration::from_millis(50)) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if self.shared.cancelled() => return Err(Error::interrupted()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Error::run("a reader thread ended early")),
            }
        }
    }

    /// Starts reading streamed unit `i` unless it is on its way already.
    fn start(&self, i: usize) {
        let Some(ring) = self.shared.ring.clone() else { return };
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.contains_key(&i) {
            return;
        }
        let (sender, receiver) = channel();
        pending.insert(i, receiver);
        let shared = self.shared.clone();
        self.shared.io.spawn(move || {
            let result = ring.take(&|| shared.cancelled()).and_then(|mut slab| {
                shared.read(i, &mut slab)?;
                Ok(slab)
            });
            // A closed channel means that nobody waits any more: the slab goes back to the ring.
            let _ = sender.send(result);
        });
    }
}
