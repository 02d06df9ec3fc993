//! Session files: the state of a sequence on disk.
//!
//! A safetensors file with the tensors of the state after the last whole step, the fed tokens and the logits of the
//! last position, and in its metadata the format version, the fingerprint of the model, a digest of the tensors and
//! what the writer wants to find again. It is written beside its place and renamed, so that a file of this name is
//! always whole.

use super::Model;
use super::session::Session;
use crate::compute::device::Tensor;
use crate::error::{Error, Result};
use crate::memory::read::read_exact_at;
use crate::report::target;
use safetensors::tensor::{Dtype, TensorView};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

/// Changes when a file of this version could be misread by another.
const VERSION: &str = "1";
/// A header longer than this is not one of ours.
const MAX_HEADER: u64 = 64 << 20;

/// What is stored beside the state, for the run that continues it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Continuation {
    /// Leading tokens that were the prompt.
    pub prompt_tokens: usize,
    /// How the tokens after it were chosen; another choice must not be continued.
    pub sampler: String,
    /// A token that was chosen but not fed yet.
    pub pending: Option<u32>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes `session` to `path`, atomically.
pub fn save(session: &Session, more: &Continuation, path: &Path) -> Result<()> {
    let fail = |what: &str, cause: &dyn std::fmt::Display| {
        Error::new(crate::Kind::Io, format!("cannot {what} the session file")).file(path).cause(cause)
    };
    let exported = session.model().export(session.state())?;
    let tokens = session.tokens();
    let mut views = vec![
        ("tokens".to_string(), Dtype::U32, vec![tokens.len()], bytemuck::cast_slice(tokens)),
        (
            "logits".to_string(),
            Dtype::F32,
            vec![session.logits().len()],
            bytemuck::cast_slice(session.logits()),
        ),
    ];
    for (name, t) in &exported {
        views.push((name.clone(), Dtype::F32, vec![t.rows(), t.cols()], bytemuck::cast_slice(t.host())));
    }
    let mut digest = Sha256::new();
    for (name, _, _, bytes) in &views {
        digest.update(name.as_bytes());
        digest.update(bytes);
    }
    let metadata = HashMap::from([
        ("trunkline.session".to_string(), VERSION.to_string()),
        ("fingerprint".to_string(), hex(&session.model().checkpoint().fingerprint()?)),
        ("digest".to_string(), hex(&digest.finalize())),
        ("prompt_tokens".to_string(), more.prompt_tokens.to_string()),
        ("sampler".to_string(), more.sampler.clone()),
        ("pending".to_string(), more.pending.map_or(String::new(), |p| p.to_string())),
    ]);
    let views = views
        .into_iter()
        .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(dtype, shape, bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .map_err(|e| fail("lay out", &e))?;
    let path = target::resolve(path)?;
    let temporary = target::unfinished(&path, ".trunkline-session-").map_err(|e| fail("create", &e))?;
    safetensors::serialize_to_file(views, Some(metadata), temporary.path()).map_err(|e| fail("write", &e))?;
    temporary.as_file().sync_all().map_err(|e| fail("flush", &e))?;
    temporary.persist(&path).map_err(|e| fail("rename", &e.error))?;
    // The rename itself must survive a power cut.
    File::open(target::folder(&path)).and_then(|f| f.sync_all()).map_err(|e| fail("flush the folder of", &e))
}

/// Reads a session of `model` from `path`. A file of another model, of another version, or one that is damaged is
/// refused.
pub fn load(model: &std::sync::Arc<Model>, path: &Path) -> Result<(Session, Continuation)> {
    let refuse = |what: &str| Error::refused(format!("the session file is refused: {what}")).file(path);
    let file = File::open(path).map_err(|e| Error::io("cannot open the session file", e).file(path))?;
    let size = file.metadata().map_err(|e| Error::io("cannot inspect the session file", e).file(path))?.len();
    if size < 8 {
        return Err(refuse("it is too short").expected("at least 8 bytes", size));
    }
    let mut length = [0u8; 8];
    read_exact_at(&file, path, &mut length, 0)?;
    let header = u64::from_le_bytes(length);
    if header > MAX_HEADER || header > size - 8 {
        return Err(
            refuse("its header does not fit the file").expected(format_args!("at most {}", size - 8), header)
        );
    }
    let mut start = vec![0u8; 8 + header as usize];
    read_exact_at(&file, path, &mut start, 0)?;
    let meta: safetensors::tensor::Metadata =
        serde_json::from_slice(&start[8..]).map_err(|e| refuse("its header cannot be read").cause(e))?;
    let end = (meta.data_len() as u64).saturating_add(8 + header);
    if end != size {
        return Err(
            refuse("it is not as long as its header says").expected(format_args!("{end} bytes"), size)
        );
    }
    let entries = meta.metadata().clone().unwrap_or_default();
    let entry = |key: &str| entries.get(key).map(String::as_str).unwrap_or_default();
    if entry("trunkline.session") != VERSION {
        return Err(refuse("it has another format version")
            .expected(VERSION, format_args!("{:?}", entry("trunkline.session"))));
    }
    let own = hex(&model.checkpoint().fingerprint()?);
    if entry("fingerprint") != own {
        return Err(refuse("it was made with another model")
            .expected(format_args!("fingerprint {own}"), entry("fingerprint"))
            .hint("use the model it was made with, or another --session file"));
    }
    let base = 8 + header;
    let mut digest = Sha256::new();
    // Reads a whole tensor, checking name, dtype and size before a byte is allocated for it.
    let mut read = |name: &str, dtype: Dtype, cols: Option<usize>, out: &mut Vec<u8>| -> Result<usize> {
        let info = meta.info(name).ok_or_else(|| refuse("a tensor is missing").tensor(name))?;
        let rows = match (cols, info.shape.as_slice()) {
            (None, [n]) => *n,
            (Some(c), [r, found]) if *found == c => *r,
            _ => {
                return Err(refuse("a tensor has another shape").tensor(name).expected(
                    cols.map_or("[n]".to_string(), |c| format!("[n, {c}]")),
                    format_args!("{:?}", info.shape),
                ));
            }
        };
        let (from, to) = info.data_offsets;
        let bytes = to.saturating_sub(from);
        if info.dtype != dtype || bytes as u64 > size - base || bytes != 4 * rows * cols.unwrap_or(1) {
            return Err(refuse("a tensor has another type or size").tensor(name));
        }
        out.resize(bytes, 0);
        read_exact_at(&file, path, out, base + from as u64).map_err(|e| e.tensor(name))?;
        digest.update(name.as_bytes());
        digest.update(&*out);
        Ok(rows)
    };
    let mut raw = Vec::new();
    let len = read("tokens", Dtype::U32, None, &mut raw)?;
    let tokens: Vec<u32> = bytemuck::allocation::pod_collect_to_vec(&raw);
    if len > model.context() {
        return Err(Error::usage(format!(
            "the session's {len} positions do not fit the planned context of {}",
            model.context()
        ))
        .file(path)
        .hint(format!("raise --context to more than {len}")));
    }
    read("logits", Dtype::F32, None, &mut raw)?;
    let last: Vec<f32> = bytemuck::allocation::pod_collect_to_vec(&raw);
    if last.len() != model.config().vocab_size && !(last.is_empty() && len == 0) {
        return Err(refuse("its logits have another length").expected(model.config().vocab_size, last.len()));
    }
    let mut state = model.new_state()?;
    model.import(&mut state, len, &mut |name, rows, cols| {
        let found = read(name, Dtype::F32, Some(cols), &mut raw)?;
        if found != rows {
            return Err(refuse("a tensor has another shape").tensor(name).expected(rows, found));
        }
        Ok(Tensor::from_vec(rows, cols, bytemuck::allocation::pod_collect_to_vec(&raw)))
    })?;
    if entry("digest") != hex(&digest.finalize()) {
        return Err(refuse("its contents do not match their digest"));
    }
    let number = |key: &str| {
        entry(key).parse::<usize>().map_err(|e| refuse("its metadata is damaged").key(key).cause(e))
    };
    let more = Continuation {
        prompt_tokens: number("prompt_tokens")?,
        sampler: entry("sampler").to_string(),
        pending: match entry("pending") {
            "" => None,
            _ => Some(number("pending")? as u32),
        },
    };
    if more.prompt_tokens > len {
        // Saved in mid-prefill: the rest of the prompt was still to be fed.
        log::debug!("session saved within its prompt: {len} of {} tokens", more.prompt_tokens);
    }
    Ok((Session::restored(model.clone(), state, tokens, last), more))
}
