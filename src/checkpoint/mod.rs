//! The released files, read in place: configuration, shard index and headers, weight formats.

pub mod format;
