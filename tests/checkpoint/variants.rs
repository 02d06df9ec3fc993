//! Configurations that the reference numbers do not cover, held against covered ones that compute the same.

use super::common::tiny::{Entry, SHARDS, TinyCheckpoint};
use super::{IDS, logits, logits_in_chunks, open_error};
use half::bf16;
use serde_json::json;
use std::sync::Arc;
use trunkline::Kind;
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::checkpoint::synth::SynthOptions;
use trunkline::model::{Model, Options};

/// Hidden width of the tiny checkpoint.
const H: usize = 96;

fn layer(i: usize, name: &str) -> String {
    format!("language_model.model.layers.{i}.{name}")
}

fn identity() -> Vec<u8> {
    let value = |i: usize| bf16::from_f32(if i % H == i / H { 1.0 } else { 0.0 }).to_le_bytes();
    (0..H * H).flat_map(value).collect()
}

fn ones(n: usize) -> Vec<u8> {
    bf16::ONE.to_le_bytes().repeat(n)
}

fn same_in_any_chunks(c: &TinyCheckpoint) {
    let whole = logits(c);
    for chunk in [1, 3] {
        assert!(logits_in_chunks(c, chunk) == whole, "chunks of {chunk}");
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let head = "language_model.lm_head.weight";
    let c = TinyCheckpoint::new();
    let embed =
        c.entries(SHARDS).into_iter().find(|e| e.name == "language_model.model.embed_tokens.weight").unwrap();
    c.edit_tensor(SHARDS, head, |e| e.data = embed.data);
    let copied = logits(&c);
    c.edit(SHARDS, |entries| entries.retain(|e| e.name != head));
    c.reindex();
    c.edit_config(|v| {
        v["tie_word_embeddings"] = json!(true);
        v["text_config"]["tie_word_embeddings"] = json!(true);
    });
    assert!(logits(&c) == copied);
    same_in_any_chunks(&c);
}

#[test]
fn experts_without_a_latent_are_those_behind_identities() {
    let c =
        TinyCheckpoint::with(&SynthOptions { layers: Some(5), latent: Some(H), ..SynthOptions::default() });
    let projections = ["routed_expert_down_proj", "routed_expert_up_proj"];
    for i in 1..5 {
        for name in projections {
            let name = layer(i, &format!("block_sparse_moe.{name}.weight"));
            c.edit_tensor(i + 1, &name, |e| e.data = identity());
        }
        let norm = layer(i, "block_sparse_moe.routed_expert_norm.weight");
        c.edit(i + 1, |entries| entries.retain(|e| e.name != norm));
    }
    c.edit_config(|v| v["text_config"]["latent_moe_use_norm"] = json!(false));
    c.reindex();
    let behind = logits(&c);
    for i in 1..5 {
        c.edit(i + 1, |entries| entries.retain(|e| !projections.iter().any(|p| e.name.contains(p))));
    }
    c.edit_config(|v| v["text_config"]["routed_expert_hidden_size"] = json!(null));
    c.reindex();
    assert!(logits(&c) == behind);
    same_in_any_chunks(&c);
}

#[test]
fn a_full_rank_query_is_that_behind_an_identity() {
    // With a unit gain before the attention its input has a mean square of one, and the norm between the two query
    // matrices changes it by its eps alone.
    let c = TinyCheckpoint::new();
    for i in [3, 4] {
        c.edit(i + 1, |entries| {
            for e in entries.iter_mut() {
                if e.name == layer(i, "input_layernorm.weight") {
                    e.data = ones(H);
                } else if e.name == layer(i, "self_attn.q_a_proj.weight") {
                    *e = Entry::new(&e.name, "BF16", &[H, H], identity());
                } else if e.name == layer(i, "self_attn.q_a_layernorm.weight") {
                    *e = Entry::new(&e.name, "BF16", &[H], ones(H));
                } else if e.name == layer(i, "self_attn.q_b_proj.weight") {
                    let rows = e.shape[0];
                    let wide = e.data.repeat(3);
                    *e = Entry::new(&e.name, "BF16", &[rows, H], wide);
                }
            }
        });
    }
    c.edit_config(|v| v["text_config"]["q_lora_rank"] = json!(H));
    let behind = logits(&c);
    for i in [3, 4] {
        c.edit(i + 1, |entries| {
            entries.retain(|e| !e.name.contains("self_attn.q_a_"));
            for e in entries.iter_mut().filter(|e| e.name.contains("self_attn.q_b_proj")) {
                e.name = layer(i, "self_attn.q_proj.weight");
            }
        });
    }
    c.edit_config(|v| v["text_config"]["q_lora_rank"] = json!(null));
    c.reindex();
    let full = logits(&c);
    let scale = behind.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (a, b) in full.iter().zip(&behind) {
        let error = (a - b).abs();
        if !(error <= 3e-4 * scale) {
            panic!("{a} for {b}");
        }
    }
    same_in_any_chunks(&c);
    // The query matters: another one gives other logits.
    let name = layer(3, "self_attn.q_proj.weight");
    c.edit_tensor(4, &name, |e| e.data.rotate_left(2 * H));
    assert!(logits(&c).iter().zip(&full).any(|(a, b)| (a - b).abs() > 1e-3 * scale));
}

/// The error of opening the model behind a checkpoint that is whole in itself.
fn model_error(c: &TinyCheckpoint) -> trunkline::Error {
    let options = Options {
        threads: 1,
        context: 64,
        chunk: IDS.len(),
        all_logits: false,
        budget: 64 << 20,
        io_depth: 1,
        cancel: Arc::default(),
        gpu: None,
        ..Options::default()
    };
    match Checkpoint::open(&c.dirs()).and_then(|c| Model::open(Arc::new(c), options)) {
        Ok(_) => panic!("the model was accepted"),
        Err(e) => e,
    }
}

#[test]
fn variants_that_nothing_published_checks_are_refused_by_name() {
    let c = TinyCheckpoint::new();
    c.edit_config(|v| v["text_config"]["attn_res_block_size"] = json!(null));
    let e = model_error(&c);
    assert_eq!(e.kind(), Kind::Refused);
    assert_eq!(e.place().key.as_deref(), Some("text_config.attn_res_block_size"));
    let c =
        TinyCheckpoint::with(&SynthOptions { layers: Some(5), latent: Some(H), ..SynthOptions::default() });
    c.edit_config(|v| v["text_config"]["routed_expert_hidden_size"] = json!(null));
    let e = model_error(&c);
    assert_eq!(e.place().key.as_deref(), Some("text_config.latent_moe_use_norm"));
}

#[test]
fn a_configuration_for_another_width_is_refused_at_open() {
    let c = TinyCheckpoint::new();
    c.edit_config(|v| v["text_config"]["kv_lora_rank"] = json!(64));
    let e = open_error(&c);
    assert_eq!(e.kind(), Kind::Refused);
    assert!(e.to_string().contains("kv_a_"), "{e}");
}
