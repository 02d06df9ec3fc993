//! Sessions: saved, restored, refused, and the state after an interruption.

mod common;

use common::{golden_dir, open_golden, open_model};
use std::sync::atomic::Ordering;
use trunkline::Kind;
use trunkline::compute::device::Tensor;
use trunkline::model::session::Session;
use trunkline::model::session_file::{self, Continuation};
use trunkline::model::{Observer, Point, Unobserved};

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 490).collect()
}

fn greedy(session: &mut Session, n: usize) -> Vec<u32> {
    let mut out = Vec::new();
    for _ in 0..n {
        let best = session.logits().iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        let id = best.unwrap().0 as u32;
        out.push(id);
        session.step(id, &mut Unobserved).unwrap();
    }
    out
}

#[test]
fn a_restored_session_goes_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.session");
    let (model, _) = open_golden("base");
    let mut session = Session::new(model.clone()).unwrap();
    session.sync(&ids(23), 8, &mut Unobserved, &mut |_| Ok(())).unwrap();
    let more = Continuation { prompt_tokens: 20, sampler: "greedy \"1\"".into(), pending: Some(7) };
    session_file::save(&session, &more, &path).unwrap();
    let (mut restored, found) = session_file::load(&model, &path).unwrap();
    assert_eq!(found, more);
    assert_eq!(restored.tokens(), session.tokens());
    assert_eq!(restored.logits(), session.logits());
    assert_eq!(greedy(&mut restored, 12), greedy(&mut session, 12));
    assert_eq!(restored.logits(), session.logits());
    // Other threads and budgets are the same model.
    let (other, _) = open_model("base", 1, 0);
    assert_eq!(session_file::load(&other, &path).unwrap().0.tokens().len(), 23);
}

#[test]
fn c17_a_restored_session_with_another_continuation_is_recomputed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.session");
    let (model, _) = open_golden("toggles");
    let mut session = Session::new(model.clone()).unwrap();
    session.sync(&ids(23), 8, &mut Unobserved, &mut |_| Ok(())).unwrap();
    session_file::save(&session, &Continuation::default(), &path).unwrap();
    let (mut restored, _) = session_file::load(&model, &path).unwrap();
    let mut other = ids(15);
    other.extend([3, 1, 4, 1, 5]);
    assert!(restored.sync(&other, 8, &mut Unobserved, &mut |_| Ok(())).unwrap().restarted);
    let mut fresh = Session::new(model).unwrap();
    fresh.sync(&other, 3, &mut Unobserved, &mut |_| Ok(())).unwrap();
    assert_eq!(restored.logits(), fresh.logits());
}

#[test]
fn damaged_and_foreign_session_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.session");
    let (model, _) = open_golden("base");
    let mut session = Session::new(model.clone()).unwrap();
    session.sync(&ids(5), 8, &mut Unobserved, &mut |_| Ok(())).unwrap();
    session_file::save(&session, &Continuation::default(), &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&path, bytes).unwrap();
        let e = session_file::load(&model, &path).err().unwrap_or_else(|| panic!("{what} was accepted"));
        assert_eq!(e.kind(), Kind::Refused, "{what}: {e}");
        assert!(e.to_string().contains("s.session"), "{what}: {e}");
    };
    for cut in [0, 4, 8, 100, whole.len() - 1] {
        refused(&whole[..cut], &format!("a file cut to {cut} bytes"));
    }
    for at in [whole.len() - 1, whole.len() - 4000, whole.len() / 2] {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        refused(&flipped, &format!("a file with a bit flipped at {at}"));
    }
    refused(&[0xff; 64], "noise");
    refused(&std::fs::read(golden_dir("base").join("ops.safetensors")).unwrap(), "another safetensors file");
    std::fs::write(&path, &whole).unwrap();
    let (foreign, _) = open_golden("toggles");
    let e = session_file::load(&foreign, &path).err().map(|e| (e.kind(), e.to_string()));
    assert!(e.is_some_and(|(k, t)| k == Kind::Refused && t.contains("another model")));
}

/// Asks to stop when a layer's attention is done, as Ctrl-C in the middle of a step does.
struct StopAt<'a> {
    layer: usize,
    model: &'a trunkline::model::Model,
}

impl Observer for StopAt<'_> {
    fn wants_tensors(&self) -> bool {
        true
    }
    fn tensor(&mut self, point: Point, i: usize, _values: &Tensor) {
        if point == Point::AttnOut && i == self.layer {
            self.model.cancel_flag().store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn an_interrupted_step_leaves_the_last_whole_one() {
    let (reference, _) = open_golden("base");
    let mut unbroken = Session::new(reference).unwrap();
    unbroken.sync(&ids(19), 8, &mut Unobserved, &mut |_| Ok(())).unwrap();
    let expected = greedy(&mut unbroken, 10);

    let (model, _) = open_model("base", 2, 1 << 30);
    for layer in [0, 4, 7] {
        let mut session = Session::new(model.clone()).unwrap();
        session.sync(&ids(19), 8, &mut Unobserved, &mut |_| Ok(())).unwrap();
        let mut found = greedy(&mut session, 4);
        let before = session.logits().to_vec();
        let e = session.step(expected[4], &mut StopAt { layer, model: &model }).err().map(|e| e.kind());
        assert_eq!(e, Some(Kind::Interrupted), "layer {layer}");
        model.cancel_flag().store(false, Ordering::Relaxed);
        assert_eq!(session.tokens().len(), 23);
        assert_eq!(session.logits(), before);
        found.extend(greedy(&mut session, 6));
        assert_eq!(found, expected, "layer {layer}");
        assert_eq!(session.logits(), unbroken.logits());
    }
}

#[test]
fn a_full_context_is_an_error_that_keeps_the_state() {
    let (model, _) = open_golden("base");
    let mut session = Session::new(model.clone()).unwrap();
    let long = vec![1; model.context() + 1];
    let e = session.sync(&long, model.context(), &mut Unobserved, &mut |_| Ok(())).err();
    assert!(e.is_some_and(|e| e.kind() == Kind::Usage && e.to_string().contains("context")));
    assert_eq!(session.tokens().len(), model.context());
}
