//! A sequence being extended: what was fed, the state after it, and the logits of its last position.

use super::forward::{Logits, Scratch};
use super::state::State;
use super::{Model, Observer};
use crate::error::{Error, Result};
use std::sync::Arc;

/// What [`Session::sync`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Synced {
    /// Leading tokens whose state was at hand.
    pub reused: usize,
    /// Tokens fed.
    pub fed: usize,
    /// Whether an earlier state had to be dropped because it belongs to other tokens.
    pub restarted: bool,
}

/// One sequence over a model.
pub struct Session {
    model: Arc<Model>,
    state: State,
    scratch: Scratch,
    tokens: Vec<u32>,
    last: Vec<f32>,
}

impl Session {
    /// A sequence without tokens, with room for the model's planned context.
    pub fn new(model: Arc<Model>) -> Result<Session> {
        let state = model.new_state()?;
        Ok(Session { state, scratch: Scratch::default(), tokens: Vec::new(), last: Vec::new(), model })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
    /// Every token fed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
    /// Logits of the last position `[V]`; empty before the first token.
    pub fn logits(&self) -> &[f32] {
        &self.last
    }
    /// The state after [`Session::tokens`].
    pub fn state(&self) -> &State {
        &self.state
    }

    /// A sequence whose state was read from a file.
    pub(super) fn restored(model: Arc<Model>, state: State, tokens: Vec<u32>, last: Vec<f32>) -> Session {
        Session { model, state, scratch: Scratch::default(), tokens, last }
    }

    /// Makes the sequence equal to `ids`: feeds what is missing in chunks of `chunk` tokens, and calls `after_chunk`
    /// after each. A sequence that is no prefix of `ids` is recomputed from the start, since a recurrent state cannot
    /// be rewound.
    pub fn sync(
        &mut self,
        ids: &[u32],
        chunk: usize,
        seen: &mut dyn Observer,
        after_chunk: &mut dyn FnMut(&Session) -> Result<()>,
    ) -> Result<Synced> {
        if ids.is_empty() {
            return Err(Error::usage("the prompt has no tokens"));
        }
        let restarted = !ids.starts_with(&self.tokens);
        if restarted {
            // The old state goes first: there may not be room for two.
            self.state = State::default();
            self.state = self.model.new_state()?;
            self.tokens.clear();
            self.last.clear();
        }
        let reused = self.tokens.len();
        while self.tokens.len() < ids.len() {
            let rest = &ids[self.tokens.len()..];
            let part = &rest[..rest.len().min(chunk.max(1)).min(self.model.most_tokens())];
            self.feed(part, seen)?;
            after_chunk(self)?;
        }
        Ok(Synced { reused, fed: ids.len() - reused, restarted })
    }

    /// Feeds one token and returns the logits after it `[V]`.
    pub fn step(&mut self, id: u32, seen: &mut dyn Observer) -> Result<&[f32]> {
        self.feed(&[id], seen)?;
        Ok(&self.last)
    }

    /// Feeds `ids` and hands the logits of every position to `each` as `(position, [V])`.
    pub fn feed_all(
        &mut self,
        ids: &[u32],
        seen: &mut dyn Observer,
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        for part in ids.chunks(self.model.most_tokens()) {
            let first = self.tokens.len();
            let logits = self.model.forward(&mut self.state, &mut self.scratch, part, Logits::All, seen)?;
            self.tokens.extend_from_slice(part);
            self.last.clear();
            self.last.extend_from_slice(logits.row(part.len() - 1));
            for t in 0..part.len() {
                each(first + t, logits.row(t))?;
            }
        }
        Ok(())
    }

    /// Every chunk ends with its logits, so that a session saved between chunks can go on from any of them.
    fn feed(&mut self, ids: &[u32], seen: &mut dyn Observer) -> Result<()> {
        let logits = self.model.forward(&mut self.state, &mut self.scratch, ids, Logits::Last, seen)?;
        self.tokens.extend_from_slice(ids);
        self.last.clear();
        self.last.extend_from_slice(logits.row(0));
        Ok(())
    }
}
