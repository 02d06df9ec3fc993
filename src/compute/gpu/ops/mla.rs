//! Multi-head latent attention in absorbed form, over a latent cache that lives on the device.

use super::super::buffer::GpuTensor;
use super::super::device::Gpu;
use super::super::matrix::{Format, GpuMatrix};
use super::super::pipelines::kernel;
use super::super::recorder::Recorder;
use super::linear::per_format;
use super::{at_most, want};
use crate::error::{Error, Result};

/// Bounds of the attention kernel's shared memory.
const MAX_RANK: usize = 512;
const MAX_ROPE: usize = 128;
/// Heads that share one reading of the cache.
const HEADS_A_GROUP: usize = 4;
/// Keys of a split while the context has at most [`MAX_SPLITS`] of them; then it doubles.
const SPLIT_KEYS: usize = 256;
const MAX_SPLITS: usize = 64;
/// Keys of a cache chunk at most (fewer for a short context or a low binding limit). It is no less than any split of a
/// context of 2^20, so that the splits, and with them the bits, do not depend on the chunks.
const CHUNK_KEYS: usize = 16 << 10;

/// Splits of the keys that attention over `context` positions works with at most.
pub fn splits(context: usize) -> usize {
    context.div_ceil(SPLIT_KEYS).clamp(1, MAX_SPLITS)
}

/// Positions that a cache planned for `context` has room for: whole chunks.
pub fn planned_rows(context: usize) -> usize {
    let chunk = context.next_power_of_two().clamp(SPLIT_KEYS, CHUNK_KEYS);
    context.max(1).next_multiple_of(chunk)
}

/// Dimensions of an MLA layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaShape {
    /// N
    pub heads: usize,
    /// `kv_lora_rank`
    pub rank: usize,
    /// `qk_nope_head_dim`
    pub nope: usize,
    /// `qk_rope_head_dim`
    pub rope: usize,
    /// `v_head_dim`
    pub value: usize,
}

/// The latents and rope keys of the positions seen, in chunks that are added as the context grows.
#[derive(Debug)]
pub struct LatentCache {
    shape: MlaShape,
    chunk_keys: usize,
    chunks: Vec<(GpuTensor, GpuTensor)>,
    /// Positions that belong to whole steps.
    len: usize,
}

impl LatentCache {
    /// An empty cache, in chunks fit for `context` positions; it may grow past them.
    ///
    /// # Errors
    /// `Machine` when one split of keys exceeds the binding limit, `Run` on dimensions beyond the kernel's.
    pub fn new(gpu: &Gpu, shape: MlaShape, context: usize) -> Result<LatentCache> {
        at_most("kv_lora_rank", MAX_RANK, shape.rank)?;
        at_most("qk_rope_head_dim", MAX_ROPE, shape.rope)?;
        let widest = shape.rank.max(shape.rope).max(1);
        let fit = gpu.binding_limit() as usize / (4 * widest);
        if fit < SPLIT_KEYS {
            return Err(Error::machine("the adapter's binding limit is too low for the latent cache")
                .expected(format_args!("at least {}", 4 * widest * SPLIT_KEYS), gpu.binding_limit()));
        }
        let planned = context.next_power_of_two().clamp(SPLIT_KEYS, CHUNK_KEYS);
        let chunk_keys = planned.min(1 << fit.ilog2());
        Ok(LatentCache { shape, chunk_keys, chunks: Vec::new(), len: 0 })
    }

    /// Dimensions of the layer.
    pub fn shape(&self) -> MlaShape {
        self.shape
    }
    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Bytes held on the device.
    pub fn bytes(&self) -> u64 {
        (self.chunks.len() * self.chunk_keys * 4 * (self.shape.rank + self.shape.rope)) as u64
    }

    /// Makes room for positions below `keys`.
    ///
    /// # Errors
    /// As for any allocation; what was held stays.
    pub fn reserve(&mut self, gpu: &Gpu, keys: usize) -> Result<()> {
        while self.chunks.len() * self.chunk_keys < keys {
            let n = self.chunks.len();
            let latent = GpuTensor::new(gpu, self.chunk_keys, self.shape.rank, &format!("latent cache {n}"))?;
            let rope = GpuTensor::new(gpu, self.chunk_keys, self.shape.rope, &format!("rope cache {n}"))?;
            self.chunks.push((latent, rope));
        }
        Ok(())
    }

    /// Takes positions below `keys` as part of the sequence: called when the step that appended them is whole. A
    /// smaller `keys` forgets the rest.
    ///
    /// # Errors
    /// `Run` when there is no room for that many.
    pub fn set_len(&mut self, keys: usize) -> Result<()> {
        at_most("latent cache positions", self.chunks.len() * self.chunk_keys, keys)?;
        self.len = keys;
        Ok(())
    }

    /// Buffers the positions are split over, of each kind.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// The latents `[len, R]` and rope keys `[len, rope]` held, for saving a session.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn download(&self, gpu: &Gpu) -> Result<(Vec<f32>, Vec<f32>)> {
        let (mut latents, mut ropes) = (Vec::new(), Vec::new());
        for (i, (latent, rope)) in self.chunks.iter().enumerate() {
            let held = self.len.saturating_sub(i * self.chunk_keys).min(self.chunk_keys);
            if held > 0 {
                latents.extend(gpu.download(&latent.first_rows(held)?)?);
                ropes.extend(gpu.download(&rope.first_rows(held)?)?);
            }
        }
        Ok((latents, ropes))
    }

    /// Holds these latents `[len, R]` and rope keys `[len, rope]` instead of what was held.
    ///
    /// # Errors
    /// `Run` when they are of different lengths; as for any allocation.
    pub fn restore(&mut self, gpu: &Gpu, latents: &[f32], ropes: &[f32]) -> Result<()> {
        let MlaShape { rank, rope, .. } = self.shape;
        let keys = latents.len() / rank.max(1);
        want("restored latents", keys * rank, latents.len())?;
        want("restored rope keys", keys * rope, ropes.len())?;
        self.reserve(gpu, keys)?;
        let parts = latents.chunks(self.chunk_keys * rank).zip(ropes.chunks(self.chunk_keys * rope));
        for ((latent, rope), (l, r)) in self.chunks.iter().zip(parts) {
            gpu.write(&latent.region, bytemuck::cast_slice(l))?;
            gpu.write(&rope.region, bytemuck::cast_slice(r))?;
        }
        self.len = keys;
        Ok(())
    }

    /// Keys of a split for a context of `keys`: a power of two that divides a chunk.
    fn split_keys(&self, keys: usize) -> usize {
        let wanted = keys.div_ceil(MAX_SPLITS).next_power_of_two().max(SPLIT_KEYS);
        wanted.min(self.chunk_keys)
    }
}

/// Inputs of attention for a pass of T tokens.
#[derive(Debug)]
pub struct MlaAttend<'a> {
    /// `[T, N·(nope+rope)]`
    pub q: &'a GpuTensor,
    /// `kv_b_proj`, `[N·(nope+value), R]`, uploaded with `row_multiple` = nope + value.
    pub kv_b: &'a GpuMatrix,
    /// The cache, with this pass's tokens appended at `position`.
    pub cache: &'a LatentCache,
    /// Position of the pass's first token: token t sees keys `0..=position+t`.
    pub position: usize,
    /// `[T, N·value]`, before the sigmoid; `None` without an output gate.
    pub gate: Option<&'a GpuTensor>,
    /// Factor on the scores, (nope+rope)^-0.5.
    pub scale: f32,
}

/// Room that attention works in, reused from layer to layer.
#[derive(Debug)]
pub struct AttendScratch {
    q_abs: GpuTensor,
    o_lat: GpuTensor,
    partial: GpuTensor,
    tokens: usize,
}

impl AttendScratch {
    /// Room for passes of `tokens` over a context of `keys`. Where the partial results of a whole pass exceed the binding
    /// limit, the pass's tokens take turns.
    ///
    /// # Errors
    /// As for any allocation.
    pub fn new(
        gpu: &Gpu,
        shape: MlaShape,
        cache: &LatentCache,
        tokens: usize,
        keys: usize,
    ) -> Result<AttendScratch> {
        let splits =
            keys.max(1).div_ceil(cache.split_keys(keys)).max(MAX_SPLITS.min(keys.div_ceil(SPLIT_KEYS)));
        let a_token = shape.heads * splits * (shape.rank + 2);
        let fit = (gpu.binding_limit() as usize / (4 * a_token)).clamp(1, tokens.max(1));
        Ok(AttendScratch {
            q_abs: GpuTensor::new(gpu, tokens, shape.heads * shape.rank, "absorbed queries")?,
            o_lat: GpuTensor::new(gpu, tokens, shape.heads * shape.rank, "latent outputs")?,
            partial: GpuTensor::new(gpu, fit, a_token, "attention splits")?,
            tokens,
        })
    }
}

impl Recorder<'_> {
    /// Writes the pass's latents and rope keys to positions `at..at+T` of `cache`: `c` `[T, R+rope]` is the raw projection;
    /// its first R columns are normed with `w` and `eps`, the rest goes as it is. Room must have been reserved.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree or missing room.
    pub fn cache_append(
        &mut self,
        cache: &LatentCache,
        c: &GpuTensor,
        w: &GpuTensor,
        eps: f32,
        at: usize,
    ) -> Result<()> {
        let MlaShape { rank, rope, .. } = cache.shape;
        want("cache_append: input columns", rank + rope, c.cols)?;
        want("cache_append: weight", rank, w.len())?;
        at_most("cache_append: positions", cache.chunks.len() * cache.chunk_keys, at + c.rows)?;
        let mut row = 0;
        while row < c.rows {
            let position = at + row;
            let (latents, ropes) = &cache.chunks[position / cache.chunk_keys];
            let inside = position % cache.chunk_keys;
            let count = (c.rows - row).min(cache.chunk_keys - inside);
            let parameters = [
                count as u32,
                rank as u32,
                c.cols as u32,
                (row * c.cols) as u32,
                rank as u32,
                (inside * rank) as u32,
                eps.to_bits(),
            ];
            let [gx, gy] = self.gpu().fold(count);
            let bindings = [(1, &c.region), (2, &w.region), (3, &latents.region)];
            self.dispatch(kernel!("rmsnorm": "rmsnorm.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])?;
            self.move_rows(c, (c.cols, row * c.cols + rank), ropes, (rope, inside * rope), count, rope)?;
            row += count;
        }
        Ok(())
    }

    /// Attention of the pass's tokens over the cache, `out` `[T, N·value]`: queries absorbed through the key half of
    /// `kv_b`, softmax over the visible keys split by split, the value half, the gate.
    ///
    /// # Errors
    /// `Run` on shapes that do not agree or scratch for a smaller pass or context.
    pub fn mla_attend(&mut self, a: &MlaAttend, scratch: &AttendScratch, out: &GpuTensor) -> Result<()> {
        let shape = a.cache.shape;
        let MlaShape { heads, rank, nope, rope, value } = shape;
        let tokens = a.q.rows;
        let keys = a.position + tokens;
        want("mla_attend: q columns", heads * (nope + rope), a.q.cols)?;
        want("mla_attend: kv_b rows", heads * (nope + value), a.kv_b.rows)?;
        want("mla_attend: kv_b columns", rank, a.kv_b.cols)?;
        want("mla_attend: output rows", tokens, out.rows)?;
        want("mla_attend: output columns", heads * value, out.cols)?;
        if let Some(gate) = a.gate {
            want("mla_attend: gate", out.len(), gate.len())?;
        }
        at_most("mla_attend: tokens", scratch.tokens, tokens)?;
        at_most("mla_attend: positions", a.cache.chunks.len() * a.cache.chunk_keys, keys)?;
        let split = a.cache.split_keys(keys);
        let splits = keys.div_ceil(split);
        let a_token = heads * splits * (rank + 2);
        at_most("mla_attend: splits", scratch.partial.cols, a_token)?;
        self.absorb(a, &scratch.q_abs)?;
        let turn = (scratch.partial.len() / a_token).min(tokens);
        let mut first = 0;
        while first < tokens {
            let count = turn.min(tokens - first);
            self.attend_turn(a, scratch, first, count, split)?;
            first += count;
        }
        self.mla_output(a, &scratch.o_lat, out)
    }

    fn absorb(&mut self, a: &MlaAttend, q_abs: &GpuTensor) -> Result<()> {
        let MlaShape { heads, rank, nope, rope, value } = a.cache.shape;
        let kernel = per_format!("mla_absorb", a.kv_b.format, "mla_absorb.wgsl");
        for chunk in &a.kv_b.chunks {
            let (first, count) = whole_heads(chunk.first_row, chunk.rows, nope + value)?;
            let parameters = [
                count as u32,
                first as u32,
                heads as u32,
                nope as u32,
                (nope + value) as u32,
                a.kv_b.units as u32,
                rank as u32,
                (nope + rope) as u32,
            ];
            let mut bindings = vec![(1, &chunk.weights), (3, &a.q.region), (4, &q_abs.region)];
            bindings.extend(chunk.scales.as_ref().map(|s| (2, s)));
            let groups = [a.kv_b.units.div_ceil(64) as u32, count as u32, a.q.rows as u32];
            self.dispatch(kernel, &[], &parameters, &bindings, groups)?;
        }
        Ok(())
    }

    /// Attention of tokens `first..first+count`, all that the partial results have room for at once.
    fn attend_turn(
        &mut self,
        a: &MlaAttend,
        scratch: &AttendScratch,
        first: usize,
        count: usize,
        split: usize,
    ) -> Result<()> {
        let MlaShape { heads, rank, rope, nope, .. } = a.cache.shape;
        let keys = a.position + a.q.rows;
        let splits = keys.div_ceil(split);
        for (i, (latents, ropes)) in a.cache.chunks.iter().enumerate() {
            let first_key = i * a.cache.chunk_keys;
            if first_key >= keys {
                break;
            }
            let held = a.cache.chunk_keys.min(keys - first_key);
            let parameters = [
                heads as u32,
                rank as u32,
                rope as u32,
                nope as u32,
                first_key as u32,
                held as u32,
                (a.position + first) as u32,
                split as u32,
                (first_key / split) as u32,
                splits as u32,
                a.scale.to_bits(),
                first as u32,
            ];
            let bindings = [
                (1, &scratch.q_abs.region),
                (2, &a.q.region),
                (3, &latents.region),
                (4, &ropes.region),
                (5, &scratch.partial.region),
            ];
            let groups = [held.div_ceil(split) as u32, heads.div_ceil(HEADS_A_GROUP) as u32, count as u32];
            self.dispatch(kernel!("mla_attend": "mla_attend.wgsl"), &[], &parameters, &bindings, groups)?;
        }
        let rows = count * heads;
        let parameters = [rows as u32, splits as u32, rank as u32, (first * heads) as u32];
        let [gx, gy] = self.gpu().fold(rows);
        let bindings = [(1, &scratch.partial.region), (2, &scratch.o_lat.region)];
        self.dispatch(kernel!("mla_combine": "mla_combine.wgsl"), &[], &parameters, &bindings, [gx, gy, 1])
    }

    fn mla_output(&mut self, a: &MlaAttend, o_lat: &GpuTensor, out: &GpuTensor) -> Result<()> {
        let MlaShape { heads, rank, nope, value, .. } = a.cache.shape;
        let format = a.kv_b.format;
        let kernel = if rank.is_multiple_of(format.per_unit()) {
            per_format!("mla_output", format, "input_vec4.wgsl", "mla_output.wgsl")
        } else {
            per_format!("mla_output", format, "input_scalar.wgsl", "mla_output.wgsl")
        };
        for chunk in &a.kv_b.chunks {
            let (first, count) = whole_heads(chunk.first_row, chunk.rows, nope + value)?;
            let parameters = [
                count as u32,
                first as u32,
                heads as u32,
                value as u32,
                (nope + value) as u32,
                a.kv_b.units as u32,
                rank as u32,
                rank as u32,
                0,
                u32::from(a.gate.is_some()),
            ];
            // Without a gate some readable buffer stands in for it; the kernel does not look.
            let gate = a.gate.map_or(&a.q.region, |g| &g.region);
            let mut bindings = vec![(1, &chunk.weights), (3, &o_lat.region), (4, gate), (5, &out.region)];
            bindings.extend(chunk.scales.as_ref().map(|s| (2, s)));
            let groups = [value.div_ceil(4) as u32, count as u32, a.q.rows as u32];
            self.dispatch(kernel, &[], &parameters, &bindings, groups)?;
        }
        Ok(())
    }
}

/// The heads whose rows a chunk of `kv_b` holds: first and count.
fn whole_heads(first_row: usize, rows: usize, head_rows: usize) -> Result<(usize, usize)> {
    want("kv_b: rows of a split head", 0, first_row % head_rows)?;
    want("kv_b: rows of a split head", 0, rows % head_rows)?;
    Ok((first_row / head_rows, rows / head_rows))
}

#[cfg(test)]
mod tests {
    use super::super::super::device::GpuOptions;
    use super::*;

    /// C19: a row whose every split is masked gives zeros, and one visible split decides alone whatever the masked ones hold.
    #[test]
    fn all_masked_rows_give_zeros() {
        let gpu = Gpu::open(GpuOptions { allow_software: true, ..Default::default() })
            .unwrap_or_else(|e| panic!("{e}; apt-get install -y libvulkan1 mesa-vulkan-drivers"));
        let masked = [-1e38, 0.0, 0.0, 0.0];
        let seen = [-1e30, 2.0, 6.0, -8.0];
        let rows: Vec<f32> = [masked, masked, masked, seen].concat();
        let partial = GpuTensor::from_slice(&gpu, 2, 8, &rows, "partial").expect("partial");
        let out = GpuTensor::new(&gpu, 2, 2, "out").expect("out");
        let mut rec = gpu.record("combine");
        let bindings = [(1, &partial.region), (2, &out.region)];
        let kernel = kernel!("mla_combine": "mla_combine.wgsl");
        rec.dispatch(kernel, &[], &[2, 2, 2, 0], &bindings, [2, 1, 1]).expect("recorded");
        let read = rec.read(&out).expect("read");
        rec.submit().expect("submitted");
        assert_eq!(read.values(&gpu).expect("values"), [0.0, 0.0, 3.0, -4.0]);
    }
}
