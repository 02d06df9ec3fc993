//! The network: weights by name, one forward pass, the state of a sequence and the session over it.

pub mod forward;
pub mod gpu;
pub mod layer;
pub mod session;
pub mod session_file;
pub mod snapshot;
pub mod state;
pub mod transfer;
pub mod weights;

use crate::checkpoint::config::{Config, Ffn};
use crate::checkpoint::names;
use crate::checkpoint::shards::{Checkpoint, TensorRef};
use crate::compute::device::{Cpu, Tensor};
use crate::compute::gpu::{Gpu, mla};
use crate::compute::ops::moe::Routing;
use crate::error::{Error, Result};
use crate::memory::experts::ExpertStore;
use crate::memory::io::IoPool;
use crate::memory::place::{self, Demand, Placement};
use crate::memory::stream::Reading;
use crate::memory::trunk::{Trunk, TrunkParts, Unit};
use crate::report::counters::Counters;
use crate::report::trace::Trace;
use forward::Scratch;
use gpu::GpuSide;
use half::bf16;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use weights::{Head, Layer};

/// Where in a layer an observed tensor stands; all `[T,…]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Point {
    /// Mix before the attention.
    AttnRes,
    /// Weights of that mix.
    AttnProbs,
    /// Normed input of the attention.
    AttnIn,
    /// Output of the attention.
    AttnOut,
    /// Mix before the feed-forward.
    FfnRes,
    /// Weights of that mix.
    FfnProbs,
    /// Normed input of the feed-forward.
    FfnIn,
    /// Sum of the chosen experts before its norm.
    LatentSum,
    /// Output of the feed-forward.
    FfnOut,
    /// Running sum after the layer.
    Out,
    /// Output mix.
    FinalRes,
    /// Weights of that mix.
    FinalProbs,
    /// Normed input of the head.
    FinalNorm,
}

/// Watches a pass. Every method has a default that does nothing.
pub trait Observer: Send {
    /// Layer `i` of `n` begins; `i == n` is the output head.
    fn layer(&mut self, _i: usize, _n: usize) {}
    /// Whether [`Observer::tensor`] is to be called: on a GPU each call is a read-back.
    fn wants_tensors(&self) -> bool {
        false
    }
    /// A tensor of layer `i` was computed.
    fn tensor(&mut self, _point: Point, _i: usize, _values: &Tensor) {}
    /// The router of layer `i` has chosen.
    fn routing(&mut self, _i: usize, _routing: &Routing) {}
}

/// Sees nothing.
pub struct Unobserved;
impl Observer for Unobserved {}

/// What a model is opened with.
pub struct Options {
    /// Compute threads.
    pub threads: usize,
    /// Positions to plan for.
    pub context: usize,
    /// Tokens per prefill chunk to plan for.
    pub chunk: usize,
    /// Whether passes return the logits of every position.
    pub all_logits: bool,
    /// Host memory for everything, in bytes.
    pub budget: u64,
    /// Reads in flight.
    pub io_depth: usize,
    /// The most bytes of a block of a streamed matrix: [`crate::memory::stream::BLOCK`] unless a test wants many.
    pub block: usize,
    /// Set from outside to stop at the next layer or read.
    pub cancel: Arc<AtomicBool>,
    /// The GPU, if one is to be used.
    pub gpu: Option<GpuPlan>,
    /// Where operations, reads and uploads are recorded, if they are.
    pub trace: Option<Arc<Trace>>,
}

impl Default for Options {
    /// One thread, 4096 positions, no limit on memory.
    fn default() -> Options {
        Options {
            threads: 1,
            context: 4096,
            chunk: 256,
            all_logits: false,
            budget: u64::MAX,
            io_depth: 4,
            block: crate::memory::stream::BLOCK,
            cancel: Arc::default(),
            gpu: None,
            trace: None,
        }
    }
}

/// What is to be done with a GPU.
pub struct GpuPlan {
    /// The device.
    pub gpu: Gpu,
    /// Device memory for everything, in bytes.
    pub budget: u64,
    /// Refuse what does not fit instead of computing it on the CPU.
    pub everything: bool,
}

/// The input embedding: one row a token, read from its file.
struct Embedding {
    checkpoint: Arc<Checkpoint>,
    table: TensorRef,
    vocab: usize,
    hidden: usize,
}

impl Embedding {
    fn row_bytes(&self) -> u64 {
        2 * self.hidden as u64
    }

    fn row(&self, id: u32, out: &mut [f32]) -> Result<()> {
        if id as usize >= self.vocab {
            return Err(Error::usage(format!("token id {id} is outside the vocabulary of {}", self.vocab)));
        }
        let mut raw = vec![0u8; 2 * self.hidden];
        let path = &self.checkpoint.shards()[usize::from(self.table.shard)].path;
        let at = self.table.offset + u64::from(id) * self.row_bytes();
        crate::memory::read::read_exact_at(
            self.checkpoint.reader(self.table.shard).as_ref(),
            path,
            &mut raw,
            at,
        )
        .map_err(|e| e.tensor(names::EMBED))?;
        for (o, b) in out.iter_mut().zip(raw.chunks_exact(2)) {
            *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
        }
        Ok(())
    }
}

/// Layers bound to what holds or streams their tensors.
struct Bound {
    layers: Vec<OnceLock<Arc<Layer>>>,
    head: OnceLock<Arc<Head>>,
}

impl Bound {
    fn layer(&self, m: &Model, i: usize) -> Result<Arc<Layer>> {
        if let Some(l) = self.layers[i].get() {
            return Ok(l.clone());
        }
        let layer = Arc::new(Layer::bind(m.config(), i, &m.trunk.hold(i)?)?);
        Ok(self.layers[i].get_or_init(|| layer).clone())
    }
}

/// An opened model.
pub struct Model {
    checkpoint: Arc<Checkpoint>,
    /// The device that computes.
    pub cpu: Cpu,
    trunk: Trunk,
    experts: ExpertStore,
    expert_bytes: u64,
    embedding: Embedding,
    bound: Bound,
    placement: Placement,
    gpu: Option<GpuSide>,
    /// Which layers are computed on the GPU, and last whether the output head is.
    on_gpu: Vec<bool>,
    most_tokens: usize,
    gpu_budget: u64,
    context: usize,
    counters: Arc<Counters>,
    cancel: Arc<AtomicBool>,
    trace: Option<Arc<Trace>>,
    passes: AtomicU64,
}

impl Model {
    /// Plans and opens a model; no weight is read yet (see [`Model::load`]).
    pub fn open(checkpoint: Arc<Checkpoint>, options: Options) -> Result<Model> {
        let config = checkpoint.config();
        supported(config)?;
        let mut units = Vec::with_capacity(config.layers.len() + 1);
        for i in 0..config.layers.len() {
            let names: Vec<String> = names::trunk_tensors(config, i).into_iter().map(|t| t.name).collect();
            units.push(Unit::new(&checkpoint, Some(i), &names, weights::matrices(config, i))?);
        }
        let head: Vec<String> = names::model_tensors(config)
            .into_iter()
            .map(|t| t.name)
            .filter(|n| n != names::EMBED || config.tie_word_embeddings)
            .collect();
        let lm_head = if config.tie_word_embeddings { names::EMBED } else { names::LM_HEAD };
        units.push(Unit::new(&checkpoint, None, &head, vec![(lm_head.to_string(), false)])?);
        let expert_bytes: usize =
            names::EXPERT_PARTS.iter().map(|p| names::expert_part_bytes(config, *p)).sum();
        let (n, chunk) = (config.layers.len(), options.chunk);
        let on_gpu = match &options.gpu {
            None => vec![false; n + 1],
            Some(plan) => {
                let whole: Vec<u64> = (0..=n)
                    .map(|i| units[i].bytes() + device_bytes(config, i, expert_bytes, options.context))
                    .collect();
                let tokens =
                    chunk.min(Scratch::most_tokens(config, plan.gpu.binding_limit(), options.all_logits));
                let scratch = Scratch::device_bytes(config, tokens, options.context, options.all_logits);
                place::fill_device(plan, scratch, &whole)?
            }
        };
        let on_cpu = |i: &usize| !on_gpu[*i];
        let moe = |i: &usize| config.layers[*i].ffn == Ffn::Moe;
        let placement = Placement::new(
            options.budget,
            &Demand {
                state: (0..n).filter(on_cpu).map(|i| state::layer_bytes(config, i, options.context)).sum(),
                scratch: Scratch::bytes(config, chunk, options.all_logits),
                vectors: (0..=n).filter(on_cpu).map(|i| 4 * units[i].small_values()).sum(),
                units: (0..=n)
                    .map(|i| if on_gpu[i] { Vec::new() } else { units[i].matrix_bytes() })
                    .collect(),
                block: (0..=n).filter(on_cpu).map(|i| units[i].slab_bytes(options.block)).max().unwrap_or(0)
                    as u64,
                blocks: options.io_depth as u64 + 2,
                expert: expert_bytes as u64,
                experts: ((0..n).filter(on_cpu).filter(moe).count() * config.moe.experts) as u64,
                chosen: config.moe.experts_per_token as u64,
            },
        )?;
        let most_tokens = match &options.gpu {
            Some(plan) => Scratch::most_tokens(config, plan.gpu.binding_limit(), options.all_logits),
            None => usize::MAX,
        };
        let counters = Arc::new(Counters::default());
        let reading = Reading {
            checkpoint: checkpoint.clone(),
            io: IoPool::new(options.io_depth)?,
            counters: counters.clone(),
            cancel: options.cancel.clone(),
            trace: options.trace.clone(),
        };
        let embedding = Embedding {
            table: checkpoint.tensor(names::EMBED)?.clone(),
            vocab: config.vocab_size,
            hidden: config.hidden_size,
            checkpoint: checkpoint.clone(),
        };
        let bound =
            Bound { layers: config.layers.iter().map(|_| OnceLock::new()).collect(), head: OnceLock::new() };
        Ok(Model {
            cpu: Cpu::new(options.threads)?.traced(options.trace.clone()),
            experts: ExpertStore::new(
                reading.clone(),
                usize::try_from(placement.expert_slots).unwrap_or(usize::MAX),
            ),
            trunk: Trunk::new(TrunkParts {
                units,
                resident: placement.resident.clone(),
                elsewhere: on_gpu.clone(),
                block: options.block,
                slabs: usize::try_from(placement.ring_blocks).unwrap_or(usize::MAX),
                reading,
            }),
            expert_bytes: expert_bytes as u64,
            embedding,
            bound,
            placement,
            gpu_budget: options.gpu.as_ref().map_or(0, |plan| plan.budget),
            gpu: options.gpu.map(|plan| GpuSide::new(plan.gpu, checkpoint.config())),
            on_gpu,
            most_tokens,
            context: options.context,
            counters,
            cancel: options.cancel,
            trace: options.trace,
            passes: AtomicU64::new(0),
            checkpoint,
        })
    }

    /// Reads everything that stays in memory.
    pub fn load(&self, seen: &mut dyn Observer) -> Result<()> {
        let n = self.config().layers.len();
        self.load_gpu(seen)?;
        for i in (0..n).filter(|i| !self.on_gpu[*i]) {
            seen.layer(i, n);
            self.check_cancelled()?;
            self.bound.layer(self, i)?;
        }
        if !self.on_gpu[n] {
            seen.layer(n, n);
            self.output()?;
        }
        Ok(())
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        self.checkpoint.config()
    }
    /// The files.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }
    /// How memory is divided.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }
    /// Positions planned for.
    pub fn context(&self) -> usize {
        self.context
    }
    /// What was read and used so far.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
    /// Set it to stop at the next layer or read; clear it to go on.
    pub fn cancel_flag(&self) -> &AtomicBool {
        &self.cancel
    }
    /// Trunk layers that stay in memory, the output head not counted.
    pub fn resident_layers(&self) -> usize {
        (0..self.config().layers.len()).filter(|i| !self.on_gpu[*i] && self.trunk.is_resident(*i)).count()
    }

    /// The GPU in use, if there is one.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref().map(|side| &side.gpu)
    }
    /// The budget of GPU memory, in bytes; 0 without a GPU.
    pub fn gpu_budget(&self) -> u64 {
        self.gpu_budget
    }
    /// Layers computed on the GPU, the output head not counted.
    pub fn gpu_layers(&self) -> usize {
        self.on_gpu[..self.config().layers.len()].iter().filter(|g| **g).count()
    }
    /// `cpu`, `gpu`, or `hybrid` when both compute.
    pub fn device_name(&self) -> &'static str {
        match (self.on_gpu.iter().any(|g| *g), self.on_gpu.iter().all(|g| *g)) {
            (false, _) => "cpu",
            (true, true) => "gpu",
            (true, false) => "hybrid",
        }
    }

    fn output(&self) -> Result<Arc<Head>> {
        if let Some(h) = self.bound.head.get() {
            return Ok(h.clone());
        }
        let n = self.config().layers.len();
        let head = Arc::new(Head::bind(self.config(), &self.trunk.hold(n)?)?);
        Ok(self.bound.head.get_or_init(|| head).clone())
    }

    fn next_pass(&self) -> u64 {
        self.passes.fetch_add(1, Ordering::Relaxed)
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) { Err(Error::interrupted()) } else { Ok(()) }
    }
}

/// Bytes beside its trunk that layer `i` needs on the GPU: its state, and its experts until they are streamed there.
fn device_bytes(config: &Config, i: usize, expert_bytes: usize, context: usize) -> u64 {
    match config.layers.get(i) {
        None => 0,
        Some(l) => {
            let experts = if l.ffn == Ffn::Moe { config.moe.experts * expert_bytes } else { 0 };
            // Rows and buffers are padded on the device: a few bytes for each of its tensors.
            let padding = 64 * (64 + if l.ffn == Ffn::Moe { 6 * config.moe.experts } else { 0 });
            (experts + padding) as u64 + state::layer_bytes(config, i, mla::planned_rows(context))
        }
    }
}

/// Refuses the variants of the architecture that nothing published can be checked against.
fn supported(config: &Config) -> Result<()> {
    if config.attn_res_block_size.is_none() {
        return Err(Error::refused("a model without attention-residual blocks is not supported")
            .key("text_config.attn_res_block_size")
            .expected("a block size", "null"));
    }
    if config.moe.latent_size.is_none() && config.moe.latent_norm {
        return Err(Error::refused("a norm on routed experts without a latent width is not supported")
            .key("text_config.latent_moe_use_norm")
            .expected("false when routed_expert_hidden_size is null", true));
    }
    Ok(())
}
