//! Byte-level BPE over the released `tiktoken.model`: text to ids and back.
//!
//! Splitting and merging are the `tokenizers` crate's; around it stand what the release adds: long runs are
//! cut before anything else, special spellings are split out before the pattern sees the text, and the bytes
//! of every id are kept so that ids turn back into exactly the bytes they came from.

use std::collections::HashMap;
use std::path::Path;

use rayon::prelude::*;
use serde::Deserialize;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

use super::vocab::{SPECIALS, Specials, TokenBytes, byte_chars, read_ranks, special_names};
use crate::{Error, Result};

/// How the release cuts text into pieces before merging; the order of the alternatives is part of it.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Characters of a window; a cut falls after each.
const WINDOW_CHARS: usize = 400_000;
/// Characters of one class (whitespace or not) in a row; a cut falls after each. It also keeps the
/// pattern's backtracking over whitespace bounded.
const RUN_CHARS: usize = 25_000;

/// Stands in for an id without bytes when ids are decoded leniently: never valid UTF-8, so it becomes
/// exactly one U+FFFD wherever it falls.
const NO_BYTES: &[u8] = &[0xFF];

/// A piece of a prompt, encoded on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The text.
    pub text: String,
    /// Whether special spellings in it are special ids; `false` for anything a user wrote.
    pub special: bool,
}

/// What a `tokenizer.json` says of its added tokens.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    special: bool,
    lstrip: bool,
    rstrip: bool,
    single_word: bool,
}

/// Text to ids and ids to bytes. Immutable once loaded; share it between threads.
pub struct Tokenizer {
    /// Encodes ordinary text only.
    ordinary: tokenizers::Tokenizer,
    bytes: TokenBytes,
    specials: Specials,
    vocab_size: usize,
}

impl Tokenizer {
    /// From the bytes of a `tiktoken.model` and, for the names of the special ids, of a
    /// `tokenizer_config.json`. `vocab_size` is the model configuration's.
    ///
    /// # Errors
    /// `Refused`, with file and line or key: a file that cannot be read as what it is, ranks that are not
    /// 0, 1, 2, … each once, a missing single byte, a `vocab_size` other than the base tokens and 256
    /// specials.
    pub fn from_bytes(
        model: &[u8],
        model_path: &Path,
        config: Option<(&[u8], &Path)>,
        vocab_size: usize,
    ) -> Result<Tokenizer> {
        let mut bytes = read_ranks(model, model_path)?;
        let base = bytes.len();
        if base + SPECIALS != vocab_size {
            return Err(Error::refused("the vocabulary is not the model's")
                .file(model_path)
                .key("vocab_size")
                .expected(
                    format_args!("{vocab_size} ids, as the model's configuration says"),
                    format_args!("{base} tokens and {SPECIALS} specials, {} ids", base + SPECIALS),
                )
                .hint("the tokenizer files and config.json must come from the same release"));
        }
        let names = special_names(base, config)?;
        let ordinary = byte_level_bpe(&bytes).map_err(|e| {
            Error::refused("cannot build the tokenizer from its ranks").file(model_path).cause(e)
        })?;
        let mut by_name = HashMap::with_capacity(names.len());
        for name in names {
            let id = u32::try_from(bytes.len())
                .map_err(|e| Error::refused("the vocabulary is too large").file(model_path).cause(e))?;
            bytes.push(name.as_bytes());
            by_name.insert(name, id);
        }
        Ok(Tokenizer { ordinary, bytes, specials: Specials::new(by_name), vocab_size })
    }

    /// From the bytes of a Hugging Face `tokenizer.json`, for checkpoints without a `tiktoken.model`. Only
    /// byte-level BPE is accepted. Ids may have holes and may stop short of `vocab_size` (embeddings are
    /// often padded); the added tokens marked special are the specials.
    ///
    /// # Errors
    /// `Refused`, with the file: JSON that cannot be read, another kind of model or pre-tokenizer, dropout,
    /// an added prefix space, a special that takes its surroundings along, an id outside `vocab_size`, a
    /// missing single byte.
    pub fn from_json(json: &[u8], path: &Path, vocab_size: usize) -> Result<Tokenizer> {
        let refuse = |what: &str| Error::refused(what).file(path);
        let mut ordinary = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|e| refuse("cannot read the tokenizer").cause(e))?;
        let ModelWrapper::BPE(bpe) = ordinary.get_model() else {
            return Err(refuse("not a tokenizer of this kind").key("model.type").expected("BPE", "another"));
        };
        if let Some(p) = bpe.dropout.filter(|p| *p != 0.0) {
            return Err(refuse("the tokenizer merges at random").key("model.dropout").expected("none", p));
        }
        if !ordinary.get_pre_tokenizer().is_some_and(is_byte_level) {
            return Err(refuse("not a byte-level tokenizer").key("pre_tokenizer").expected(
                "ByteLevel without add_prefix_space, alone or last in a Sequence",
                "something else",
            ));
        }

        // The declared ids count: the crate numbers added tokens on from the vocabulary where that has holes.
        let AddedTokens { added_tokens } = serde_json::from_slice(json)
            .map_err(|e| refuse("cannot read the added tokens").key("added_tokens").cause(e))?;
        let mut added: HashMap<u32, Vec<u8>> = HashMap::new();
        let mut by_name = HashMap::new();
        for token in added_tokens {
            let refuse = |what: &str| refuse(what).key(format!("added_tokens.{}", token.content));
            if token.special && (token.lstrip || token.rstrip || token.single_word) {
                return Err(refuse("a special token takes its surroundings along")
                    .expected("lstrip, rstrip and single_word false", "true"));
            }
            // Specials are found here, the others by the crate.
            let used = if token.special { Some(token.id) } else { ordinary.token_to_id(&token.content) };
            if used != Some(token.id) {
                return Err(refuse("an added token would get another id")
                    .expected(token.id, used.map_or("none".to_owned(), |id| id.to_string())));
            }
            if token.content.is_empty()
                || added.insert(token.id, token.content.clone().into_bytes()).is_some()
            {
                return Err(refuse("an added token is empty or its id is taken")
                    .expected("one spelling an id", format_args!("{:?} for {}", token.content, token.id)));
            }
            if token.special && by_name.insert(token.content.clone(), token.id).is_some() {
                return Err(refuse("a special name stands for two ids").expected("distinct names", token.id));
            }
        }
        let to_byte: HashMap<char, u8> = byte_chars().into_iter().zip(0u8..=255).collect();
        let mut single = [false; 256];
        let mut spelled: Vec<(u32, Vec<u8>)> = Vec::new();
        for (text, id) in ordinary.get_vocab(false) {
            if added.contains_key(&id) {
                continue;
            }
            let bytes: Vec<u8> =
                text.chars().map(|c| to_byte.get(&c).copied()).collect::<Option<_>>().ok_or_else(|| {
                    refuse("a token is not spelled in byte characters")
                        .key("model.vocab")
                        .expected("the 256 characters of a byte-level vocabulary", format_args!("{text:?}"))
                })?;
            if let [b] = bytes.as_slice() {
                single[usize::from(*b)] = true;
            }
            spelled.push((id, bytes));
        }
        if let Some(b) = single.iter().position(|s| !s) {
            return Err(refuse("a single byte has no token")
                .key("model.vocab")
                .expected("all 256 single bytes", format_args!("none for 0x{b:02X}")));
        }
        spelled.extend(added);
        spelled.sort_unstable();
        let mut bytes = TokenBytes::default();
        for (id, token) in spelled {
            let id = usize::try_from(id).ok().filter(|id| *id < vocab_size).ok_or_else(|| {
                refuse("the vocabulary is not the model's")
                    .key("vocab_size")
                    .expected(format_args!("ids below {vocab_size}"), id)
            })?;
            if id < bytes.len() {
                return Err(refuse("two tokens have the same id")
                    .key("model.vocab")
                    .expected("distinct ids", id));
            }
            while bytes.len() < id {
                bytes.push(&[]);
            }
            bytes.push(&token);
        }

        // Specials are found by `encode`, and only when it is asked to; nothing is cut or padded.
        ordinary.set_encode_special_tokens(true);
        ordinary.with_padding(None);
        ordinary.with_truncation(None).map_err(|e| refuse("cannot set up the tokenizer").cause(e))?;
        Ok(Tokenizer { ordinary, bytes, specials: Specials::new(by_name), vocab_size })
    }

    /// The ids of `text`. With `specials` the special spellings in it become special ids; without, they are
    /// text like any other. Nothing is prepended.
    ///
    /// # Errors
    /// `Run` if the text cannot be encoded, which no text is known to cause.
    pub fn encode(&self, text: &str, specials: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encode_into(text, specials, &mut ids)?;
        Ok(ids)
    }

    /// The ids of `segments`, each encoded on its own: no token spans two of them.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for segment in segments {
            self.encode_into(&segment.text, segment.special, &mut ids)?;
        }
        Ok(ids)
    }

    fn encode_into(&self, text: &str, specials: bool, ids: &mut Vec<u32>) -> Result<()> {
        for part in split_runs(text) {
            let mut from = 0;
            while specials && let Some((range, id)) = self.specials.find(part, from) {
                self.encode_ordinary(part.get(from..range.start).unwrap_or_default(), ids)?;
                ids.push(id);
                from = range.end;
            }
            self.encode_ordinary(part.get(from..).unwrap_or_default(), ids)?;
        }
        Ok(())
    }

    fn encode_ordinary(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if !text.is_empty() {
            let encoding = self
                .ordinary
                .encode_fast(text, false)
                .map_err(|e| Error::run("cannot encode a text").cause(e))?;
            ids.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }

    /// The bytes that `id` stands for; a special's are its spelling. `None` for an id that has none.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    /// As [`Tokenizer::token_bytes`], with one invalid byte for an id that has none.
    pub(super) fn lossy_bytes(&self, id: u32) -> &[u8] {
        self.token_bytes(id).unwrap_or(NO_BYTES)
    }

    /// Whether `id` is one of the specials, named or reserved.
    pub fn is_special(&self, id: u32) -> bool {
        self.specials.contains(id)
    }

    /// The id of a special by its spelling.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.specials.id(name)
    }

    /// V: the ids the model can produce, 0..V.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The text of `ids`: their bytes joined, what is not UTF-8 replaced by U+FFFD, and so are ids that the
    /// vocabulary does not have.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.lossy_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// As [`Tokenizer::decode`], for ids that somebody typed.
    ///
    /// # Errors
    /// `Usage` for an id that the vocabulary does not have.
    pub fn try_decode(&self, ids: &[u32]) -> Result<String> {
        match ids.iter().find(|id| self.token_bytes(**id).is_none()) {
            Some(id) => Err(Error::usage("a token id is not in the vocabulary")
                .expected(format_args!("an id below {}", self.vocab_size), id)),
            None => Ok(self.decode(ids)),
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

/// The encoder of ordinary text for tokens whose id is their rank.
///
/// A rank file names no merges: every way to split a token into two tokens is one, and the pair whose
/// result has the lowest rank is merged first, so the merges are listed in the order of the results.
fn byte_level_bpe(bytes: &TokenBytes) -> tokenizers::Result<tokenizers::Tokenizer> {
    let chars = byte_chars();
    let spelled: Vec<String> = (0u32..)
        .map_while(|id| bytes.get(id))
        .map(|token| token.iter().map(|b| chars[usize::from(*b)]).collect())
        .collect();
    let vocab: Vocab = spelled.iter().cloned().zip(0u32..).collect();
    let merges = spelled
        .par_iter()
        .flat_map_iter(|token| {
            let mut splits: Vec<(u32, u32, usize)> = token
                .char_indices()
                .skip(1)
                .filter_map(|(i, _)| {
                    let (left, right) = token.split_at_checked(i)?;
                    Some((*vocab.get(left)?, *vocab.get(right)?, i))
                })
                .collect();
            splits.sort_unstable();
            splits.into_iter().filter_map(|(_, _, i)| {
                let (left, right) = token.split_at_checked(i)?;
                Some((left.to_owned(), right.to_owned()))
            })
        })
        .collect();
    // A piece that is a token is that token, even where its merges would not lead to it.
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true).build()?;
    let pieces =
        Split::new(SplitPattern::Regex(PATTERN.to_owned()), SplitDelimiterBehavior::Isolated, false)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        pieces.into(),
        ByteLevel::new(false, false, false).into(),
    ])));
    Ok(tokenizer)
}

/// Whether text reaches the model as byte characters, unchanged otherwise.
fn is_byte_level(pre: &PreTokenizerWrapper) -> bool {
    match pre {
        PreTokenizerWrapper::ByteLevel(byte_level) => !byte_level.add_prefix_space,
        PreTokenizerWrapper::Sequence(sequence) => {
            matches!(sequence.as_ref().last(), Some(PreTokenizerWrapper::ByteLevel(b)) if !b.add_prefix_space)
        }
        _ => false,
    }
}

/// Cuts text as the release does before it encodes: windows of [`WINDOW_CHARS`], and in a window, runs of
/// one class (whitespace or not) every [`RUN_CHARS`]. The parts join to the text.
fn split_runs(text: &str) -> Vec<&str> {
    // A character is at least a byte, so nothing this short can be cut.
    if text.len() <= RUN_CHARS {
        return vec![text];
    }
    let mut parts = Vec::new();
    let (mut start, mut window, mut run, mut run_is_space) = (0, 0, 0, false);
    for (i, c) in text.char_indices() {
        let space = is_space(c);
        let new_window = window == WINDOW_CHARS;
        if space != run_is_space || new_window {
            run = 0;
            run_is_space = space;
        }
        if new_window || run == RUN_CHARS {
            parts.push(text.get(start..i).unwrap_or_default());
            start = i;
            run = 0;
            if new_window {
                window = 0;
            }
        }
        window += 1;
        run += 1;
    }
    parts.push(text.get(start..).unwrap_or_default());
    parts
}

/// Whitespace as the release counts it: Unicode's and the four information separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Tokenizer>();
    }

    #[test]
    fn cuts_fall_where_the_release_puts_them() {
        let lengths = |text: &str| -> Vec<usize> {
            let parts = split_runs(text);
            assert_eq!(parts.concat(), text);
            parts.iter().map(|p| p.chars().count()).collect()
        };
        assert_eq!(lengths(&"x".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&"x".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&format!("{}{}", "é".repeat(25_001), " ".repeat(25_001))), [25_000, 25_001, 1]);
        // The separators count as whitespace, so they do not end a run of it.
        assert_eq!(lengths(&format!("{}\u{1C}{}y", " ".repeat(20_000), " ".repeat(5_000))), [25_000, 2]);
        // A window cuts without a long run, and the count of a run starts afresh in it.
        assert_eq!(lengths(&"ab ".repeat(150_000)), [400_000, 50_000]);
        let text = format!("{}{}", "a ".repeat(195_000), "b".repeat(36_000));
        assert_eq!(lengths(&text), [400_000, 25_000, 1_000]);
    }
}
