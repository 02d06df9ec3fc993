//! What is wrong with a checkpoint is said before it is run, and what is right is read as the index says.

mod common;
#[path = "checkpoint/noise.rs"]
mod noise;
#[path = "checkpoint/released.rs"]
mod released;
#[path = "checkpoint/variants.rs"]
mod variants;

use common::tiny::{Entry, INDEX, SHARDS, TinyCheckpoint, run, text};
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use trunkline::checkpoint::folder::Disk;
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::checkpoint::verify::{Verification, verify};
use trunkline::memory::read::{ReadAt, read_exact_at};
use trunkline::model::Unobserved;
use trunkline::model::session::Session;
use trunkline::{Error, Kind};

const GENERATE: [&str; 5] = ["generate", "--ids", "3,1,4", "--max-tokens", "2"];
const IDS: [u32; 7] = [3, 1, 4, 159, 26, 1900, 5];
const Q_PROJ: &str = "language_model.model.layers.0.self_attn.q_proj.weight";

fn open_error(c: &TinyCheckpoint) -> Error {
    match Checkpoint::open(&c.dirs()) {
        Ok(_) => panic!("the checkpoint was accepted"),
        Err(e) => e,
    }
}

fn verified(c: &TinyCheckpoint) -> Verification {
    verify(Arc::new(Disk::new(&c.dirs()).unwrap()))
}

/// Refused by the library, by `generate` and by `verify`, each naming all of `named`.
fn refused_everywhere(c: &TinyCheckpoint, named: &[&str]) {
    let e = open_error(c);
    assert_eq!(e.kind(), Kind::Refused, "{e}");
    let said = format!("{e} {}", e.hint_text().unwrap_or_default());
    let generated = text(&c.run(&GENERATE), 3);
    assert!(generated.contains("error: "), "{generated}");
    let verified = text(&c.run(&["verify"]), 3);
    for name in named {
        for said in [&said, &generated, &verified] {
            assert!(said.contains(name), "{name} is not in: {said}");
        }
    }
}

fn logits_in_chunks(c: &TinyCheckpoint, chunk: usize) -> Vec<f32> {
    let checkpoint = Arc::new(Checkpoint::open(&c.dirs()).unwrap());
    let mut session = Session::new(common::open(checkpoint, 2, 64 << 20)).unwrap();
    let mut all = Vec::new();
    for part in IDS.chunks(chunk) {
        session
            .feed_all(part, &mut Unobserved, &mut |_, row| {
                all.extend_from_slice(row);
                Ok(())
            })
            .unwrap();
    }
    all
}

fn logits(c: &TinyCheckpoint) -> Vec<f32> {
    let all = logits_in_chunks(c, IDS.len());
    assert!(all.iter().all(|v| v.is_finite()));
    assert!(all.iter().any(|v| v.abs() > 0.1));
    all
}

#[test]
fn an_unharmed_checkpoint_is_accepted() {
    let c = TinyCheckpoint::new();
    let v = verified(&c);
    assert!(v.problems.is_empty() && v.warnings.is_empty(), "{v:?}");
    assert_eq!((v.shards, v.shards_read, v.experts, v.tokenizer), (SHARDS, SHARDS, 4 * 16, Some(2048)));
    assert!(text(&c.run(&["verify"]), 0).contains("no problems found"));
    let json: Value = serde_json::from_slice(&c.run(&["verify", "--json"]).stdout).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["tensors"].as_u64().unwrap() as usize, v.tensors);
    let mut index = 0;
    c.edit_index(|map| index = map.len());
    assert_eq!(v.tensors, index);
    text(&c.run(&GENERATE), 0);
    c.remove_index();
    assert_eq!(verified(&c).tensors, index, "the headers alone say the same");
}

#[test]
fn the_embedded_demo_is_accepted() {
    assert!(text(&run(&["verify"]), 0).contains("no problems found"));
}

#[test]
fn c01_absent_shards_are_all_named() {
    let c = TinyCheckpoint::new();
    c.drop_shard(2);
    c.drop_shard(SHARDS);
    let first_lost = "language_model.model.layers.1.";
    refused_everywhere(
        &c,
        &[&c.shard_name(2), &c.shard_name(SHARDS), first_lost, "4 shards are present", "resume"],
    );
    let v = verified(&c);
    assert_eq!(v.problem_count(), 1, "what follows from it is not told again: {:?}", v.problems);
    assert_eq!((v.shards, v.shards_read, v.experts), (SHARDS, SHARDS - 2, 3 * 16));
}

#[test]
fn c02_a_short_shard_is_refused() {
    for (len, named) in [(None, "cut short"), (Some(1000), "shorter than its header"), (Some(4), "too short")]
    {
        let c = TinyCheckpoint::new();
        let before = std::fs::metadata(c.shard(1)).unwrap().len();
        match len {
            None => c.cut(1, 64),
            Some(len) => c.cut_to(1, len),
        }
        let found = len.unwrap_or(before - 64);
        refused_everywhere(&c, &[&c.shard_name(1), named, &format!("found {found}")]);
        assert_eq!(verified(&c).problem_count(), 1);
    }
}

#[test]
fn a_long_shard_is_refused() {
    let c = TinyCheckpoint::new();
    let mut bytes = std::fs::read(c.shard(3)).unwrap();
    bytes.push(0);
    c.replace(3, &bytes);
    refused_everywhere(&c, &[&c.shard_name(3), "longer than its header says"]);
}

#[test]
fn c03_pointers_and_absurd_headers_are_recognised() {
    let c = TinyCheckpoint::new();
    c.lfs_pointer(1);
    refused_everywhere(&c, &[&c.shard_name(1), "Git LFS pointer", "git lfs pull"]);
    let mut bytes = vec![0xff; 8];
    bytes.extend([b'{'; 100]);
    c.replace(1, &bytes);
    refused_everywhere(&c, &[&c.shard_name(1), "header length is absurd", "18446744073709551615"]);
    c.replace(1, &[]);
    refused_everywhere(&c, &[&c.shard_name(1), "too short"]);
}

#[test]
fn c04_a_name_in_two_shards_is_read_from_the_one_in_the_index() {
    let c = TinyCheckpoint::new();
    let own = logits(&c);
    let mut other = c.entries(1).into_iter().find(|e| e.name == Q_PROJ).unwrap();
    // The sign of every weight.
    other.data.iter_mut().skip(1).step_by(2).for_each(|b| *b ^= 0x80);
    c.edit(2, |entries| entries.push(other.clone()));
    assert!(logits(&c) == own, "the index says shard 1");
    let second = c.shard_name(2);
    c.edit_index(|map| {
        map.insert(Q_PROJ.into(), json!(second));
    });
    let overlaid = logits(&c);
    assert!(overlaid != own, "the index says shard 2");
    let plain = TinyCheckpoint::new();
    plain.edit_tensor(1, Q_PROJ, |e| e.data = other.data);
    assert!(logits(&plain) == overlaid);
    c.remove_index();
    refused_everywhere(&c, &[Q_PROJ, &c.shard_name(1), &c.shard_name(2), INDEX]);
}

#[test]
fn c05_both_spellings_of_scales_are_the_same_bytes() {
    let c = TinyCheckpoint::new();
    let own = logits(&c);
    let mut scales = 0;
    c.edit_each(|e| {
        if e.name.ends_with(".weight_scale") {
            e.dtype = "F8_E8M0".into();
            scales += 1;
        }
    });
    assert_eq!(scales, 4 * 16 * 3);
    assert!(logits(&c) == own);
    let v = verified(&c);
    assert!(v.problems.is_empty());
    assert!(v.warnings.iter().any(|w| w.starts_with("192 scales") && w.contains("F8_E8M0")), "{v:?}");
}

#[test]
fn c05_another_dtype_is_refused_with_tensor_and_file() {
    let codes = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight_packed";
    let a_log = "language_model.model.layers.1.self_attn.A_log";
    for (shard, tensor, dtype, factor) in [
        (1, Q_PROJ, "F16", 1),
        (1, Q_PROJ, "F64", 4),
        (1, Q_PROJ, "F32", 2),
        (3, codes, "I8", 1),
        (3, codes, "F8_E8M0", 1),
        (2, a_log, "I32", 1),
    ] {
        let c = TinyCheckpoint::new();
        c.edit_tensor(shard, tensor, |e| {
            e.dtype = dtype.into();
            e.data = e.data.repeat(factor);
        });
        refused_everywhere(&c, &[tensor, &c.shard_name(shard), dtype]);
        assert_eq!(verified(&c).problem_count(), 1, "{dtype}");
    }
}

#[test]
fn another_shape_is_refused() {
    let c = TinyCheckpoint::new();
    c.edit_tensor(1, Q_PROJ, |e| e.shape.reverse());
    refused_everywhere(&c, &[Q_PROJ, &c.shard_name(1), "expected [64, 96], found [96, 64]"]);
}

#[test]
fn padded_decay_is_accepted_and_the_padding_unused() {
    let c = TinyCheckpoint::new();
    let own = logits(&c);
    for n in 1..=3 {
        c.edit_tensor(n, &format!("language_model.model.layers.{}.self_attn.A_log", n - 1), |e| {
            e.shape = vec![128];
            // Four heads count; a value that would show follows them.
            e.data.truncate(16);
            e.data.extend(9f32.to_le_bytes().repeat(124));
        });
    }
    assert!(logits(&c) == own);
}

#[test]
fn c06_names_without_the_prefix_are_refused() {
    for prefix in ["language_model.", "language_model.model."] {
        let c = TinyCheckpoint::new();
        c.strip_prefix(prefix);
        refused_everywhere(&c, &["language_model.model.embed_tokens.weight", "without the prefix"]);
        c.remove_index();
        refused_everywhere(&c, &["without the prefix"]);
    }
}

#[test]
fn c06_a_missing_tensor_is_refused() {
    let c = TinyCheckpoint::new();
    c.edit(1, |entries| entries.retain(|e| e.name != Q_PROJ));
    refused_everywhere(&c, &[Q_PROJ, &c.shard_name(1), "the index names a tensor"]);
    c.reindex();
    refused_everywhere(&c, &[Q_PROJ, "the configuration implies"]);
    let scale = "language_model.model.layers.4.block_sparse_moe.experts.15.w3.weight_scale";
    let c = TinyCheckpoint::new();
    c.edit(5, |entries| entries.retain(|e| e.name != scale));
    refused_everywhere(&c, &[scale, &c.shard_name(5)]);
    c.reindex();
    refused_everywhere(&c, &[scale]);
    assert_eq!(verified(&c).experts, 4 * 16 - 1);
}

#[test]
fn c07_layer_lists_and_counts_are_checked() {
    let c = TinyCheckpoint::new();
    let original = std::fs::read_to_string(c.path().join("config.json")).unwrap();
    let cases: [(&str, Value, &str); 8] = [
        ("/text_config/num_experts_per_token", json!(17), "text_config.num_experts_per_token"),
        ("/text_config/linear_attn_config/kda_layers", json!([0, 1, 2]), "kda_layers"),
        ("/text_config/linear_attn_config/kda_layers", json!([1, 2, 3, 4]), "kda_layers"),
        ("/text_config/linear_attn_config/kda_layers", json!([1, 2]), "kda_layers"),
        ("/text_config/hidden_act", json!("silu"), "text_config.hidden_act"),
        ("/text_config/quantization_config/format", json!("nvfp4"), "quantization_config.format"),
        ("/text_config/num_hidden_layers", json!(2_000_000_000), "num_hidden_layers"),
        ("/text_config/num_experts", json!(2_000_000_000), "num_experts"),
    ];
    for (pointer, value, key) in cases {
        c.edit_config(|v| *v.pointer_mut(pointer).unwrap() = value);
        refused_everywhere(&c, &[key, "config.json"]);
        std::fs::write(c.path().join("config.json"), &original).unwrap();
    }
    text(&c.run(&["verify"]), 0);
}

/// Every key that the graph needs, with its place.
const REQUIRED: &[&str] = &[
    "model_type",
    "tie_word_embeddings",
    "text_config",
    "text_config.num_hidden_layers",
    "text_config.vocab_size",
    "text_config.hidden_act",
    "text_config.mla_use_nope",
    "text_config.moe_router_activation_func",
    "text_config.num_expert_group",
    "text_config.topk_group",
    "text_config.topk_method",
    "text_config.num_nextn_predict_layers",
    "text_config.use_grouped_topk",
    "text_config.linear_attn_config",
    "text_config.linear_attn_config.full_attn_layers",
    "text_config.linear_attn_config.kda_layers",
    "text_config.linear_attn_config.num_heads",
    "text_config.linear_attn_config.head_dim",
    "text_config.linear_attn_config.short_conv_kernel_size",
    "text_config.linear_attn_config.gate_lower_bound",
    "text_config.linear_attn_config.use_full_rank_gate",
    "text_config.first_k_dense_replace",
    "text_config.moe_layer_freq",
    "text_config.num_attention_heads",
    "text_config.num_experts",
    "text_config.num_experts_per_token",
    "text_config.hidden_size",
    "text_config.q_lora_rank",
    "text_config.kv_lora_rank",
    "text_config.qk_nope_head_dim",
    "text_config.qk_rope_head_dim",
    "text_config.v_head_dim",
    "text_config.mla_use_output_gate",
    "text_config.intermediate_size",
    "text_config.num_shared_experts",
    "text_config.moe_intermediate_size",
    "text_config.routed_expert_hidden_size",
    "text_config.latent_moe_use_norm",
    "text_config.routed_scaling_factor",
    "text_config.moe_renormalize",
    "text_config.activation_situ_beta",
    "text_config.activation_situ_linear_beta",
    "text_config.attn_res_block_size",
    "text_config.rms_norm_eps",
    "text_config.quantization_config",
    "text_config.quantization_config.config_groups",
    "text_config.quantization_config.quant_method",
    "text_config.quantization_config.format",
    "text_config.quantization_config.config_groups.group_0.format",
    "text_config.quantization_config.config_groups.group_0.input_activations",
    "text_config.quantization_config.config_groups.group_0.weights",
    "text_config.quantization_config.config_groups.group_0.weights.num_bits",
    "text_config.quantization_config.config_groups.group_0.weights.type",
    "text_config.quantization_config.config_groups.group_0.weights.strategy",
    "text_config.quantization_config.config_groups.group_0.weights.symmetric",
    "text_config.quantization_config.config_groups.group_0.weights.group_size",
    "text_config.num_key_value_heads",
    "text_config.tie_word_embeddings",
    "text_config.bos_token_id",
    "text_config.eos_token_id",
    "text_config.pad_token_id",
    "text_config.max_position_embeddings",
];

#[test]
fn c07_every_needed_key_is_required() {
    let c = TinyCheckpoint::new();
    let original = std::fs::read_to_string(c.path().join("config.json")).unwrap();
    for key in REQUIRED {
        c.edit_config(|v| {
            let (parent, last) = key.rsplit_once('.').unwrap_or(("", key));
            let pointer =
                if parent.is_empty() { String::new() } else { format!("/{}", parent.replace('.', "/")) };
            let object = v.pointer_mut(&pointer).unwrap().as_object_mut().unwrap();
            assert!(object.remove(last).is_some(), "{key} is not in the configuration");
        });
        let e = open_error(&c);
        assert_eq!((e.kind(), e.place().key.as_deref()), (Kind::Refused, Some(*key)), "{e}");
        std::fs::write(c.path().join("config.json"), &original).unwrap();
    }
    c.edit_config(|v| drop(v["text_config"].as_object_mut().unwrap().remove("kv_lora_rank")));
    refused_everywhere(&c, &["text_config.kv_lora_rank"]);
}

/// Hands out at most `most` bytes a read, and nothing from `end` on.
struct Stingy {
    most: usize,
    end: u64,
    longest: Mutex<usize>,
}

impl ReadAt for Stingy {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut longest = self.longest.lock().unwrap();
        *longest = longest.max(buf.len());
        let n = buf.len().min(self.most).min(self.end.saturating_sub(offset) as usize);
        if buf.len() <= 1 << 20 {
            for (i, b) in buf[..n].iter_mut().enumerate() {
                *b = (offset as usize + i) as u8;
            }
        }
        Ok(n)
    }
}

#[test]
fn c14_short_reads_are_continued_and_an_early_end_is_an_error() {
    let reader = Stingy { most: 1000, end: u64::MAX, longest: Mutex::new(0) };
    let mut buf = vec![0; 12_345];
    read_exact_at(&reader, Path::new("weights"), &mut buf, 7).unwrap();
    assert!(buf.iter().enumerate().all(|(i, b)| *b == (7 + i) as u8));
    let reader = Stingy { most: 1000, end: 5_000, longest: Mutex::new(0) };
    let e = read_exact_at(&reader, Path::new("weights"), &mut buf, 7).unwrap_err();
    assert_eq!(e.kind(), Kind::Io);
    assert_eq!((e.place().offset, e.place().bytes), (Some(7), Some(12_345)));
    assert!(e.to_string().contains("weights") && e.to_string().contains("4993"), "{e}");
    // No system call asks for 2 GiB. Nothing touches the pages of this buffer.
    let reader = Stingy { most: usize::MAX, end: u64::MAX, longest: Mutex::new(0) };
    read_exact_at(&reader, Path::new("weights"), &mut vec![0; (2 << 30) + 1], 0).unwrap();
    assert!(*reader.longest.lock().unwrap() < 2 << 30);
}

#[test]
fn every_problem_is_told_once() {
    let c = TinyCheckpoint::new();
    c.drop_shard(2);
    c.cut(3, 10);
    c.edit_tensor(1, Q_PROJ, |e| e.dtype = "F16".into());
    std::fs::write(c.path().join("tiktoken.model"), "nonsense").unwrap();
    let v = verified(&c);
    let said: Vec<String> = v.problems.iter().map(Error::to_string).collect();
    assert_eq!(said.len(), 4, "{said:#?}");
    for named in [&c.shard_name(2), &c.shard_name(3), Q_PROJ, "tiktoken.model"] {
        assert!(said.iter().any(|s| s.contains(named)), "{named}: {said:#?}");
    }
    let output = c.run(&["verify", "--json"]);
    assert!(text(&output, 3).contains("4 problems"));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["ok"].as_bool(), json["problem_count"].as_u64()), (Some(false), Some(4)));
    assert!(json["problems"].as_array().unwrap().iter().any(|p| p["tensor"] == Q_PROJ));
}

#[test]
fn a_scale_without_a_value_ends_the_run() {
    let c = TinyCheckpoint::new();
    c.edit(2, |entries| {
        for e in entries.iter_mut().filter(|e| e.name.ends_with("w3.weight_scale")) {
            let last = e.data.len() - 1;
            e.data[last] = 0xff;
        }
    });
    let said = text(&c.run(&GENERATE), 1);
    for named in ["0xFF", "language_model.model.layers.1.block_sparse_moe.experts.", "w3.weight_scale"] {
        assert!(said.contains(named), "{said}");
    }
}

#[test]
fn a_poisoned_value_ends_the_run() {
    let c = TinyCheckpoint::new();
    c.edit_tensor(SHARDS, "language_model.model.norm.weight", |e| {
        e.data[..2].copy_from_slice(&[0xc0, 0x7f]);
    });
    let said = text(&c.run(&GENERATE), 1);
    assert!(said.contains("not finite"), "{said}");
}

#[test]
fn a_cache_entry_of_the_hub_opens() {
    let c = TinyCheckpoint::new();
    let own = logits(&c);
    let entry = c.hub_cache();
    for path in [entry.clone(), entry.join("snapshots/0123abcd")] {
        let opened = Arc::new(Checkpoint::open(&[path]).unwrap());
        let mut session = Session::new(common::open(opened, 2, 64 << 20)).unwrap();
        let mut all = Vec::new();
        session
            .feed_all(&IDS, &mut Unobserved, &mut |_, row| {
                all.extend_from_slice(row);
                Ok(())
            })
            .unwrap();
        assert!(all == own);
    }
    let name = c.shard_name(2);
    let link = entry.join("snapshots/0123abcd").join(&name);
    std::fs::remove_file(entry.join("snapshots/0123abcd").join(std::fs::read_link(&link).unwrap())).unwrap();
    let said = text(&run(&["verify", "--model", entry.to_str().unwrap()]), 3);
    assert!(said.contains(&name) && said.contains("the link points to a file that is not there"), "{said}");
}

#[test]
fn shards_may_lie_in_several_folders() {
    let c = TinyCheckpoint::new();
    let second = tempfile::tempdir().unwrap();
    std::fs::rename(c.shard(4), second.path().join(c.shard_name(4))).unwrap();
    assert_eq!(open_error(&c).kind(), Kind::Refused);
    Checkpoint::open(&[c.path().to_path_buf(), second.path().to_path_buf()]).unwrap();
    text(&c.run(&["verify", "--model", second.path().to_str().unwrap()]), 3);
    let dirs = [c.path().to_str().unwrap(), second.path().to_str().unwrap()];
    text(&run(&["verify", "--model", dirs[0], "--model", dirs[1]]), 0);
}

#[test]
fn an_index_may_not_name_files_elsewhere() {
    for bad in ["../model.safetensors", "/etc/hostname", "sub/model.safetensors", "..", "."] {
        let c = TinyCheckpoint::new();
        c.edit_index(|map| {
            map.insert(Q_PROJ.into(), json!(bad));
        });
        refused_everywhere(&c, &[INDEX, "outside the model folder", bad]);
    }
}

#[test]
fn unknown_tensors_are_ignored() {
    let c = TinyCheckpoint::new();
    let own = logits(&c);
    let inv_freq = "language_model.model.layers.3.self_attn.rotary_emb.inv_freq";
    c.edit(4, |entries| {
        entries.push(Entry::new(inv_freq, "F64", &[2], vec![0; 16]));
        entries.push(Entry::new("language_model.model.extra.weight", "BF16", &[3, 2], vec![0; 12]));
        entries.push(Entry::new("vision_tower.patch_embed.proj.bias", "F16", &[4], vec![0; 8]));
        entries.push(Entry::new("vision_tower.step", "I64", &[], vec![0; 8]));
    });
    c.reindex();
    assert!(logits(&c) == own);
    let v = verified(&c);
    assert!(v.problems.is_empty());
    assert!(v.warnings.len() == 1 && v.warnings[0].starts_with("2 tensors"), "{:?}", v.warnings);
    assert!(v.warnings[0].contains(inv_freq));
}
