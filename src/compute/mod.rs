//! Every operation of the network.

pub mod cpu;
pub mod gpu;
