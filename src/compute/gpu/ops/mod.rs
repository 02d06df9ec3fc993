//! The operations, recorded: each checks its shapes, so that no kernel is handed a buffer it would run past.

pub mod kda;
pub mod linear;
pub mod mla;
pub mod moe;
pub mod norm;
pub mod values;

use crate::error::{Error, Result};
use std::fmt::Display;

/// `Run` unless `found == expected`, naming the operation and the operand.
fn want<T: PartialEq + Display>(operand: &str, expected: T, found: T) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::run(format!("{operand} has the wrong shape")).expected(expected, found))
}

/// `Run` unless `found <= limit`.
fn at_most(operand: &str, limit: usize, found: usize) -> Result<()> {
    if found <= limit {
        return Ok(());
    }
    Err(Error::run(format!("{operand} is more than the kernel takes"))
        .expected(format_args!("at most {limit}"), found))
}
