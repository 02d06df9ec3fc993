//! Every operation of the network, and the device it runs on.

pub mod backend;
pub mod cpu;
pub mod device;
pub mod gpu;
pub mod ops;
