//! The checkpoint that lies in the program: what `trunkline synth --preset tiny --seed 0` writes. Its network is whole
//! and its weights are random, so its text is noise.

use super::folder::{Embedded, Folder};
use super::shards::Checkpoint;
use crate::error::Result;
use std::path::PathBuf;
use std::sync::Arc;

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../assets/demo/", $name)))),*]
    };
}

const FILES: &[(&str, &[u8])] = embedded![
    "config.json",
    "generation_config.json",
    "model-00001-of-000010.safetensors",
    "model-00002-of-000010.safetensors",
    "model-00003-of-000010.safetensors",
    "model-00004-of-000010.safetensors",
    "model-00005-of-000010.safetensors",
    "model-00006-of-000010.safetensors",
    "model-00007-of-000010.safetensors",
    "model-00008-of-000010.safetensors",
    "model-00009-of-000010.safetensors",
    "model-00010-of-000010.safetensors",
    "model.safetensors.index.json",
    "tiktoken.model",
    "tokenizer_config.json",
];

/// The files.
pub fn folder() -> Arc<dyn Folder> {
    Arc::new(Embedded { name: PathBuf::from("embedded demo"), files: FILES })
}

/// Opens the embedded checkpoint, with the checks that any other gets.
pub fn open() -> Result<Checkpoint> {
    Checkpoint::open_in(folder())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::synth::{SynthOptions, synth};

    #[test]
    fn the_recipe_gives_the_embedded_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let report = synth(dir.path(), &SynthOptions::default(), &|_, _| Ok(())).unwrap();
        assert_eq!(report.files, FILES.len());
        for (name, bytes) in FILES {
            let made = std::fs::read(dir.path().join(name)).unwrap();
            assert!(made == *bytes, "{name} is not what the recipe writes: write assets/demo anew");
        }
    }

    #[test]
    fn it_opens_with_its_tokenizer() {
        let c = open().unwrap();
        assert_eq!(c.config().layers.len(), 9);
        assert!(c.tokenizer_files().unwrap().tiktoken_model.is_some());
        assert!(c.unknown().is_empty());
    }
}
