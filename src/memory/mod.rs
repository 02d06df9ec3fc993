//! What is resident where, and how the rest is read.

pub mod read;
