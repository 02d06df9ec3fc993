//! The released vocabulary, the tiny one, and their vectors; each is loaded once in a test binary.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use trunkline::text::tokenizer::Tokenizer;

pub const REAL_BASE: usize = 163_584;
pub const TINY_MODEL: &[u8] = include_bytes!("../data/tokenizer/tiny/tiktoken.model");
const TINY_CONFIG: &[u8] = include_bytes!("../data/tokenizer/tiny/tokenizer_config.json");
pub const VECTORS: &str = include_str!("../data/tokenizer/vectors.json");
const TINY_VECTORS: &str = include_str!("../data/tokenizer/tiny/vectors_tiny.json");

/// The vectors, which also hold the released names of the special ids.
pub fn vectors() -> &'static Value {
    static CELL: OnceLock<Value> = OnceLock::new();
    CELL.get_or_init(|| serde_json::from_str(VECTORS).expect("vectors.json"))
}

pub fn tiny_vectors() -> &'static Value {
    static CELL: OnceLock<Value> = OnceLock::new();
    CELL.get_or_init(|| serde_json::from_str(TINY_VECTORS).expect("vectors_tiny.json"))
}

/// The released rank file, rebuilt from a published copy of its tokens.
pub fn real_model() -> &'static [u8] {
    static CELL: OnceLock<Vec<u8>> = OnceLock::new();
    CELL.get_or_init(|| {
        let published =
            tiktoken::get_encoding("kimi_k3").expect("the vocabulary is a feature of the package");
        let mut file = String::new();
        for id in 0..REAL_BASE as u32 {
            let _ = writeln!(file, "{} {id}", STANDARD.encode(published.decode(&[id])));
        }
        file.into_bytes()
    })
}

pub fn real() -> &'static Tokenizer {
    static CELL: OnceLock<Tokenizer> = OnceLock::new();
    CELL.get_or_init(|| {
        let names = vectors()["named_specials"].as_object().expect("named_specials");
        let added: serde_json::Map<String, Value> = names
            .iter()
            .map(|(name, id)| (id.to_string(), serde_json::json!({ "content": name, "special": true })))
            .collect();
        let config = serde_json::json!({ "added_tokens_decoder": added }).to_string();
        let config = (config.as_bytes(), Path::new("tokenizer_config.json"));
        Tokenizer::from_bytes(real_model(), Path::new("tiktoken.model"), Some(config), REAL_BASE + 256)
            .expect("the released vocabulary loads")
    })
}

pub fn tiny() -> &'static Tokenizer {
    static CELL: OnceLock<Tokenizer> = OnceLock::new();
    CELL.get_or_init(|| {
        let config = (TINY_CONFIG, Path::new("tokenizer_config.json"));
        Tokenizer::from_bytes(TINY_MODEL, Path::new("tiktoken.model"), Some(config), 2048)
            .expect("the tiny vocabulary loads")
    })
}

pub fn ids(v: &Value) -> Vec<u32> {
    v.as_array().expect("ids").iter().map(|id| id.as_u64().expect("id") as u32).collect()
}

pub fn list<'a>(v: &'a Value, key: &str) -> &'a [Value] {
    v[key].as_array().unwrap_or_else(|| panic!("{key} is a list"))
}

pub fn text<'a>(v: &'a Value, key: &str) -> &'a str {
    v[key].as_str().unwrap_or_else(|| panic!("{key} is a string"))
}
