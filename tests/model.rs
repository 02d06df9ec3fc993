//! The whole network against the reference numbers, and against itself however the tokens are fed.

mod common;

use common::{assert_close, open_golden, open_model};
use std::sync::Arc;
use trunkline::model::session::Session;
use trunkline::model::{Model, Unobserved};

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

#[test]
fn trace_and_state_equal_the_reference() {
    for set in SETS {
        let (model, golden) = open_golden(set);
        common::reference::trace_and_state(set, &model, &golden);
    }
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
