//! Whatever bytes configuration, index and headers hold: opening ends in a checkpoint or an error, and what opens runs
//! or ends in an error.

use super::common::tiny::{INDEX, TinyCheckpoint};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use trunkline::Kind;
use trunkline::checkpoint::shards::Checkpoint;
use trunkline::checkpoint::synth::SynthOptions;
use trunkline::checkpoint::verify::verify;
use trunkline::model::session::Session;
use trunkline::model::{Model, Options, Unobserved};

/// A checkpoint of two layers, as small as they come, and the contents of its files.
type Small = (TinyCheckpoint, Vec<(PathBuf, Vec<u8>)>);

static SMALL: LazyLock<Small> = LazyLock::new(|| {
    let c = TinyCheckpoint::with(&SynthOptions {
        layers: Some(2),
        experts: Some(2),
        experts_per_token: Some(2),
        hidden: Some(16),
        vocab: Some(300),
        intermediate: Some(32),
        moe_intermediate: Some(32),
        latent: Some(32),
        ..SynthOptions::default()
    });
    let files = ["config.json".into(), INDEX.into(), c.shard_name(1), c.shard_name(2), c.shard_name(3)];
    let files = files.map(|name: String| c.path().join(name));
    let originals = files.map(|path| (path.clone(), std::fs::read(path).unwrap()));
    (c, originals.to_vec())
});

/// One thing that happens to a file.
#[derive(Debug, Clone)]
enum Harm {
    Cut(f64),
    Flip(f64, u8),
    Set(f64, u8),
    /// A digit of a number grows.
    Digits(f64),
}

fn harm() -> impl Strategy<Value = Harm> {
    let at = 0.0..1.0f64;
    prop_oneof![
        at.clone().prop_map(Harm::Cut),
        (at.clone(), 0..8u8).prop_map(|(at, bit)| Harm::Flip(at, bit)),
        (at.clone(), any::<u8>()).prop_map(|(at, byte)| Harm::Set(at, byte)),
        at.prop_map(Harm::Digits),
    ]
}

/// The part of a file that is structure: all of a JSON file, length and header of a shard.
fn structure(path: &std::path::Path, bytes: &[u8]) -> usize {
    if path.extension().is_some_and(|e| e == "json") {
        return bytes.len();
    }
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

fn apply(harm: &Harm, bytes: &mut Vec<u8>, structure: usize) {
    let place = |at: f64| ((at * structure as f64) as usize).min(structure - 1);
    match *harm {
        Harm::Cut(at) => bytes.truncate(place(at)),
        Harm::Flip(at, bit) => bytes[place(at)] ^= 1 << bit,
        Harm::Set(at, byte) => bytes[place(at)] = byte,
        Harm::Digits(at) => {
            let from = place(at);
            if let Some(digit) = (from..structure).find(|i| bytes[*i].is_ascii_digit()) {
                bytes.splice(digit..digit, *b"77777");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn noise_never_panics(file in 0..5usize, harms in prop::collection::vec(harm(), 1..3)) {
        let (c, originals) = &*SMALL;
        let (path, original) = &originals[file];
        let mut bytes = original.clone();
        let end = structure(path, original);
        for harm in &harms {
            let end = end.min(bytes.len());
            if end > 0 {
                apply(harm, &mut bytes, end);
            }
        }
        std::fs::write(path, &bytes).unwrap();
        let opened = Checkpoint::open(&c.dirs());
        let found = verify(Arc::new(trunkline::checkpoint::folder::Disk::new(&c.dirs()).unwrap()));
        std::fs::write(path, original).unwrap();
        match opened {
            Err(e) => {
                prop_assert!(matches!(e.kind(), Kind::Refused | Kind::Io), "{e}");
                prop_assert!(found.problem_count() > 0);
            }
            Ok(opened) => {
                let options = Options {
                    threads: 1,
                    context: 8,
                    chunk: 2,
                    all_logits: false,
                    budget: 64 << 20,
                    io_depth: 1,
                    cancel: Arc::default(),
                    gpu: None,
                    ..Options::default()
                };
                let run = Model::open(Arc::new(opened), options).and_then(|model| {
                    let mut session = Session::new(Arc::new(model))?;
                    session.feed_all(&[1, 2, 3], &mut Unobserved, &mut |_, _| Ok(()))
                });
                if let Err(e) = run {
                    prop_assert!(!e.to_string().is_empty());
                }
            }
        }
    }
}
