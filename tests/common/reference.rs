//! Checks of a model against the reference numbers, whatever device its layers are on.

use super::golden::{Golden, assert_close};
use std::collections::HashMap;
use trunkline::compute::device::Tensor;
use trunkline::compute::ops::moe::Routing;
use trunkline::model::forward::{Logits, Scratch};
use trunkline::model::state::State;
use trunkline::model::{Model, Observer, Point};

/// The gate of trace, state and logits.
pub const DEEP: f64 = 3e-4;

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

/// Every traced tensor, the routing and the state after the traced prompt, within the gates.
pub fn trace_and_state(set: &str, model: &Model, golden: &Golden) {
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
    routing_equals(set, golden, &seen, ids.len());
    state_equals(set, golden, model, &state);
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

/// One attention block of each kind and one mixture of experts, fed in two parts.
pub fn blocks(set: &str, model: &Model, gate: f64) {
    let g = Golden::open(set, "ops.safetensors");
    let h = model.config().hidden_size;
    for (name, point) in
        [("kda_block", Point::AttnOut), ("mla_block", Point::AttnOut), ("moe", Point::FfnOut)]
    {
        let layer = g.ids(&format!("{name}.layer"))[0] as usize;
        let x = g.f32(&format!("{name}.x"));
        let mut state = model.new_state().unwrap();
        let mut scratch = Scratch::default();
        let mut found = Vec::new();
        for part in [&x[..5 * h], &x[5 * h..]] {
            let input = Tensor::from_vec(part.len() / h, h, part.to_vec());
            let out = model.block(layer, point, &input, &mut state, &mut scratch).unwrap();
            found.extend_from_slice(out.host());
        }
        assert_close(&format!("{set} {name}.y"), &found, &g.f32(&format!("{name}.y")), gate);
    }
}
