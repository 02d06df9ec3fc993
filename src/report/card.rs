//! One report on a card: whether it computes rightly, what it moves, how fast a slice of the network runs.

use super::compare::{AdapterReport, Comparison};
use crate::compute::gpu::rates::{Clock, Rate};
use serde::Serialize;
use std::fmt::Write as _;

/// A measured rate.
#[derive(Debug, Clone, Serialize)]
pub struct RateReport {
    /// Kernel, with the form of its weight; `copy` for the plain copy.
    pub kernel: &'static str,
    /// Its shape.
    pub shape: String,
    /// Bytes that a call reads and writes.
    pub bytes: u64,
    /// Calls timed.
    pub calls: usize,
    /// Median seconds of a call.
    pub seconds: f64,
    /// Fastest and slowest.
    pub seconds_range: [f64; 2],
    /// `device`: timestamps; `host`: submission to end, divided by the calls.
    pub clock: &'static str,
    /// 10^9 bytes a second at the median.
    pub gb_per_s: f64,
    /// That as a share of the copy's.
    pub share_of_copy: f64,
}

impl RateReport {
    /// The report of `rate` beside that of the copy.
    pub fn of(rate: &Rate, copy: &Rate) -> RateReport {
        RateReport {
            kernel: rate.name,
            shape: rate.shape.clone(),
            bytes: rate.bytes,
            calls: rate.calls,
            seconds: rate.seconds[1],
            seconds_range: [rate.seconds[0], rate.seconds[2]],
            clock: match rate.clock {
                Clock::Device => "device",
                Clock::Host => "host",
            },
            gb_per_s: rate.bytes_per_s() / 1e9,
            share_of_copy: rate.bytes_per_s() / copy.bytes_per_s(),
        }
    }
}

/// The checkpoint that was written for the report and removed again.
#[derive(Debug, Clone, Serialize)]
pub struct SliceReport {
    /// `released`: hidden and expert widths of the release; `tiny`: a software adapter's.
    pub widths: &'static str,
    /// Layers.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Heads of both kinds of attention.
    pub heads: usize,
    /// Bytes written.
    pub bytes: u64,
    /// Seconds it took to write.
    pub write_s: f64,
}

/// The machine around the card.
#[derive(Debug, Clone, Serialize)]
pub struct SystemReport {
    /// Operating system.
    pub os: &'static str,
    /// Processor architecture.
    pub arch: &'static str,
    /// CPU kernels the comparison used.
    pub isa: &'static str,
    /// Compute threads.
    pub threads: usize,
}

/// Everything about a card.
#[derive(Debug, Clone, Serialize)]
pub struct CardReport {
    /// Whether the adapter computes rightly.
    pub passed: bool,
    /// What is wrong, a line each.
    pub failures: Vec<String>,
    /// Version of this program.
    pub trunkline: &'static str,
    /// The machine.
    pub system: SystemReport,
    /// The adapter with its driver.
    pub adapter: AdapterReport,
    /// What the network part ran on.
    pub slice: SliceReport,
    /// The slice on the CPU and on the adapter, with the op table.
    pub parity: Comparison,
    /// Tokens a second that the slice decodes on the adapter.
    pub decode_tokens_per_s: f64,
    /// The copy from buffer to buffer.
    pub copy: RateReport,
    /// The kernels.
    pub kernels: Vec<RateReport>,
    /// Seconds all of it took.
    pub seconds: f64,
}

impl CardReport {
    /// The tables as text.
    pub fn text(&self) -> String {
        let mut out = self.parity.text();
        let _ = writeln!(
            out,
            "\n{:<14} {:<36} {:>9} {:>10} {:>8}",
            "kernel", "shape", "GB/s", "of copy", "clock"
        );
        for r in std::iter::once(&self.copy).chain(&self.kernels) {
            let _ = writeln!(
                out,
                "{:<14} {:<36} {:>9.2} {:>9.0}% {:>8}",
                r.kernel,
                r.shape,
                r.gb_per_s,
                100.0 * r.share_of_copy,
                r.clock
            );
        }
        let s = &self.slice;
        let _ = writeln!(
            out,
            "\n{} layers of {} widths ({:.2} GB) decode {:.2} tokens/s on {} ({})",
            s.layers,
            s.widths,
            s.bytes as f64 / 1e9,
            self.decode_tokens_per_s,
            self.adapter.name,
            self.adapter.driver
        );
        out
    }
}
