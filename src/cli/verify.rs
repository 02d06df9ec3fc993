use super::Global;
use crate::error::Result;
use clap::Args;
#[derive(Args)]
pub struct Flags {}
pub fn run(_: &Flags, _: &Global) -> Result<()> {
    todo!()
}
