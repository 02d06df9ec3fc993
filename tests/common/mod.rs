//! What several test files share.
#![allow(dead_code, unused_imports)]

pub mod golden;
pub mod reference;
pub mod tiny;

pub use golden::{Golden, assert_close, golden_dir};

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use trunkline::checkpoint::names;
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::model::{Model, Options};

/// Positions that models in tests are opened for.
pub const CONTEXT: usize = 1024;

/// A golden model on `threads` threads; a budget of 0 is the least it runs in.
pub fn open_model(set: &str, threads: usize, budget: u64) -> (Arc<Model>, Golden) {
    let checkpoint = Arc::new(Checkpoint::open(&[golden_dir(set).join("ckpt")]).unwrap());
    (open(checkpoint, threads, budget), Golden::open(set, "golden.safetensors"))
}

/// A golden model with room for everything.
pub fn open_golden(set: &str) -> (Arc<Model>, Golden) {
    open_model(set, 2, 1 << 30)
}

/// Opens a model over a checkpoint; a budget of 0 is the least it runs in.
pub fn open(checkpoint: Arc<Checkpoint>, threads: usize, budget: u64) -> Arc<Model> {
    let options = |budget| Options {
        threads,
        context: CONTEXT,
        chunk: 16,
        all_logits: true,
        budget,
        io_depth: 4,
        cancel: Arc::new(AtomicBool::new(false)),
        gpu: None,
        ..Options::default()
    };
    if budget > 0 {
        return Arc::new(Model::open(checkpoint, options(budget)).unwrap());
    }
    let expert: usize =
        names::EXPERT_PARTS.iter().map(|p| names::expert_part_bytes(checkpoint.config(), *p)).sum();
    let mut budget = expert as u64;
    loop {
        match Model::open(checkpoint.clone(), options(budget)) {
            Ok(m) => return Arc::new(m),
            Err(e) if e.kind() == trunkline::Kind::Machine => budget += 100_000,
            Err(e) => panic!("{e}"),
        }
    }
}
