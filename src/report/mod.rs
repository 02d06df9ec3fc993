//! What the user is told: progress, counters, timings.

pub mod counters;
pub mod progress;
