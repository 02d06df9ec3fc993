//! Any bytes as `tiktoken.model`: a tokenizer whose encoding decodes to the same text, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use trunkline::text::tokenizer::Tokenizer;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("tiktoken.model");
    if let Ok(t) = Tokenizer::from_bytes(bytes, path, None, 512) {
        let ids = t.encode("aé 1", false).expect("every byte has an id");
        assert_eq!(t.decode(&ids), "aé 1");
    }
});
