//! The same ids on two devices, one device after the other, so that both need not fit at once: what the first computed
//! waits in a temporary file, and the second is held against it value by value.

mod spool;
mod table;

use crate::compute::gpu::{AdapterEntry, Gpu, ops_table};
use crate::error::{Error, Result};
use crate::model::session::Session;
use crate::model::{Model, Observer, Point};
use serde::Serialize;
use spool::{POINTS, Spool, What, Worst, number, observed};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

/// What the logits may differ by, as a share of the largest.
pub const LOGITS_GATE: f64 = 3e-4;
/// The same on SwiftShader, whose arithmetic flushes denormals.
pub const LOGITS_GATE_WIDE: f64 = 1e-3;
/// Greedy tokens may differ where the first device's two best logits are closer than this share of the largest.
pub const MARGIN_GATE: f64 = 1e-3;
/// The most tokens that are decoded one at a time to measure that speed.
const DECODED: usize = 16;

/// An adapter, as reports name it.
#[derive(Debug, Clone, Serialize)]
pub struct AdapterReport {
    /// Its name.
    pub name: String,
    /// The programming interface.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `software`, `unknown kind`.
    pub kind: String,
    /// Driver and its version.
    pub driver: String,
    /// Bytes of device memory.
    pub vram: Option<u64>,
    /// Features used where present.
    pub features: Vec<&'static str>,
}

impl AdapterReport {
    /// The report of an adapter.
    pub fn of(a: &AdapterEntry) -> AdapterReport {
        AdapterReport {
            name: a.name.clone(),
            backend: a.backend.clone(),
            kind: a.kind.to_string(),
            driver: a.driver.clone(),
            vram: a.vram.map(|v| v.total),
            features: a.features.clone(),
        }
    }
}

/// One operation of the op table.
#[derive(Debug, Clone, Serialize)]
pub struct OpReport {
    /// Its name.
    pub op: &'static str,
    /// `max|got-want| / max|want|`; NaN (`null` in JSON) when something was not a number.
    pub error: f64,
    /// What it must not exceed.
    pub gate: f64,
    /// Whether it does not.
    pub passed: bool,
}

/// The op table on one adapter.
#[derive(Debug, Clone, Serialize)]
pub struct OpsReport {
    /// Whether every operation is right.
    pub passed: bool,
    /// What is wrong, a line each.
    pub failures: Vec<String>,
    /// The adapter.
    pub adapter: AdapterReport,
    /// Every operation.
    pub ops: Vec<OpReport>,
}

impl OpsReport {
    /// Runs the table.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn run(gpu: &Gpu) -> Result<OpsReport> {
        let one = |r: &crate::compute::gpu::table::OpResult| OpReport {
            op: r.name,
            error: r.worst,
            gate: r.gate,
            passed: r.passed(),
        };
        let ops: Vec<OpReport> = ops_table(gpu)?.iter().map(one).collect();
        let failures: Vec<String> = ops
            .iter()
            .filter(|o| !o.passed)
            .map(|o| format!("op {} is off by {:.1e} (at most {:.0e})", o.op, o.error, o.gate))
            .collect();
        Ok(OpsReport {
            passed: failures.is_empty(),
            failures,
            adapter: AdapterReport::of(gpu.adapter()),
            ops,
        })
    }

    /// The table as text.
    pub fn text(&self) -> String {
        let mut out = format!(
            "adapter {} ({}, {})\n\n{:<20} {:>9} {:>9}\n",
            self.adapter.name, self.adapter.kind, self.adapter.driver, "op", "error", "gate"
        );
        for o in &self.ops {
            let mark = if o.passed { "" } else { "  WRONG" };
            let _ = writeln!(out, "{:<20} {:>9.1e} {:>9.0e}{mark}", o.op, o.error, o.gate);
        }
        out
    }
}

/// Tokens in a time.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Speed {
    /// Tokens.
    pub tokens: usize,
    /// Seconds they took.
    pub seconds: f64,
    /// Tokens a second.
    pub tokens_per_s: f64,
}

impl Speed {
    fn since(begun: Instant, tokens: usize) -> Speed {
        let seconds = begun.elapsed().as_secs_f64();
        Speed { tokens, seconds, tokens_per_s: tokens as f64 / seconds.max(1e-9) }
    }
}

/// What one device did.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceRun {
    /// What the logits may differ by from another device's.
    #[serde(skip)]
    gate: f64,
    /// `cpu`, `gpu`, or `hybrid`.
    pub device: &'static str,
    /// The adapter's name, if one took part.
    pub adapter: Option<String>,
    /// Layers computed on the adapter.
    pub gpu_layers: usize,
    /// Negative log-likelihood a predicted token, in nats.
    pub nll: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Seconds until the model was loaded.
    pub load_s: f64,
    /// Tokens fed in chunks, unobserved.
    pub prefill: Speed,
    /// Tokens fed one at a time after those, unobserved.
    pub decode: Speed,
}

/// Errors of one layer.
#[derive(Debug, Clone, Serialize)]
pub struct LayerReport {
    /// Zero-based; the number of layers is the output head.
    pub layer: usize,
    /// Error of the running sum after the layer; of the normed input of the output matrix for the head.
    pub out: f64,
    /// Largest error of all observed tensors of the layer.
    pub worst: f64,
    /// Which tensor that is.
    pub worst_point: &'static str,
    /// Positions at which the two devices chose other experts.
    pub experts_differ: usize,
}

/// A position at which the devices' greedy tokens differ.
#[derive(Debug, Clone, Serialize)]
pub struct Disagreement {
    /// Zero-based position.
    pub position: usize,
    /// The greedy token of each device.
    pub tokens: [u32; 2],
    /// The first device's two best logits apart, as a share of its largest |logit|.
    pub margin: f64,
}

/// Agreement of the logits.
#[derive(Debug, Clone, Serialize)]
pub struct LogitsReport {
    /// `max|second-first| / max|first|`.
    pub error: f64,
    /// What it must not exceed.
    pub gate: f64,
}

/// Agreement of the greedy tokens.
#[derive(Debug, Clone, Serialize)]
pub struct GreedyReport {
    /// Positions at which they are equal.
    pub agree: usize,
    /// Positions.
    pub of: usize,
    /// Above this margin a disagreement is a failure.
    pub margin_gate: f64,
    /// Those at which they differ.
    pub disagreements: Vec<Disagreement>,
}

/// Two devices compared.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Whether everything is within its gate.
    pub passed: bool,
    /// What is not, a line each.
    pub failures: Vec<String>,
    /// Tokens fed.
    pub positions: usize,
    /// Tokens of a pass.
    pub chunk: usize,
    /// Both devices, in the order in which they ran; errors are relative to the first.
    pub devices: [DeviceRun; 2],
    /// The op table of the adapter, when one took part.
    pub ops: Option<OpsReport>,
    /// Every layer, and last the output head.
    pub layers: Vec<LayerReport>,
    /// The logits.
    pub logits: LogitsReport,
    /// The greedy tokens.
    pub greedy: GreedyReport,
}

/// Feeds `ids` once more, unobserved, for the times.
fn timed(model: &Arc<Model>, ids: &[u32], chunk: usize, seen: &mut dyn Observer) -> Result<[Speed; 2]> {
    let mut session = Session::new(model.clone())?;
    let (fed, stepped) = ids.split_at(ids.len() - DECODED.min(ids.len() - 1));
    let begun = Instant::now();
    session.sync(fed, chunk, seen, &mut |_| Ok(()))?;
    let prefill = Speed::since(begun, fed.len());
    let begun = Instant::now();
    for id in stepped {
        session.step(*id, seen)?;
    }
    Ok([prefill, Speed::since(begun, stepped.len())])
}

fn device_run(
    model: &Arc<Model>,
    ids: &[u32],
    chunk: usize,
    load_s: f64,
    nll: f64,
    seen: &mut dyn Observer,
) -> Result<DeviceRun> {
    let [prefill, decode] = timed(model, ids, chunk, seen)?;
    Ok(DeviceRun {
        gate: logits_gate(model.gpu()),
        device: model.device_name(),
        adapter: model.gpu().map(|g| g.name().to_owned()),
        gpu_layers: model.gpu_layers(),
        nll,
        perplexity: nll.exp(),
        load_s,
        prefill,
        decode,
    })
}

/// What the logits may differ by between the CPU and an adapter.
fn logits_gate(gpu: Option<&Gpu>) -> f64 {
    match gpu {
        Some(gpu) if gpu.uses_subgroups() || gpu.name().contains("SwiftShader") => LOGITS_GATE_WIDE,
        _ => LOGITS_GATE,
    }
}

/// The first device's run.
pub struct First {
    ids: Vec<u32>,
    chunk: usize,
    spool: Spool,
    tokens: Vec<(u32, f64)>,
    run: DeviceRun,
}

impl First {
    /// Runs `ids` (2 or more) on the first device, `chunk` tokens a pass: no more than either model takes in one
    /// ([`Model::most_tokens`]). `load_s` is what opening it took.
    ///
    /// # Errors
    /// Those of the pass, and of a temporary file that cannot be written.
    pub fn run(
        model: &Arc<Model>,
        ids: &[u32],
        chunk: usize,
        load_s: f64,
        seen: &mut dyn Observer,
    ) -> Result<First> {
        if ids.len() < 2 {
            return Err(Error::usage("a comparison needs at least 2 tokens").expected("2 or more", ids.len()));
        }
        let chunk = chunk.clamp(1, model.most_tokens());
        let mut spool = Spool::create()?;
        let (tokens, nll) = observed(model, ids, chunk, &mut spool, seen)?;
        let run = device_run(model, ids, chunk, load_s, nll, seen)?;
        Ok(First { ids: ids.to_vec(), chunk, spool, tokens, run })
    }

    /// Runs the same on the second device and holds it against the first. `ops` is the adapter's op table.
    ///
    /// # Errors
    /// Those of the pass, and of the temporary file.
    pub fn against(
        self,
        model: &Arc<Model>,
        load_s: f64,
        ops: Option<OpsReport>,
        seen: &mut dyn Observer,
    ) -> Result<Comparison> {
        let First { ids, chunk, spool, tokens, run } = self;
        if chunk > model.most_tokens() {
            return Err(Error::run("the second device takes fewer tokens in a pass")
                .expected(format_args!("{chunk} or more"), model.most_tokens()));
        }
        let mut held = spool.compared()?;
        let (others, nll) = observed(model, &ids, chunk, &mut held, seen)?;
        let second = device_run(model, &ids, chunk, load_s, nll, seen)?;
        let worst = held.worst();
        let gate = run.gate.max(second.gate);
        let error = worst.get(&What::Logits).map_or(f64::NAN, Worst::relative);
        let disagreements: Vec<Disagreement> = tokens
            .iter()
            .zip(&others)
            .enumerate()
            .filter(|(_, (a, b))| a.0 != b.0)
            .map(|(position, (a, b))| Disagreement { position, tokens: [a.0, b.0], margin: a.1 })
            .collect();
        let layers = model.config().layers.len();
        let mut out = Comparison {
            passed: false,
            failures: Vec::new(),
            positions: ids.len(),
            chunk,
            layers: (0..=layers).map(|i| layer_report(i, i == layers, &worst, &held)).collect(),
            logits: LogitsReport { error, gate },
            greedy: GreedyReport {
                agree: tokens.len() - disagreements.len(),
                of: tokens.len(),
                margin_gate: MARGIN_GATE,
                disagreements,
            },
            devices: [run, second],
            ops,
        };
        out.failures = out.find_failures();
        out.passed = out.failures.is_empty();
        Ok(out)
    }
}

fn layer_report(layer: usize, head: bool, worst: &BTreeMap<What, Worst>, held: &Spool) -> LayerReport {
    let mut report = LayerReport { layer, out: f64::NAN, worst: 0.0, worst_point: "", experts_differ: 0 };
    let last = if head { Point::FinalNorm } else { Point::Out };
    for (point, name) in POINTS {
        let Some(w) = worst.get(&What::Layer(layer, number(point))) else { continue };
        let error = w.relative();
        if point == last {
            report.out = error;
        }
        if report.worst_point.is_empty() || !(error <= report.worst) {
            (report.worst, report.worst_point) = (error, name);
        }
    }
    report.experts_differ = held.experts_differ(layer);
    report
}

impl Comparison {
    fn find_failures(&self) -> Vec<String> {
        let mut out = self.ops.as_ref().map_or_else(Vec::new, |o| o.failures.clone());
        let LogitsReport { error, gate } = self.logits;
        if !(error <= gate) {
            out.push(format!("the logits are off by {error:.1e} (at most {gate:.0e})"));
        }
        for d in &self.greedy.disagreements {
            if !(d.margin <= MARGIN_GATE) {
                out.push(format!(
                    "the greedy token of position {} is {} instead of {} at a margin of {:.1e} (at most {MARGIN_GATE:.0e})",
                    d.position, d.tokens[1], d.tokens[0], d.margin
                ));
            }
        }
        out
    }
}
