//! Counts of what was read from where. They only ever grow; a report takes differences.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter that many threads add to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of a run.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes read from the checkpoint's files.
    pub nvme_bytes: Counter,
    /// Weight bytes multiplied from host memory.
    pub ram_bytes: Counter,
    /// Weight bytes multiplied from device memory.
    pub vram_bytes: Counter,
    /// Bytes sent to the device.
    pub upload_bytes: Counter,
    /// Nanoseconds in which the computation waited for a read.
    pub stall_nanos: Counter,
    /// Experts asked for, one for each (layer, distinct expert) of a pass.
    pub expert_requests: Counter,
    /// Of these, found in device memory.
    pub expert_vram_hits: Counter,
    /// Of these, found in host memory.
    pub expert_ram_hits: Counter,
    /// Of these, read from the files.
    pub expert_misses: Counter,
    /// Of the hits, those last used by an earlier pass.
    pub expert_reused: Counter,
}

/// Bytes per tier, as the JSON contract names them.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Bytes {
    /// From the files.
    pub nvme: u64,
    /// From host memory.
    pub ram: u64,
    /// From device memory.
    pub vram: u64,
    /// Host to device.
    pub upload: u64,
}

/// Expert requests by outcome, as the JSON contract names them.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Experts {
    /// All requests.
    pub requests: u64,
    /// Found in device memory.
    pub vram_hits: u64,
    /// Found in host memory.
    pub ram_hits: u64,
    /// Read from the files.
    pub misses: u64,
    /// Hits on experts that an earlier pass brought in.
    pub reused_from_earlier_token: u64,
}

impl Counters {
    /// Bytes so far.
    pub fn bytes(&self) -> Bytes {
        Bytes {
            nvme: self.nvme_bytes.get(),
            ram: self.ram_bytes.get(),
            vram: self.vram_bytes.get(),
            upload: self.upload_bytes.get(),
        }
    }
    /// Experts so far.
    pub fn experts(&self) -> Experts {
        Experts {
            requests: self.expert_requests.get(),
            vram_hits: self.expert_vram_hits.get(),
            ram_hits: self.expert_ram_hits.get(),
            misses: self.expert_misses.get(),
            reused_from_earlier_token: self.expert_reused.get(),
        }
    }
}
