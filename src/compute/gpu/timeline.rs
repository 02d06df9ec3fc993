//! Passes of the GPU on the host's clock.

use super::recorder::PassTime;
use crate::report::trace::{Details, Trace, Track};
use std::time::{Duration, Instant};

/// When a submission was handed over and known to be complete, and the passes in it.
#[derive(Debug, Clone)]
pub struct SubmissionTrace {
    /// Zero-based layer, where it belongs to one.
    pub layer: Option<usize>,
    /// What it was recorded as, `layer 12 / attention`.
    pub label: String,
    /// Before the commands were handed over.
    pub submitted: Instant,
    /// When its completion was seen.
    pub completed: Instant,
    /// Its passes.
    pub passes: Vec<PassTime>,
}

/// How the device's clock relates to the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Anchor {
    /// Host time less device time, in nanoseconds.
    offset: i128,
    /// How much earlier the passes may have run, in nanoseconds.
    slack: i128,
}

/// The offset of the device's clock, from intervals `(submitted, completed, first begin, last end)` in nanoseconds, the
/// first two on the host's clock and the others on the device's: no pass began before it was submitted or ended after it
/// was seen complete. Of the offsets left the latest is taken, since completion is seen soon after it happens. `None`
/// without intervals.
fn anchor(intervals: impl Iterator<Item = (i128, i128, i128, i128)>) -> Option<Anchor> {
    let bounds = intervals.map(|(submitted, completed, begin, end)| (submitted - begin, completed - end));
    let (earliest, latest) = bounds.reduce(|a, b| (a.0.max(b.0), a.1.min(b.1)))?;
    // Where the two clocks run at different rates the bounds can cross; what lies between them is the error then.
    Some(Anchor { offset: latest.max(earliest), slack: (latest - earliest).abs() })
}

/// Records submissions that were seen complete together: pass by pass where they were timed, else each as a whole.
pub fn record(trace: &Trace, adapter: &str, submissions: &[SubmissionTrace]) {
    let host = |at: Instant| trace.at(at).as_nanos() as i128;
    let end = |p: &PassTime| i128::from(p.begin_ns) + i128::from(p.ns);
    let anchor = anchor(submissions.iter().filter_map(|s| {
        let begin = s.passes.iter().map(|p| i128::from(p.begin_ns)).min()?;
        Some((host(s.submitted), host(s.completed), begin, s.passes.iter().map(end).max()?))
    }));
    for s in submissions {
        match anchor {
            Some(anchor) if !s.passes.is_empty() => {
                for p in &s.passes {
                    let begin = u64::try_from(i128::from(p.begin_ns) + anchor.offset).unwrap_or(0);
                    let details = Details {
                        layer: s.layer,
                        uncertainty_us: Some(anchor.slack as f64 / 1e3),
                        ..Details::default()
                    };
                    let (begin, length) = (Duration::from_nanos(begin), Duration::from_nanos(p.ns));
                    trace.add(Track::Gpu(adapter), p.label.clone(), begin, length, details);
                }
            }
            _ => {
                let length = s.completed.saturating_duration_since(s.submitted);
                let details = Details {
                    layer: s.layer,
                    uncertainty_us: Some(length.as_nanos() as f64 / 1e3),
                    ..Details::default()
                };
                trace.add(Track::Gpu(adapter), s.label.clone(), trace.at(s.submitted), length, details);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_bounds_of_a_batch_hold() {
        assert_eq!(anchor(std::iter::empty()), None);
        // One submission of 30 ns in a window of 100 ns: it ends with the window, and may have run 70 ns earlier.
        let one = (1000, 1100, 5, 35);
        assert_eq!(anchor([one].into_iter()), Some(Anchor { offset: 1065, slack: 70 }));
        // A later one that can only have ended by 1100 too narrows it.
        let two = (1040, 1100, 40, 60);
        assert_eq!(anchor([one, two].into_iter()), Some(Anchor { offset: 1040, slack: 40 }));
    }

    #[test]
    fn crossed_bounds_keep_what_was_submitted_after_its_submission() {
        let drifted = (1000, 1010, 0, 15);
        assert_eq!(anchor([drifted].into_iter()), Some(Anchor { offset: 1000, slack: 5 }));
    }
}
