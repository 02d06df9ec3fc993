//! Text to ids, logits to ids, ids to text.

pub mod generate;
