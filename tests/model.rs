//! The whole network against the reference numbers, and against itself however the tokens are fed.

mod common;

use common::{Golden, assert_close, open_golden, open_model};
use std::collections::HashMap;
use std::sync::Arc;
use trunkline::compute::device::Tensor;
use trunkline::compute::ops::moe::Routing;
use trunkline::model::forward::{Logits, Scratch};
use trunkline::model::session::Session;
use trunkline::model::state::State;
use trunkline::model::{Model, Observer, Point, Unobserved};

/// The gate of trace, state and logits.
const DEEP: f64 = 3e-4;

const SETS: [&str; 2] = ["base", "toggles"];

fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best as u32
}

#[test]
fn logits_and_greedy_tokens_equal_the_reference() {
    for set in SETS {
        let (model, golden) = open_golden(set);
        let mut prompt = 0;
        while golden.has(&format!("p{prompt}.ids")) {
            let ids = golden.ids(&format!("p{prompt}.ids"));
            let mut session = Session::new(model.clone()).unwrap();
            let mut all = Vec::new();
            session
                .feed_all(&ids, &mut Unobserved, &mut |_, row| {
                    all.extend_from_slice(row);
                    Ok(())
                })
                .unwrap();
            assert_close(
                &format!("{set} p{prompt}.logits"),
                &all,
                &golden.f32(&format!("p{prompt}.logits")),
                DEEP,
            );
            let tokens = golden.ids(&format!("p{prompt}.greedy.tokens"));
            let rows = golden.f32(&format!("p{prompt}.greedy.logits"));
            let vocab = model.config().vocab_size;
            for (j, token) in tokens.iter().enumerate() {
                assert_close(
                    &format!("{set} p{prompt}.greedy.logits[{j}]"),
                    session.logits(),
                    &rows[j * vocab..(j + 1) * vocab],
                    DEEP,
                );
                assert_eq!(argmax(session.logits()), *token, "{set} p{prompt} greedy {j}");
                session.step(*token, &mut Unobserved).unwrap();
            }
            prompt += 1;
        }
        assert!(prompt >= 4, "{set}: only {prompt} prompts");
    }
}

/// Everything a pass shows.
#[derive(Default)]
struct Recorder {
    tensors: HashMap<(Point, usize), Tensor>,
    routing: HashMap<usize, Routing>,
}

impl Observer for Recorder {
    fn wants_tensors(&self) -> bool {
        true
    }
    fn tensor(&mut self, point: Point, i: usize, values: &Tensor) {
        self.tensors.insert((point, i), values.clone());
    }
    fn routing(&mut self, i: usize, routing: &Routing) {
        self.routing.insert(i, routing.clone());
    }
}

#[test]
fn trace_and_state_equal_the_reference() {
    for set in SETS {
        let (model, golden) = open_golden(set);
        let ids = golden.ids("p2.ids");
        let mut state = model.new_state().unwrap();
        let mut seen = Recorder::default();
        model.forward(&mut state, &mut Scratch::default(), &ids, Logits::All, &mut seen).unwrap();
        let layers = model.config().layers.len();
        let mut checked = 0;
        let mut check = |name: String, point: Point, i: usize| {
            if golden.has(&name) {
                let found = &seen.tensors[&(point, i)];
                assert_close(&format!("{set} {name}"), found.host(), &golden.f32(&name), DEEP);
                checked += 1;
            }
        };
        for i in 0..layers {
            for (name, point) in [
                ("attn_res", Point::AttnRes),
                ("attn_res_probs", Point::AttnProbs),
                ("attn_in", Point::AttnIn),
                ("attn_out", Point::AttnOut),
                ("mlp_res", Point::FfnRes),
                ("mlp_res_probs", Point::FfnProbs),
                ("mlp_in", Point::FfnIn),
                ("latent_sum", Point::LatentSum),
                ("mlp_out", Point::FfnOut),
                ("out", Point::Out),
            ] {
                check(format!("trace.L{i}.{name}"), point, i);
            }
        }
        check("trace.final.attn_res".into(), Point::FinalRes, layers);
        check("trace.final.probs".into(), Point::FinalProbs, layers);
        check("trace.final.norm".into(), Point::FinalNorm, layers);
        assert_eq!(checked, golden.count("trace.") - golden.count_containing(".topk_"), "{set}");
        routing_equals(set, &golden, &seen, ids.len());
        state_equals(set, &golden, &model, &state);
    }
}

/// Same expert sets, and the same weight for each chosen expert.
fn routing_equals(set: &str, golden: &Golden, seen: &Recorder, tokens: usize) {
    let mut layers = 0;
    for (i, routing) in &seen.routing {
        let idx = golden.ids(&format!("trace.L{i}.topk_idx"));
        let weight = golden.f32(&format!("trace.L{i}.topk_weight"));
        let k = idx.len() / tokens;
        for t in 0..tokens {
            let sorted = |ids: &[u32], w: &[f32]| {
                let mut pairs: Vec<(u32, f32)> = ids.iter().copied().zip(w.iter().copied()).collect();
                pairs.sort_by_key(|p| p.0);
                pairs
            };
            let at = t * k..(t + 1) * k;
            let own = sorted(&routing.experts[at.clone()], &routing.weights[at.clone()]);
            let reference = sorted(&idx[at.clone()], &weight[at]);
            for (o, r) in own.iter().zip(&reference) {
                assert_eq!(o.0, r.0, "{set} layer {i} token {t}: other experts");
                assert!((o.1 - r.1).abs() <= 3e-4 * r.1.abs(), "{set} layer {i} token {t}: {o:?} for {r:?}");
            }
        }
        layers += 1;
    }
    assert!(layers >= 5, "{set}: routing of {layers} layers");
}

fn state_equals(set: &str, golden: &Golden, model: &Model, state: &State) {
    let mut compared = 0;
    for (name, t) in model.export(state).unwrap() {
        let name = match name.strip_prefix("layers.").and_then(|n| n.split_once('.')) {
            Some((layer, "s")) => format!("state.L{layer}.S"),
            Some((layer, "rope")) => format!("state.L{layer}.k_rope"),
            Some((layer, part)) => format!("state.L{layer}.{part}"),
            None => name,
        };
        assert_close(&format!("{set} {name}"), t.host(), &golden.f32(&name), DEEP);
        compared += 1;
    }
    assert_eq!(compared, golden.count("state."));
}

/// A prompt of `n` ids that visits the vocabulary.
fn prompt(n: usize, vocab: usize) -> Vec<u32> {
    let mut x = 12345u64;
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((x >> 33) as usize % vocab) as u32
        })
        .collect()
}

/// Bits of the logits at every position, and of the state at the end.
fn fed_in_chunks(model: &Arc<Model>, ids: &[u32], chunk: usize) -> (Vec<u32>, Vec<u32>) {
    let mut session = Session::new(model.clone()).unwrap();
    let mut bits = Vec::new();
    for part in ids.chunks(chunk) {
        session
            .feed_all(part, &mut Unobserved, &mut |_, row| {
                bits.extend(row.iter().map(|v| v.to_bits()));
                Ok(())
            })
            .unwrap();
    }
    let mut state = Vec::new();
    for (_, t) in model.export(session.state()).unwrap() {
        state.extend(t.host().iter().map(|v| v.to_bits()));
    }
    (bits, state)
}

#[test]
fn c16_any_chunking_gives_the_same_bits() {
    for set in SETS {
        let (model, _) = open_golden(set);
        let ids = prompt(70, model.config().vocab_size);
        let stepwise = fed_in_chunks(&model, &ids, 1);
        for chunk in [7, 16, 64, 70] {
            assert!(
                stepwise == fed_in_chunks(&model, &ids, chunk),
                "{set}: chunks of {chunk} give other bits"
            );
        }
    }
}

#[test]
fn a_long_prompt_gives_the_same_bits_in_any_chunking() {
    let (model, _) = open_golden("base");
    let ids = prompt(1000, model.config().vocab_size);
    let stepwise = fed_in_chunks(&model, &ids, 1);
    for chunk in [16, 64, 1000] {
        assert!(stepwise == fed_in_chunks(&model, &ids, chunk), "chunks of {chunk} give other bits");
    }
}

#[test]
fn threads_and_memory_budget_change_no_bit() {
    let ids = prompt(40, 500);
    let mut all = Vec::new();
    for (threads, budget) in [(1, 1 << 30), (2, 1 << 30), (3, 1 << 30), (2, 0)] {
        // A budget of 0 stands for the least that the model runs in: the trunk streamed, few experts cached.
        let (model, _) = open_model("toggles", threads, budget);
        if budget == 0 {
            assert!(model.placement().streamed > 0 && model.placement().expert_slots < 60);
        }
        all.push(fed_in_chunks(&model, &ids, 16));
    }
    assert!(all.windows(2).all(|w| w[0] == w[1]));
}

#[test]
fn c17_another_continuation_is_recomputed() {
    let (model, _) = open_golden("base");
    let (a, b, c) = (prompt(20, 500), prompt(9, 400), prompt(11, 300));
    let ab = [a.clone(), b].concat();
    let ac = [a, c].concat();
    let mut session = Session::new(model.clone()).unwrap();
    session.sync(&ab, 16, &mut Unobserved, &mut |_| Ok(())).unwrap();
    let synced = session.sync(&ac, 16, &mut Unobserved, &mut |_| Ok(())).unwrap();
    assert!(synced.restarted && synced.reused == 0);
    let mut fresh = Session::new(model).unwrap();
    fresh.sync(&ac, 7, &mut Unobserved, &mut |_| Ok(())).unwrap();
    assert_eq!(session.logits(), fresh.logits());
    assert_eq!(session.tokens(), fresh.tokens());
}
