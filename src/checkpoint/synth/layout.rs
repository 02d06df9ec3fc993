//! Which tensor lies where, as in the release: each layer in its own shard, its trunk in one run and then each expert in
//! one run; then a shard of what lies outside the layers; then the two of the vision part.

use crate::checkpoint::config::{Config, Ffn};
use crate::checkpoint::names::{
    DType, EMBED, EXPERT_PARTS, Expected, expert_part_shape, expert_tensor_name, model_tensors, trunk_tensors,
};
use crate::checkpoint::released::{projector_tensors, tower_tensors};
use serde_json::json;
use std::ops::Range;

/// Block of the file systems that keep holes.
pub const BLOCK: u64 = 4096;
/// Trunk tensors up to this size are written in full in a sparse checkpoint.
const SMALL: u64 = 256 << 10;
/// Rows of the embedding that a sparse checkpoint has at its start and at its end.
const ROWS: [usize; 2] = [4096, 256];

/// One tensor of a shard.
pub struct Stored {
    /// Name, type and shape.
    pub tensor: Expected,
    /// Place from the start of the shard's data, in bytes.
    pub at: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// One shard.
pub struct Shard {
    /// Tensors in the order of their data.
    pub tensors: Vec<Stored>,
    /// Length field and header.
    pub header: Vec<u8>,
    /// Size of the file.
    pub len: u64,
}

/// The layout of a checkpoint. Shards are worked out one at a time: the release has 497,220 tensors.
pub struct Layout<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// With the tensors of the vision part.
    pub vision: bool,
    /// With holes where the release has large tensors.
    pub sparse: bool,
}

impl Layout<'_> {
    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.config.layers.len() + 1 + if self.vision { 2 } else { 0 }
    }

    /// File name of a shard.
    pub fn file(&self, shard: usize) -> String {
        format!("model-{:05}-of-{:06}.safetensors", shard + 1, self.shards())
    }

    fn expected(&self, shard: usize) -> Vec<Expected> {
        let c = self.config;
        let n = c.layers.len();
        if shard >= n {
            return match shard - n {
                0 => model_tensors(c),
                1 => projector_tensors(c.hidden_size),
                _ => tower_tensors(),
            };
        }
        let mut out = trunk_tensors(c, shard);
        if c.layers[shard].ffn == Ffn::Moe {
            for expert in 0..c.moe.experts {
                out.extend(EXPERT_PARTS.iter().map(|part| Expected {
                    name: expert_tensor_name(shard, expert, *part),
                    dtype: DType::U8,
                    shape: expert_part_shape(c, *part).to_vec(),
                    padded: false,
                }));
            }
        }
        out
    }

    /// Tensors and header of a shard.
    pub fn shard(&self, shard: usize) -> Shard {
        let mut at = 0;
        let mut tensors = Vec::new();
        let mut header = String::from(r#"{"__metadata__":{"format":"pt"}"#);
        for tensor in self.expected(shard) {
            let bytes = tensor.shape.iter().product::<usize>() as u64 * tensor.dtype.size() as u64;
            let info = json!({
                "dtype": tensor.dtype.as_str(), "shape": tensor.shape, "data_offsets": [at, at + bytes],
            });
            header.push_str(&format!(",{}:{info}", json!(tensor.name)));
            tensors.push(Stored { tensor, at, bytes });
            at += bytes;
        }
        header.push('}');
        // The format keeps the data on a multiple of 8 bytes.
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.into_bytes());
        let len = bytes.len() as u64 + at;
        Shard { tensors, header: bytes, len }
    }

    /// Byte ranges of a tensor that are written, in order; the rest is a hole. `data_start` is where the data begins in
    /// the file.
    pub fn written(&self, t: &Stored, data_start: u64) -> Vec<Range<u64>> {
        let whole = std::iter::once(0..t.bytes).collect();
        if !self.sparse {
            return whole;
        }
        let name = &t.tensor.name;
        let row = t.bytes / t.tensor.shape.first().map_or(1, |rows| (*rows).max(1) as u64);
        if name == EMBED {
            let first = (ROWS[0] as u64 * row).min(t.bytes);
            let last = t.bytes.saturating_sub(ROWS[1] as u64 * row).max(first);
            return vec![0..first, last..t.bytes];
        }
        if name.ends_with("block_sparse_moe.gate.weight") && t.bytes > SMALL {
            return router_blocks(t, row, data_start);
        }
        let trunk = !name.contains(".experts.") && !name.starts_with("vision_tower.");
        if trunk && t.bytes <= SMALL { whole } else { Vec::new() }
    }
}

/// Of a router as large as the release's, the blocks in which an odd row begins: an expert's weights are some of its first or
/// of its last ones, so that tokens choose scattered experts, in a seventh of the space.
fn router_blocks(t: &Stored, row: u64, data_start: u64) -> Vec<Range<u64>> {
    let start = data_start + t.at;
    let rows = t.bytes / row.max(1);
    let mut out: Vec<Range<u64>> = Vec::new();
    for odd in (1..rows).step_by(2) {
        let block = (start + odd * row) / BLOCK * BLOCK;
        // Of a value that crosses the border of a block the writer would need the other part.
        let from = block.saturating_sub(start).next_multiple_of(4);
        let to = ((block + BLOCK).saturating_sub(start) / 4 * 4).min(t.bytes);
        if out.last().is_none_or(|last| last.end <= from) && from < to {
            out.push(from..to);
        }
    }
    out
}
