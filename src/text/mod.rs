//! Text to ids, logits to ids, ids to text.
