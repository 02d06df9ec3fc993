//! Where a tensor lives and where it is computed.

use super::backend::Section;
use super::cpu::Isa;
use crate::checkpoint::format::Matrix;
use crate::error::{Error, Result};
use crate::memory::slab::Slab;
use crate::report::trace::{Details, Trace, Track, begin};
use std::sync::{Arc, Mutex, PoisonError};

/// f32 activations or state `[rows, cols]`, row-major.
#[derive(Debug, Clone, Default)]
pub struct Tensor {
    rows: usize,
    cols: usize,
    host: Vec<f32>,
}

impl Tensor {
    /// Zeros `[rows, cols]` in host memory.
    pub fn zeros(rows: usize, cols: usize) -> Tensor {
        Tensor { rows, cols, host: vec![0.0; rows * cols] }
    }

    /// Takes `values` as `[rows, cols]`.
    ///
    /// # Panics
    /// If the number of values is another.
    pub fn from_vec(rows: usize, cols: usize, values: Vec<f32>) -> Tensor {
        assert_eq!(values.len(), rows * cols);
        Tensor { rows, cols, host: values }
    }

    /// Changes the shape, keeping the allocation where it suffices. The contents are unspecified.
    pub fn reshape(&mut self, rows: usize, cols: usize) {
        self.rows = rows;
        self.cols = cols;
        self.host.resize(rows * cols, 0.0);
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// The values.
    pub fn host(&self) -> &[f32] {
        &self.host
    }
    /// The values, to be written.
    pub fn host_mut(&mut self) -> &mut [f32] {
        &mut self.host
    }
    /// Row `r`.
    pub fn row(&self, r: usize) -> &[f32] {
        &self.host[r * self.cols..(r + 1) * self.cols]
    }
    /// Row `r`, to be written.
    pub fn row_mut(&mut self, r: usize) -> &mut [f32] {
        &mut self.host[r * self.cols..(r + 1) * self.cols]
    }
}

/// How the values of a weight are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Packed E2M1 codes with E8M0 scales, `scale_offset` bytes into the slab.
    Mxfp4 {
        /// Where the scales begin.
        scale_offset: usize,
    },
}

/// A matrix whose rows arrive block by block.
pub trait RowBlocks: Send + Sync {
    /// Waits for block `id`: a slab and where in it the block's rows begin.
    fn block(&self, id: usize) -> Result<(Arc<Slab>, usize)>;
}

/// A weight `[rows, cols]` in its stored form, in host memory or on its way there.
#[derive(Clone)]
pub struct Weight {
    source: Source,
    rows: usize,
    cols: usize,
    format: Format,
}

#[derive(Clone)]
enum Source {
    Held { slab: Arc<Slab>, offset: usize },
    Streamed { from: Arc<dyn RowBlocks>, first: usize, rows: usize },
}

/// Rows of a weight that are at hand for as long as this lives.
pub struct Rows {
    /// The first of them.
    pub first: usize,
    slab: Arc<Slab>,
    offset: usize,
    rows: usize,
    cols: usize,
    format: Format,
}

/// Whether a matrix fits a slab at an offset.
fn check_fit(slab: &Slab, offset: usize, rows: usize, cols: usize, format: Format) -> Result<()> {
    let n = rows * cols;
    let fits = |at: usize, bytes: usize| at.checked_add(bytes).is_some_and(|end| end <= slab.len());
    let ok = match format {
        Format::F32 => fits(offset, 4 * n),
        Format::Bf16 => fits(offset, 2 * n),
        Format::Mxfp4 { scale_offset } => {
            cols.is_multiple_of(32) && fits(offset, n / 2) && fits(scale_offset, n / 32)
        }
    };
    match ok {
        true => Ok(()),
        false => Err(Error::run(format!(
            "a weight [{rows}, {cols}] does not fit its buffer of {} bytes at {offset}",
            slab.len()
        ))),
    }
}

impl Rows {
    /// The stored values.
    pub fn matrix(&self) -> Matrix<'_> {
        use crate::checkpoint::format::Data;
        let n = self.rows * self.cols;
        let cut = |at: usize, len: usize| &self.slab.bytes()[at..at + len];
        let data = match self.format {
            Format::F32 => Data::F32(cut(self.offset, 4 * n)),
            Format::Bf16 => Data::Bf16(cut(self.offset, 2 * n)),
            Format::Mxfp4 { scale_offset } => {
                Data::Mxfp4 { packed: cut(self.offset, n / 2), scale: cut(scale_offset, n / 32) }
            }
        };
        Matrix { rows: self.rows, cols: self.cols, data }
    }
}

impl Weight {
    /// A weight over `slab`, whose values begin at `offset`. Fails when the slab is too short for the shape.
    pub fn new(slab: Arc<Slab>, offset: usize, rows: usize, cols: usize, format: Format) -> Result<Weight> {
        check_fit(&slab, offset, rows, cols, format)?;
        Ok(Weight { source: Source::Held { slab, offset }, rows, cols, format })
    }

    /// A weight whose blocks, of `block_rows` rows but the last, are those numbered from `first` of `from`.
    pub fn streamed(
        from: Arc<dyn RowBlocks>,
        first: usize,
        block_rows: usize,
        rows: usize,
        cols: usize,
        format: Format,
    ) -> Weight {
        Weight { source: Source::Streamed { from, first, rows: block_rows.max(1) }, rows, cols, format }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Its rows in order, in as many parts as it comes in; each part waits until it is at hand. Let go of one before
    /// asking for the next.
    pub fn parts(&self) -> impl Iterator<Item = Result<Rows>> + '_ {
        let step = match &self.source {
            Source::Held { .. } => self.rows.max(1),
            Source::Streamed { rows, .. } => *rows,
        };
        (0..self.rows.max(1)).step_by(step).map(move |start| self.part(start, step.min(self.rows - start)))
    }

    fn part(&self, start: usize, rows: usize) -> Result<Rows> {
        let (cols, format) = (self.cols, self.format);
        let (slab, offset) = match &self.source {
            Source::Held { slab, offset } => (slab.clone(), *offset),
            Source::Streamed { from, first, rows: per_block } => {
                let (slab, offset) = from.block(first + start / per_block)?;
                check_fit(&slab, offset, rows, cols, format)?;
                (slab, offset)
            }
        };
        Ok(Rows { first: start, slab, offset, rows, cols, format })
    }

    /// All its rows at once.
    pub fn whole(&self) -> Result<Rows> {
        match &self.source {
            Source::Streamed { rows, .. } if *rows < self.rows => {
                Err(Error::run("a matrix that is used as a whole is streamed in parts"))
            }
            _ => self.part(0, self.rows),
        }
    }
}

/// The CPU as a device: an instruction set and a pool of compute threads.
pub struct Cpu {
    /// The kernels in use.
    pub isa: Isa,
    pool: rayon::ThreadPool,
    trace: Option<Arc<Trace>>,
    /// What is being computed; kept only for the trace.
    section: Mutex<Section>,
}

impl Cpu {
    /// A pool of `threads` compute threads and the best kernels of this processor.
    pub fn new(threads: usize) -> Result<Cpu> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("compute-{i}"))
            .build()
            .map_err(|e| Error::machine(format!("cannot start {threads} compute threads")).cause(e))?;
        Ok(Cpu { isa: Isa::detect()?, pool, trace: None, section: Mutex::default() })
    }

    /// The same device, its operations recorded in `trace` if there is one.
    pub fn traced(self, trace: Option<Arc<Trace>>) -> Cpu {
        Cpu { trace, ..self }
    }

    /// Names what the operations to come belong to.
    pub(super) fn enter(&self, section: Section) {
        if self.trace.is_some() {
            *self.section.lock().unwrap_or_else(PoisonError::into_inner) = section;
        }
    }

    /// Runs an operation, which returns the rows and columns of its result; records it if there is a trace.
    pub(super) fn op(&self, name: &'static str, f: impl FnOnce() -> [usize; 2]) {
        let span = begin(&self.trace);
        let shape = Some(f());
        if let Some(span) = span {
            let layer = self.section.lock().unwrap_or_else(PoisonError::into_inner).layer;
            span.end(Track::CpuOps, name, Details { layer, shape, ..Details::default() });
        }
    }

    /// Runs `f` on the pool, so that parallel iterators inside it use its threads.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.install(f)
    }

    /// The number of compute threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}
