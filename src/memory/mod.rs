//! What is resident where, and how the rest is read.

pub mod experts;
pub mod io;
pub mod machine;
pub mod place;
pub mod read;
pub mod slab;
pub mod stream;
pub mod trunk;
