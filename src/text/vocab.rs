//! What a tokenizer knows before it encodes anything: the bytes of every id and the special spellings.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::{Error, Result};

/// How many special ids follow the base vocabulary, named or not.
pub(super) const SPECIALS: usize = 256;

/// The bytes of each id, back to back. An id without bytes (a hole) has an empty range.
#[derive(Debug, Default)]
pub(super) struct TokenBytes {
    blob: Vec<u8>,
    /// `ends[id]` closes the range of `id`, which opens where the id before it ends.
    ends: Vec<usize>,
}

impl TokenBytes {
    /// Appends the next id.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.blob.extend_from_slice(bytes);
        self.ends.push(self.blob.len());
    }

    /// Ids so far, holes included.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of `id`, `None` beyond the vocabulary and for a hole.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { *self.ends.get(id - 1)? };
        self.blob.get(start..end).filter(|b| !b.is_empty())
    }
}

/// Reads a `tiktoken.model`: one `base64(bytes) rank` a line, every rank from 0 up exactly once, in any
/// order. Blank lines are ignored. The id of a token is its rank.
///
/// # Errors
/// `Refused`, with the line: a line that is not two fields, base64 or a rank that cannot be read, an empty
/// token, a rank or a token given twice, a rank left out, one of the 256 single bytes left out.
pub(super) fn read_ranks(model: &[u8], path: &Path) -> Result<TokenBytes> {
    let refuse = |line: usize, what: &str| Error::refused(format!("line {line}: {what}")).file(path);
    let mut blob: Vec<u8> = Vec::with_capacity(model.len() / 2);
    // One entry a token: rank, line, range in `blob`.
    let mut tokens: Vec<(usize, usize, std::ops::Range<usize>)> = Vec::with_capacity(model.len() / 16);
    for (i, raw) in model.split(|&b| b == b'\n').enumerate() {
        let (n, text) = (i + 1, raw.strip_suffix(b"\r").unwrap_or(raw));
        if text.is_empty() {
            continue;
        }
        let shown = || format!("`{}`", String::from_utf8_lossy(text.get(..80).unwrap_or(text)));
        let mut fields = text.split(|&b| b == b' ');
        let (Some(encoded), Some(rank), None) = (fields.next(), fields.next(), fields.next()) else {
            return Err(
                refuse(n, "not a line of a rank file").expected("`base64 rank` with one space", shown())
            );
        };
        let start = blob.len();
        STANDARD.decode_vec(encoded, &mut blob).map_err(|e| {
            refuse(n, "the token is not base64")
                .expected("padded base64", shown())
                .hint(format!("the decoder says: {e}; the file may be damaged, fetch it again"))
        })?;
        if blob.len() == start {
            return Err(refuse(n, "the token is empty").expected("at least one byte", shown()));
        }
        let rank = std::str::from_utf8(rank)
            .ok()
            .filter(|r| r.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|r| r.parse::<u32>().ok())
            .and_then(|r| usize::try_from(r).ok())
            .ok_or_else(|| refuse(n, "the rank cannot be read").expected("a decimal number", shown()))?;
        tokens.push((rank, n, start..blob.len()));
    }

    // `by_rank[rank]` is the index in `tokens`.
    let count = tokens.len();
    let mut by_rank = vec![usize::MAX; count];
    for (i, (rank, line, _)) in tokens.iter().enumerate() {
        // A rank past the end leaves some earlier one out, which is reported below.
        let Some(slot) = by_rank.get_mut(*rank) else { continue };
        if let Some((_, first, _)) = tokens.get(*slot) {
            return Err(refuse(*line, "a rank is given twice").expected(
                format_args!("each of 0..{count} once"),
                format_args!("{rank} again, first on line {first}"),
            ));
        }
        *slot = i;
    }
    let mut out = TokenBytes::default();
    let mut seen: HashMap<&[u8], usize> = HashMap::with_capacity(count);
    let mut single = [false; 256];
    for (rank, &i) in by_rank.iter().enumerate() {
        let Some((_, line, range)) = tokens.get(i) else {
            let last = tokens.iter().map(|t| t.0).max().unwrap_or(0);
            return Err(Error::refused(format!("rank {rank} is missing")).file(path).expected(
                format_args!("each of 0..{count} once, {count} lines having a token"),
                format_args!("ranks up to {last}"),
            ));
        };
        let bytes = blob.get(range.clone()).unwrap_or_default();
        if let Some(first) = seen.insert(bytes, *line) {
            return Err(refuse(*line, "a token is given twice")
                .expected("distinct tokens", format_args!("the bytes of line {first} again")));
        }
        if let [b] = bytes {
            single[usize::from(*b)] = true;
        }
        out.push(bytes);
    }
    if let Some(b) = single.iter().position(|s| !s) {
        return Err(Error::refused("a single byte has no token")
            .file(path)
            .expected("all 256 single bytes", format_args!("none for 0x{b:02X} in {count} tokens")));
    }
    Ok(out)
}

/// The special ids and their spellings, and how to find them in text.
#[derive(Debug)]
pub(super) struct Specials {
    by_name: HashMap<String, u32>,
    /// `true` where the spelling of some special starts with this byte.
    first: [bool; 256],
    /// Distinct lengths of the spellings, longest first.
    lengths: Vec<usize>,
    ids: std::collections::HashSet<u32>,
}

impl Specials {
    /// From spellings that are distinct and not empty.
    pub(super) fn new(by_name: HashMap<String, u32>) -> Specials {
        let mut first = [false; 256];
        let mut lengths: Vec<usize> = by_name.keys().map(String::len).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        for b in by_name.keys().filter_map(|name| name.as_bytes().first()) {
            first[usize::from(*b)] = true;
        }
        let ids = by_name.values().copied().collect();
        Specials { by_name, first, lengths, ids }
    }

    /// The id of a spelling.
    pub(super) fn id(&self, name: &str) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    /// Whether `id` is special.
    pub(super) fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// The first special spelling at or after byte `from`, the longest if several start there:
    /// its byte range in `text` and its id.
    pub(super) fn find(&self, text: &str, from: usize) -> Option<(std::ops::Range<usize>, u32)> {
        let rest = text.as_bytes().get(from..)?;
        rest.iter().enumerate().filter(|(_, b)| self.first[usize::from(**b)]).find_map(|(i, _)| {
            let start = from + i;
            self.lengths.iter().find_map(|len| {
                let range = start..start + len;
                Some((range.clone(), self.id(text.get(range)?)?))
            })
        })
    }
}

#[derive(Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    added_tokens_decoder: BTreeMap<String, AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

/// The spellings of the [`SPECIALS`] ids from `base` up: the names of `tokenizer_config.json` where it has
/// one, else `<|reserved_token_{id}|>` by absolute id.
///
/// # Errors
/// `Refused`, with the key: JSON that cannot be read, an id outside the special range, an empty name or one
/// given twice.
pub(super) fn special_names(base: usize, config: Option<(&[u8], &Path)>) -> Result<Vec<String>> {
    let mut names: Vec<Option<String>> = vec![None; SPECIALS];
    if let Some((json, path)) = config {
        let parsed: TokenizerConfig = serde_json::from_slice(json)
            .map_err(|e| Error::refused("cannot read the tokenizer configuration").file(path).cause(e))?;
        for (key, token) in parsed.added_tokens_decoder {
            let refuse = |what| Error::refused(what).file(path).key(format!("added_tokens_decoder.{key}"));
            let slot = key
                .parse::<usize>()
                .ok()
                .and_then(|id| id.checked_sub(base))
                .and_then(|offset| names.get_mut(offset))
                .ok_or_else(|| {
                    refuse("a special token has an id that no special can have")
                        .expected(format_args!("{base}..{}", base + SPECIALS), &key)
                })?;
            if token.content.is_empty() {
                return Err(refuse("a special token has an empty name").expected("a spelling", "\"\""));
            }
            if slot.replace(token.content).is_some() {
                return Err(refuse("a special id is named twice").expected("one name an id", &key));
            }
        }
    }
    let names: Vec<String> = names
        .into_iter()
        .enumerate()
        .map(|(i, name)| name.unwrap_or_else(|| format!("<|reserved_token_{}|>", base + i)))
        .collect();
    let mut seen = HashMap::with_capacity(SPECIALS);
    for (i, name) in names.iter().enumerate() {
        if let Some(first) = seen.insert(name.as_str(), i) {
            let e = Error::refused("a special name stands for two ids")
                .key(format!("added_tokens_decoder.{}", base + i))
                .expected("distinct names", format_args!("{name:?} for {} too", base + first));
            return Err(match config {
                Some((_, path)) => e.file(path),
                None => e,
            });
        }
    }
    Ok(names)
}

/// The printable character that stands for each byte in a byte-level vocabulary: bytes that print stand for
/// themselves, the other 68 are numbered up from U+0100 in byte order.
pub(super) fn byte_chars() -> [char; 256] {
    let mut out = ['\0'; 256];
    let mut next = 0x100u32;
    for (byte, slot) in (0u8..=255).zip(out.iter_mut()) {
        *slot = match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                let c = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
                next += 1;
                c
            }
        };
    }
    out
}
