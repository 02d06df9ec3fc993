//! The ring that streamed matrices go through: blocks of whole rows, read ahead in the order of use.

use super::io::{IoPool, Priority};
use super::read::{lead, read_run, region_bytes};
use super::slab::{Slab, SlabPool};
use crate::checkpoint::shards::{Checkpoint, TensorRef};
use crate::compute::device::RowBlocks;
use crate::error::{Error, Kind, Result};
use crate::report::counters::Counters;
use crate::report::trace::{Details, Trace, Track, begin};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes of a block, unless a matrix must stay whole.
pub const BLOCK: usize = 32 << 20;

/// What readers share: the files, where bytes are counted, and whether to stop.
#[derive(Clone)]
pub struct Reading {
    /// The files.
    pub checkpoint: Arc<Checkpoint>,
    /// The threads that read.
    pub io: Arc<IoPool>,
    /// Where reads are counted.
    pub counters: Arc<Counters>,
    /// Set when the user wants to stop.
    pub cancel: Arc<AtomicBool>,
    /// Where reads are recorded, if they are.
    pub trace: Option<Arc<Trace>>,
}

/// A run of bytes in a shard.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Shard.
    pub shard: u16,
    /// Absolute offset in its file.
    pub offset: u64,
    /// Length.
    pub bytes: usize,
}

impl Reading {
    /// Whether the user wants to stop.
    pub fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Reads `run` into `region`, so that it lies at [`lead`] of its offset; counted, and recorded if there is a trace.
    pub fn read(&self, run: Run, region: &mut [u8], layer: Option<usize>, name: &str) -> Result<()> {
        if self.cancelled() {
            return Err(Error::interrupted());
        }
        let span = begin(&self.trace);
        let path = &self.checkpoint.shards()[usize::from(run.shard)].path;
        let reader = self.checkpoint.reader(run.shard);
        read_run(reader.as_ref(), path, region, run.offset, run.bytes).map_err(|e| e.tensor(name))?;
        let bytes = run.bytes as u64;
        self.counters.nvme_bytes.add(bytes);
        if let Some(span) = span {
            let details = Details { layer, bytes: Some(bytes), shard: Some(run.shard), ..Details::default() };
            span.end(Track::Reads, name.to_string(), details);
        }
        Ok(())
    }

    /// Waits for a read; gives up with an interruption once the user wants to stop. The wait is counted.
    pub fn wait<T>(&self, arriving: &Receiver<Result<T>>) -> Result<T> {
        let start = Instant::now();
        let result = loop {
            match arriving.recv_timeout(Duration::from_millis(50)) {
                Ok(result) => break result,
                Err(RecvTimeoutError::Timeout) if self.cancelled() => break Err(Error::interrupted()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    break Err(Error::run("a reader thread ended early"));
                }
            }
        };
        self.counters.stall_nanos.add(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        result
    }
}

/// A matrix that is streamed: which blocks are its rows.
#[derive(Debug, Clone)]
pub struct Streamed {
    /// Numbers of its blocks.
    pub blocks: Range<usize>,
    /// Rows of every block but the last.
    pub rows: usize,
}

struct Block {
    run: Run,
    layer: Option<usize>,
    name: Arc<str>,
}

/// Every streamed block of a model in the order of use.
#[derive(Default)]
pub struct StreamPlan {
    blocks: Vec<Block>,
}

/// Rows of a matrix that make a block of at most `most` bytes; all of them if it must stay whole.
fn rows_per_block(t: &TensorRef, most: usize, whole: bool) -> (usize, usize) {
    let rows = t.shape.first().copied().unwrap_or(1).max(1);
    let row = usize::try_from(t.bytes).unwrap_or(usize::MAX) / rows;
    let per_block = if whole { rows } else { (most / row.max(1)).clamp(1, rows) };
    (per_block, row)
}

/// Bytes of a ring slab that the blocks of a matrix need.
pub fn slab_bytes(t: &TensorRef, most: usize, whole: bool) -> usize {
    let (rows, row) = rows_per_block(t, most, whole);
    region_bytes(super::read::SECTOR as u64 - 1, rows * row)
}

impl StreamPlan {
    /// Appends a matrix, which is used after all that were appended before.
    pub fn push(
        &mut self,
        name: &str,
        t: &TensorRef,
        layer: Option<usize>,
        most: usize,
        whole: bool,
    ) -> Streamed {
        let (per_block, row) = rows_per_block(t, most, whole);
        let rows = t.shape.first().copied().unwrap_or(1);
        let first = self.blocks.len();
        let name: Arc<str> = name.into();
        for start in (0..rows).step_by(per_block) {
            let run = Run {
                shard: t.shard,
                offset: t.offset + (start * row) as u64,
                bytes: per_block.min(rows - start) * row,
            };
            self.blocks.push(Block { run, layer, name: name.clone() });
        }
        Streamed { blocks: first..self.blocks.len(), rows: per_block }
    }

    /// Whether nothing is streamed.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// Reads that are on their way, in the order of use.
type Window = VecDeque<(usize, Receiver<Result<Slab>>)>;

/// Streams the blocks of a [`StreamPlan`], over and over.
pub struct Stream {
    blocks: Arc<Vec<Block>>,
    ring: Arc<SlabPool>,
    window: Mutex<Window>,
    reading: Reading,
}

impl Stream {
    /// A ring of `slabs` buffers; nothing is read yet.
    pub fn new(plan: StreamPlan, slabs: usize, reading: Reading) -> Stream {
        let largest = plan.blocks.iter().map(|b| region_bytes(b.run.offset, b.run.bytes)).max();
        Stream {
            ring: SlabPool::new(largest.unwrap_or(0), slabs.max(1)),
            blocks: Arc::new(plan.blocks),
            window: Mutex::default(),
            reading,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, id: usize, mut slab: Slab, window: &mut Window, priority: Priority) {
        let (sender, receiver) = channel();
        window.push_back((id, receiver));
        let (reading, blocks) = (self.reading.clone(), self.blocks.clone());
        self.reading.io.submit(priority, move || {
            let b = &blocks[id];
            let result = reading.read(b.run, slab.bytes_mut(), b.layer, &b.name).map(|()| slab);
            // A closed channel means that nobody waits any more: the slab goes back to the ring.
            let _ = sender.send(result);
        });
    }

    /// Reads ahead from where the window ends, as far as the ring has room.
    fn read_ahead(&self, after: usize, window: &mut Window) -> Result<()> {
        let n = self.blocks.len();
        let mut last = window.back().map_or(after, |(id, _)| *id);
        while window.len() < n
            && let Some(slab) = self.ring.try_take()?
        {
            last = (last + 1) % n;
            self.start(last, slab, window, Priority::Ahead);
        }
        Ok(())
    }

    fn try_fetch(&self, id: usize) -> Result<Slab> {
        let arriving = {
            let mut window = self.lock();
            // Blocks that were passed over, as after an interrupted step, are not waited for.
            match window.iter().position(|(i, _)| *i == id) {
                Some(at) => drop(window.drain(..at)),
                None => window.clear(),
            }
            if window.is_empty() {
                drop(window);
                let slab = self.ring.take(&|| self.reading.cancelled())?;
                window = self.lock();
                self.start(id, slab, &mut window, Priority::Demand);
            }
            let Some((_, arriving)) = window.pop_front() else {
                return Err(Error::run("two runs stream one model at the same time"));
            };
            self.read_ahead(id, &mut window)?;
            arriving
        };
        self.reading.wait(&arriving)
    }
}

impl RowBlocks for Stream {
    fn block(&self, id: usize) -> Result<(Arc<Slab>, usize)> {
        let offset = self
            .blocks
            .get(id)
            .map(|b| b.run.offset)
            .ok_or_else(|| Error::run("a streamed block does not exist"))?;
        loop {
            match self.try_fetch(id) {
                // A read that an earlier interruption ended: the run goes on now, so it is read again.
                Err(e) if e.kind() == Kind::Interrupted && !self.reading.cancelled() => {}
                result => return Ok((Arc::new(result?), lead(offset))),
            }
        }
    }
}
