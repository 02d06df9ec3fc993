//! Every operation of the network.

pub mod cpu;
