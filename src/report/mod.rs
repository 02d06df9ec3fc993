//! What the user is told: progress, counters, timings.

pub mod card;
pub mod compare;
pub mod counters;
pub mod progress;
