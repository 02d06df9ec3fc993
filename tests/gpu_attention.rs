//! Attention over the latent cache: lengths, splits, chunks, extreme scores.

mod gpu_common;

use gpu_common::*;
use trunkline::compute::gpu::reference::{self as plain, Stored, noise, widen};
use trunkline::compute::gpu::*;

struct Mla {
    shape: MlaShape,
    q: Vec<f32>,
    kv_b: Stored,
    c: Vec<f32>,
    norm: Vec<f32>,
    gate: Vec<f32>,
    tokens: usize,
    position: usize,
}

impl Mla {
    fn new(shape: MlaShape, position: usize, tokens: usize) -> Mla {
        let MlaShape { heads, rank, nope, rope, value } = shape;
        Mla {
            shape,
            q: noise(90, tokens * heads * (nope + rope)),
            kv_b: Stored::bf16(&noise(91, heads * (nope + value) * rank)),
            c: noise(92, (position + tokens) * (rank + rope)),
            norm: noise(93, rank),
            gate: noise(94, tokens * heads * value),
            tokens,
            position,
        }
    }

    fn matrix(&self) -> trunkline::checkpoint::format::Matrix<'_> {
        let MlaShape { heads, rank, nope, value, .. } = self.shape;
        self.kv_b.matrix(heads * (nope + value), rank)
    }

    fn on_gpu(&self, gpu: &Gpu, gated: bool) -> Vec<f32> {
        let MlaShape { heads, nope, value, .. } = self.shape;
        let keys = self.position + self.tokens;
        let mut cache = LatentCache::new(gpu, self.shape, keys).expect("cache");
        cache.reserve(gpu, keys).expect("room");
        let width = self.shape.rank + self.shape.rope;
        let kv_b = GpuMatrix::upload(gpu, &self.matrix(), nope + value, "kv_b").expect("kv_b");
        let q = tensor(gpu, self.tokens, &self.q);
        let (norm, gate) = (tensor(gpu, 1, &self.norm), tensor(gpu, self.tokens, &self.gate));
        let scratch = AttendScratch::new(gpu, self.shape, &cache, self.tokens, keys).expect("scratch");
        let out = room(gpu, self.tokens, heads * value);
        run(gpu, &out, |r| {
            // The past in passes of 700, as a prefill would append it.
            for (i, part) in self.c.chunks(700 * width).enumerate() {
                r.cache_append(&cache, &tensor(gpu, part.len() / width, part), &norm, 1e-6, 700 * i)?;
            }
            let a = MlaAttend {
                q: &q,
                kv_b: &kv_b,
                cache: &cache,
                position: self.position,
                gate: gated.then_some(&gate),
                scale: self.scale() as f32,
            };
            r.mla_attend(&a, &scratch, &out)
        })
    }

    fn scale(&self) -> f64 {
        f64::from(1.0 / ((self.shape.nope + self.shape.rope) as f32).sqrt())
    }

    fn reference(&self, gated: bool) -> Vec<f64> {
        let MlaShape { heads, rank, nope, rope, value } = self.shape;
        let rows = || self.c.chunks_exact(rank + rope);
        let raw: Vec<f64> = rows().flat_map(|r| widen(&r[..rank])).collect();
        let latent: Vec<f32> =
            plain::rmsnorm(&raw, &self.norm, f64::from(1e-6f32)).iter().map(|v| *v as f32).collect();
        let k_rope: Vec<f32> = rows().flat_map(|r| r[rank..].to_vec()).collect();
        let mut o = plain::Attention {
            dims: (heads, rank, nope, rope, value),
            q: &self.q,
            kv_b: &plain::widen_matrix(&self.matrix()),
            latent: &latent,
            k_rope: &k_rope,
            position: self.position,
            scale: self.scale(),
        }
        .run();
        if gated {
            o.iter_mut().zip(&self.gate).for_each(|(o, g)| *o *= plain::sigmoid(f64::from(*g)));
        }
        o
    }
}

const TOY: MlaShape = MlaShape { heads: 6, rank: 24, nope: 16, rope: 8, value: 16 };

#[test]
fn attention_over_splits_and_lengths() {
    // One key; inside a tile; on either side of a split; several splits, of which early tokens do not see the last.
    for (position, tokens) in [(0, 1), (0, 7), (127, 2), (250, 20), (511, 1), (700, 3)] {
        let m = Mla::new(TOY, position, tokens);
        for gated in [false, true] {
            let what = format!("attention at {position} of {tokens}, gate {gated}");
            within(&what, &m.on_gpu(gpu(true), gated), &m.reference(gated), 3e-5);
        }
    }
    let wide = MlaShape { heads: 5, rank: 512, nope: 128, rope: 64, value: 128 };
    let m = Mla::new(wide, 40, 2);
    within("release widths", &m.on_gpu(gpu(false), true), &m.reference(true), 3e-5);
    let odd = MlaShape { heads: 3, rank: 37, nope: 11, rope: 5, value: 13 };
    let m = Mla::new(odd, 300, 4);
    within("odd widths", &m.on_gpu(gpu(true), true), &m.reference(true), 3e-5);
}

/// With narrow bindings the cache has several chunks, the partial results take turns, and the bits stay.
#[test]
fn attention_with_narrow_bindings_gives_the_same_bits() {
    let shape = MlaShape { heads: 8, rank: 250, nope: 24, rope: 8, value: 24 };
    let m = Mla::new(shape, 1500, 40);
    let narrow = narrow();
    let mut cache = LatentCache::new(&narrow, shape, 1540).expect("cache");
    cache.reserve(&narrow, 1540).expect("room");
    assert!(cache.chunk_count() > 1);
    same_bits("narrow", &m.on_gpu(&narrow, true), &m.on_gpu(gpu(false), true));
}

/// C19: scores of ±1e30 neither overflow nor hide a key; a NaN in the cache comes out as one.
#[test]
fn c19_extreme_scores_and_nan() {
    let gpu = gpu(true);
    let mut m = Mla::new(TOY, 20, 2);
    for (i, q) in m.q.iter_mut().enumerate() {
        *q *= if i % 2 == 0 { 1e30 } else { -1e30 };
    }
    let got = m.on_gpu(gpu, false);
    assert!(got.iter().all(|v| v.is_finite()));
    within("huge scores", &got, &m.reference(false), 3e-5);
    let mut m = Mla::new(TOY, 20, 1);
    m.c[5 * (24 + 8) + 24] = f32::NAN;
    let got = m.on_gpu(gpu, false);
    assert!(got.iter().all(|v| v.is_nan()), "a NaN key is seen by every head");
}

#[test]
fn a_cache_is_saved_and_restored() {
    let gpu = narrow();
    let shape = MlaShape { heads: 2, rank: 200, nope: 8, rope: 6, value: 8 };
    let (latents, ropes) = (noise(95, 1500 * 200), noise(96, 1500 * 6));
    let mut cache = LatentCache::new(&gpu, shape, 100).expect("cache");
    assert!(cache.is_empty());
    cache.restore(&gpu, &latents, &ropes).expect("restored");
    assert_eq!(cache.len(), 1500);
    assert!(cache.chunk_count() > 1);
    let (l, r) = cache.download(&gpu).expect("downloaded");
    same_bits("latents", &l, &latents);
    same_bits("rope keys", &r, &ropes);
    cache.set_len(300).expect("shorter");
    let (l, r) = cache.download(&gpu).expect("downloaded");
    same_bits("fewer latents", &l, &latents[..300 * 200]);
    same_bits("fewer rope keys", &r, &ropes[..300 * 6]);
    assert!(cache.restore(&gpu, &latents, &ropes[1..]).is_err() && cache.set_len(10_000).is_err());
}
