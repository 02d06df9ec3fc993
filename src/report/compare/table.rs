//! A comparison as tables for people.

use super::{Comparison, DeviceRun, LogitsReport, MARGIN_GATE};
use std::fmt::Write;

/// A row of the table side by side: its name, and its value for a device.
type Row = (&'static str, fn(&DeviceRun) -> String);

impl Comparison {
    /// The tables as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if let Some(ops) = &self.ops {
            out.push_str(&ops.text());
            out.push('\n');
        }
        let [a, b] = &self.devices;
        let _ = writeln!(out, "{:<20} {:>9} {:>9}  {:<12} experts differ", "layer", "out", "worst", "at");
        let last = self.layers.len().saturating_sub(1);
        for l in &self.layers {
            let name = if l.layer == last { "head".to_owned() } else { l.layer.to_string() };
            let differ = if l.experts_differ == 0 { String::new() } else { l.experts_differ.to_string() };
            let line =
                format!("{name:<20} {:>9.1e} {:>9.1e}  {:<12} {differ}", l.out, l.worst, l.worst_point);
            let _ = writeln!(out, "{}", line.trim_end());
        }
        let LogitsReport { error, gate } = self.logits;
        let _ = writeln!(out, "{:<20} {error:>9.1e}  (at most {gate:.0e})\n", "logits");
        let _ = writeln!(out, "greedy tokens agree at {} of {} positions", self.greedy.agree, self.greedy.of);
        for d in &self.greedy.disagreements {
            let ok = if d.margin <= MARGIN_GATE { "a near tie" } else { "WRONG" };
            let _ = writeln!(
                out,
                "  position {}: {} and {}, margin {:.1e} of the largest logit: {ok}",
                d.position, d.tokens[0], d.tokens[1], d.margin
            );
        }
        let _ = writeln!(out, "\n{:<20} {:>14} {:>14}", "", a.device, b.device);
        let rows: [Row; 7] = [
            ("nll", |d| format!("{:.6}", d.nll)),
            ("load s", |d| format!("{:.2}", d.load_s)),
            ("prefill tokens", |d| d.prefill.tokens.to_string()),
            ("prefill tokens/s", |d| format!("{:.2}", d.prefill.tokens_per_s)),
            ("decode tokens", |d| d.decode.tokens.to_string()),
            ("decode tokens/s", |d| format!("{:.2}", d.decode.tokens_per_s)),
            ("layers on the GPU", |d| d.gpu_layers.to_string()),
        ];
        for (name, value) in rows {
            let _ = writeln!(out, "{name:<20} {:>14} {:>14}", value(a), value(b));
        }
        let _ = writeln!(out, "\n{}", if self.passed { "passed" } else { "FAILED" });
        out
    }
}
