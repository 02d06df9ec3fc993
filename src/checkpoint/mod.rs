//! The released files, read in place: configuration, shard index and headers, weight formats.

pub mod config;
pub mod demo;
mod examine;
pub mod folder;
pub mod format;
mod header;
mod index;
pub mod names;
mod released;
pub mod shards;
pub mod synth;
pub mod verify;
