//! What is resident where, and how the rest is read.

pub mod experts;
pub mod machine;
pub mod place;
pub mod read;
pub mod slab;
pub mod trunk;
