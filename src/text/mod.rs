//! Text to ids, logits to ids, ids to text.

pub mod generate;
pub mod sampler;
pub mod stream;
pub mod tokenizer;
mod vocab;
