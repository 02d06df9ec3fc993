//! Routed experts: read in one run each, kept in host memory as far as the budget goes.

use super::io::Priority;
use super::slab::{Slab, SlabPool};
use super::stream::Reading;
use crate::checkpoint::names::{EXPERT_PARTS, expert_part_bytes};
use crate::checkpoint::shards::Checkpoint;
use crate::error::{Error, Result};
use crate::report::counters::Counters;
use crate::report::trace::{Details, Trace, Track, begin};
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An expert in memory: the six parts one after the other in the order of the file.
pub type Lease = Arc<Slab>;

/// Layer and expert.
type Key = (usize, u32);

/// An expert that has arrived, or why it has not.
type Arrival = Result<(u32, Lease)>;

struct Entry {
    slab: Lease,
    used: u64,
    pass: u64,
}

#[derive(Default)]
struct Cache {
    entries: HashMap<Key, Entry>,
    clock: u64,
    /// Reads on their way, and who waits for each.
    loading: HashMap<Key, Vec<Sender<Arrival>>>,
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

/// What the store shares with its readers.
struct Shared {
    pool: Arc<SlabPool>,
    cache: Mutex<Cache>,
    reading: Reading,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads an expert, keeps it, and tells whoever waits.
    fn load(&self, key: Key, mut slab: Slab, pass: u64) {
        let (layer, expert) = (key.0, key.1 as usize);
        let r = &self.reading;
        let result = match r.cancelled() {
            true => Err(Error::interrupted()),
            false => read_expert(&r.checkpoint, (layer, expert), &mut slab, &r.counters, &r.trace)
                .map(|()| Arc::new(slab)),
        };
        let mut cache = self.lock();
        let waiting = cache.loading.remove(&key).unwrap_or_default();
        if let Ok(lease) = &result {
            cache.clock += 1;
            let used = cache.clock;
            cache.entries.insert(key, Entry { slab: lease.clone(), used, pass });
        }
        drop(cache);
        let mut result = Some(result);
        for sender in waiting {
            let told = match &mut result {
                Some(Ok(lease)) => Ok((key.1, lease.clone())),
                failed => failed.take().map_or_else(
                    || Err(Error::run("a read that another run waited for failed").layer(layer)),
                    |r| r.map(|lease| (key.1, lease)),
                ),
            };
            // A closed channel means that the pass has ended.
            let _ = sender.send(told);
        }
    }
}

/// The cache of routed experts, and the reads behind it.
pub struct ExpertStore {
    shared: Arc<Shared>,
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

/// The experts of one layer that a pass has asked for.
pub struct Request {
    layer: usize,
    pass: u64,
    hits: VecDeque<(u32, Lease)>,
    /// Not started yet, in the order of the file.
    misses: VecDeque<u32>,
    /// Started and not delivered yet.
    in_flight: usize,
    sender: Sender<Arrival>,
    arriving: Receiver<Arrival>,
}

impl ExpertStore {
    /// A store of at most `slots` experts in memory, reads in flight included.
    pub fn new(reading: Reading, slots: usize) -> ExpertStore {
        let config = reading.checkpoint.config();
        let bytes: usize = EXPERT_PARTS.iter().map(|p| expert_part_bytes(config, *p)).sum();
        let pool = SlabPool::new(bytes, slots.max(1));
        ExpertStore { shared: Arc::new(Shared { pool, cache: Mutex::default(), reading }) }
    }

    /// Slots of the cache.
    pub fn slots(&self) -> usize {
        self.shared.pool.capacity()
    }

    /// Slots in use so far; never more than [`ExpertStore::slots`].
    pub fn slots_used(&self) -> usize {
        self.shared.pool.made()
    }

    /// Asks for the distinct `experts` of `layer`: from now on whatever is not in memory is being read, as far as there are
    /// slots. `pass` numbers the forward pass, for the reuse counter.
    pub fn request(&self, layer: usize, experts: &[u32], pass: u64) -> Result<Request> {
        let (sender, arriving) = channel();
        let mut request = Request {
            layer,
            pass,
            hits: VecDeque::with_capacity(experts.len()),
            misses: VecDeque::with_capacity(experts.len()),
            in_flight: 0,
            sender,
            arriving,
        };
        let counters = &self.shared.reading.counters;
        {
            let mut cache = self.shared.lock();
            cache.clock += 1;
            let now = cache.clock;
            for e in experts {
                if let Some(entry) = cache.entries.get_mut(&(layer, *e)) {
                    counters.expert_reused.add(u64::from(entry.pass < pass));
                    entry.used = now;
                    entry.pass = pass;
                    request.hits.push_back((*e, entry.slab.clone()));
                } else if let Some(waiting) = cache.loading.get_mut(&(layer, *e)) {
                    waiting.push(request.sender.clone());
                    request.in_flight += 1;
                } else {
                    request.misses.push_back(*e);
                }
            }
        }
        counters.expert_requests.add(experts.len() as u64);
        counters.expert_ram_hits.add(request.hits.len() as u64);
        counters.expert_misses.add((experts.len() - request.hits.len()) as u64);
        let place = |e: &u32| {
            let at = self.shared.reading.checkpoint.expert(layer, *e as usize).ok();
            at.map(|r| (r.shard[0], r.offset[0]))
        };
        request.misses.make_contiguous().sort_by_cached_key(place);
        self.start(&mut request)?;
        Ok(request)
    }

    /// Starts the reads for which there are slots.
    fn start(&self, request: &mut Request) -> Result<()> {
        while let Some(e) = request.misses.front().copied() {
            let Some(slab) = self.slot()? else { return Ok(()) };
            request.misses.pop_front();
            request.in_flight += 1;
            let key = (request.layer, e);
            self.shared.lock().loading.insert(key, vec![request.sender.clone()]);
            let (shared, pass) = (self.shared.clone(), request.pass);
            self.shared.reading.io.submit(Priority::Demand, move || shared.load(key, slab, pass));
        }
        Ok(())
    }

    /// Calls `f` once for each expert of the request, those at hand first, the others as their reads arrive.
    pub fn deliver(&self, mut request: Request, mut f: impl FnMut(u32, &Lease) -> Result<()>) -> Result<()> {
        loop {
            if let Some((e, slab)) = request.hits.pop_front() {
                f(e, &slab)?;
            } else if request.in_flight > 0 {
                let (e, slab) = self.shared.reading.wait(&request.arriving)?;
                request.in_flight -= 1;
                f(e, &slab)?;
            } else if request.misses.is_empty() {
                return Ok(());
            } else if self.shared.reading.cancelled() {
                return Err(Error::interrupted());
            } else {
                // Every slot is read by somebody else.
                std::thread::sleep(Duration::from_millis(1));
            }
            self.start(&mut request)?;
        }
    }

    /// A slab to read into: a free one, or that of an expert let go.
    fn slot(&self) -> Result<Option<Slab>> {
        if let Some(slab) = self.shared.pool.try_take()? {
            return Ok(Some(slab));
        }
        let evicted = self.shared.lock().evict();
        if evicted { self.shared.pool.try_take() } else { Ok(None) }
    }
}
