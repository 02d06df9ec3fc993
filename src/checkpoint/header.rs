//! The header of one shard, checked against the file before it is believed.

use super::folder::OpenShard;
use super::names::DType;
use crate::error::{Error, Result};
use crate::memory::read::read_exact_at;
use safetensors::tensor::{Dtype, Metadata};
use sha2::{Digest, Sha256};

/// No header of a shard comes near this; a length above it is noise, not a header.
const MAX_HEADER: u64 = 100_000_000;
/// How a pointer file of Git LFS begins.
const LFS: &[u8] = b"version https://git-lfs";

/// A checked header.
pub struct Header {
    /// Names, types, shapes, offsets.
    pub metadata: Metadata,
    /// Bytes before the data.
    pub data_start: u64,
    /// Digest of length and header.
    pub digest: [u8; 32],
}

/// Types of the text model; `None` for any other.
pub fn dtype(d: Dtype) -> Option<DType> {
    match d {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::U8 => Some(DType::U8),
        Dtype::F8_E8M0 => Some(DType::F8E8M0),
        _ => None,
    }
}

/// Reads the header of `shard`. The file must be exactly as long as the header says.
pub fn read(shard: &OpenShard) -> Result<Header> {
    let refuse = |what: &str| Error::refused(what).file(&shard.path);
    let resume = "download the file again: it is cut short or is not the file it should be";
    let mut start = [0u8; 24];
    let known = usize::try_from(shard.len).unwrap_or(usize::MAX).min(start.len());
    read_exact_at(shard.reader.as_ref(), &shard.path, &mut start[..known], 0)?;
    if start.starts_with(LFS) {
        return Err(refuse("the shard is a Git LFS pointer, not the weights")
            .hint("fetch the large files: git lfs pull, or download the shard itself"));
    }
    if shard.len < 8 {
        return Err(refuse("the shard is too short").expected("at least 8 bytes", shard.len).hint(resume));
    }
    let length =
        u64::from_le_bytes([start[0], start[1], start[2], start[3], start[4], start[5], start[6], start[7]]);
    if length > MAX_HEADER {
        return Err(refuse("the shard's header length is absurd")
            .expected(format_args!("at most {MAX_HEADER} bytes"), length)
            .hint(resume));
    }
    if length > shard.len - 8 {
        return Err(refuse("the shard is shorter than its header")
            .expected(format_args!("at least {} bytes", length + 8), shard.len)
            .hint(resume));
    }
    let size = usize::try_from(length + 8).map_err(|_| refuse("the shard's header is too large"))?;
    let mut bytes = vec![0u8; size];
    read_exact_at(shard.reader.as_ref(), &shard.path, &mut bytes, 0)?;
    let metadata: Metadata = serde_json::from_slice(&bytes[8..])
        .map_err(|e| refuse("the shard's header cannot be read").cause(e).hint(resume))?;
    let end = metadata.data_len() as u64;
    let expected = end.checked_add(length + 8);
    if expected != Some(shard.len) {
        let what = if expected.is_some_and(|e| e > shard.len) {
            "the shard is cut short"
        } else {
            "the shard is longer than its header says"
        };
        return Err(refuse(what)
            .expected(format_args!("{} bytes", expected.unwrap_or(u64::MAX)), shard.len)
            .hint(resume));
    }
    Ok(Header { metadata, data_start: length + 8, digest: Sha256::digest(&bytes).into() })
}
