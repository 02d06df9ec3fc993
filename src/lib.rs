//! Trunkline runs Moonshot's Kimi K3 on one workstation.
//!
//! # The path of one token
//! [`cli`] turns what was typed into what it means; [`checkpoint`] opens the released files in place;
//! [`memory`] decides what is resident and reads the rest; [`model`] holds the network: its weights by
//! name, one forward pass, the state of a sequence and the session over it; [`compute`] holds every
//! operation; [`text`] turns text into ids and logits into text; [`report`] tells the user what is going on.
//!
//! # Shape letters
//! T tokens of a pass, H `hidden_size`, N heads, D head dim, P = N·D, R `kv_lora_rank`, L latent expert
//! width (`routed_expert_hidden_size`), I `moe_intermediate_size`, E experts, K experts chosen, V vocabulary.
//! Rows are tokens; every weight is `[out, in]`, row-major, and `y = x·Wᵀ`.

pub mod checkpoint;
pub mod cli;
pub mod compute;
pub mod error;
pub mod memory;
pub mod model;
pub mod report;
pub mod text;

pub use error::{Error, Kind, Result};
