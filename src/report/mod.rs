//! What the user is told: progress, counters, timings, traces.

pub mod card;
pub mod compare;
pub mod counters;
pub mod progress;
pub mod target;
pub mod trace;
