//! Any bytes as `config.json`: a config that reads back equal after being written, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use trunkline::checkpoint::config::Config;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("config.json");
    if let Ok(config) = Config::from_json(bytes, path) {
        let written = config.to_json().to_string();
        let again = Config::from_json(written.as_bytes(), path).expect("a written config is legal");
        assert_eq!(config, again);
    }
});
