//! Text to ids, logits to ids, ids to text.

pub mod chat;
pub mod chat_parse;
mod chat_render;
pub mod generate;
pub mod json;
pub mod sampler;
pub mod stream;
pub mod tokenizer;
mod vocab;
