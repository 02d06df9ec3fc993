//! Routed experts: read in one run each, kept in host memory as far as the budget goes.

use super::slab::{Slab, SlabPool};
use crate::checkpoint::names::{EXPERT_PARTS, expert_part_bytes};
use crate::checkpoint::shards::Checkpoint;
use crate::error::{Error, Result};
use crate::report::counters::Counters;
use crate::report::trace::{Details, Trace, Track, begin};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// An expert in memory: the six parts one after the other in the order of the file.
pub type Lease = Arc<Slab>;

struct Entry {
    slab: Lease,
    used: u64,
    pass: u64,
}

#[derive(Default)]
struct Cache {
    entries: HashMap<(usize, u32), Entry>,
    clock: u64,
}

impl Cache {
    /// Lets go of the least recently used expert that nobody reads; its slab returns to the pool.
    fn evict(&mut self) -> bool {
        let oldest = self
            .entries
            .iter()
            .filter(|(_, e)| Arc::strong_count(&e.slab) == 1)
            .min_by_key(|(_, e)| e.used)
            .map(|(k, _)| *k);
        oldest.is_some_and(|k| self.entries.remove(&k).is_some())
    }
}

/// The cache of routed experts, and the reads behind it.
pub struct ExpertStore {
    checkpoint: Arc<Checkpoint>,
    pool: Arc<SlabPool>,
    cache: Mutex<Cache>,
    io: Arc<rayon::ThreadPool>,
    counters: Arc<Counters>,
    cancel: Arc<AtomicBool>,
    trace: Option<Arc<Trace>>,
}

/// Reads an expert into the start of `slab`, counted, and recorded if there is a trace.
pub fn read_expert(
    checkpoint: &Checkpoint,
    (layer, expert): (usize, usize),
    slab: &mut Slab,
    counters: &Counters,
    trace: &Option<Arc<Trace>>,
) -> Result<()> {
    let bytes: usize = EXPERT_PARTS.iter().map(|p| expert_part_bytes(checkpoint.config(), *p)).sum();
    let span = begin(trace);
    checkpoint.read_expert(layer, expert, &mut slab.bytes_mut()[..bytes])?;
    counters.nvme_bytes.add(bytes as u64);
    if let Some(span) = span {
        let shard = checkpoint.expert(layer, expert).ok().map(|e| e.shard[0]);
        let details = Details { layer: Some(layer), bytes: Some(bytes as u64), shard, ..Details::default() };
        span.end(Track::Reads, format!("layer {layer} / expert {expert}"), details);
    }
    Ok(())
}

impl ExpertStore {
    /// A store of at most `slots` experts in memory, reads in flight included.
    pub fn new(
        checkpoint: Arc<Checkpoint>,
        slots: usize,
        io: Arc<rayon::ThreadPool>,
        counters: Arc<Counters>,
        cancel: Arc<AtomicBool>,
        trace: Option<Arc<Trace>>,
    ) -> ExpertStore {
        let bytes: usize = EXPERT_PARTS.iter().map(|p| expert_part_bytes(checkpoint.config(), *p)).sum();
        ExpertStore {
            pool: SlabPool::new(bytes, slots.max(1)),
            checkpoint,
            cache: Mutex::default(),
            io,
            counters,
            cancel,
            trace,
        }
    }

    /// Slots of the cache.
    pub fn slots(&self) -> usize {
        self.pool.capacity()
    }

    /// Slots in use so far; never more than [`ExpertStore::slots`].
    pub fn slots_used(&self) -> usize {
        self.pool.made()
    }

    /// Calls `f` once for each of the distinct `experts` of `layer`, those at hand first, the others as their reads
    /// arrive. `pass` numbers the forward pass, for the reuse counter.
    pub fn for_each(
        &self,
        layer: usize,
        experts: &[u32],
        pass: u64,
        mut f: impl FnMut(u32, &Lease) -> Result<()>,
    ) -> Result<()> {
        let mut hits = Vec::with_capacity(experts.len());
        let mut misses = Vec::with_capacity(experts.len());
        {
            let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
            cache.clock += 1;
            let now = cache.clock;
            for e in experts {
                match cache.entries.get_mut(&(layer, *e)) {
                    Some(entry) => {
                        self.counters.expert_reused.add(u64::from(entry.pass < pass));
                        entry.used = now;
                        entry.pass = pass;
                        hits.push((*e, entry.slab.clone()));
                    }
                    None => misses.push(*e),
                }
            }
        }
        self.counters.expert_requests.add(experts.len() as u64);
        self.counters.expert_ram_hits.add(hits.len() as u64);
        self.counters.expert_misses.add(misses.len() as u64);
        let depth = self.io.current_num_threads();
        let (sender, arrived) = channel::<Result<(u32, Slab)>>();
        let (mut hits, mut misses) = (hits.into_iter(), misses.into_iter().peekable());
        let mut in_flight = 0;
        loop {
            while in_flight < depth && misses.peek().is_some() {
                let Some(slab) = self.slot()? else { break };
                if let Some(e) = misses.next() {
                    self.read(layer, e, slab, sender.clone());
                    in_flight += 1;
                }
            }
            if let Some((e, slab)) = hits.next() {
                f(e, &slab)?;
            } else if in_flight > 0 {
                let (e, slab) = loop {
                    match arrived.recv_timeout(Duration::from_millis(50)) {
                        Ok(result) => break result?,
                        Err(RecvTimeoutError::Timeout) if self.cancelled() => {
                            return Err(Error::interrupted());
                        }
                        Err(RecvTimeoutError::Timeout) => {}
                        Err(RecvTimeoutError::Disconnected) => {
                            return Err(Error::run("a reader thread ended early"));
                        }
                    }
                };
                in_flight -= 1;
                let slab = Arc::new(slab);
                self.insert((layer, e), slab.clone(), pass);
                f(e, &slab)?;
            } else if misses.peek().is_none() {
                return Ok(());
            } else if self.cancelled() {
                return Err(Error::interrupted());
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// A slab to read into: a free one, or that of an expert let go.
    fn slot(&self) -> Result<Option<Slab>> {
        if let Some(slab) = self.pool.try_take()? {
            return Ok(Some(slab));
        }
        let evicted = self.cache.lock().unwrap_or_else(PoisonError::into_inner).evict();
        if evicted { self.pool.try_take() } else { Ok(None) }
    }

    fn read(
        &self,
        layer: usize,
        expert: u32,
        mut slab: Slab,
        sender: std::sync::mpsc::Sender<Result<(u32, Slab)>>,
    ) {
        let (checkpoint, counters, cancel, trace) =
            (self.checkpoint.clone(), self.counters.clone(), self.cancel.clone(), self.trace.clone());
        self.io.spawn(move || {
            let result = if cancel.load(Ordering::Relaxed) {
                Err(Error::interrupted())
            } else {
                read_expert(&checkpoint, (layer, expert as usize), &mut slab, &counters, &trace)
                    .map(|()| (expert, slab))
            };
            // A closed channel means that the pass has ended: the slab goes back to the pool.
            let _ = sender.send(result);
        });
    }

    fn insert(&self, key: (usize, u32), slab: Lease, pass: u64) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.clock += 1;
        let used = cache.clock;
        cache.entries.insert(key, Entry { slab, used, pass });
    }
}
