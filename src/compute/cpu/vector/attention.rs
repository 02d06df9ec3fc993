//! The inner loops of KDA and MLA, one head or one group of heads at a time. Callers are parallel over heads.

use super::super::lanes::{Kernel, LANES, Lanes, Tile};
use super::super::simd::Isa;

/// One token of the KDA recurrence for one head, on the state S `[Dk, Dv]` with `Dk = k.len()`,
/// `Dv = v.len()`:
/// ```text
/// S = S · g_exp per row;  u = Sᵀk;  S = S + k ⊗ (beta·(v - u));  o = Sᵀq
/// ```
/// Each column's sums run over the rows in ascending order, one lane a column.
///
/// # Panics
/// If the shapes disagree or the machine lacks `isa`.
#[allow(clippy::too_many_arguments)] // the operands of one equation
pub fn kda_head_step(
    isa: Isa,
    s: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    g_exp: &[f32],
    beta: f32,
    o: &mut [f32],
) {
    let (dk, dv) = (k.len(), v.len());
    assert!(q.len() == dk && g_exp.len() == dk && o.len() == dv && s.len() == dk * dv, "shapes disagree");
    isa.run(KdaStep { s, q, k, v, g_exp, beta, o });
}

struct KdaStep<'a> {
    s: &'a mut [f32],
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    g_exp: &'a [f32],
    beta: f32,
    o: &'a mut [f32],
}

impl Kernel for KdaStep<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        // Four lane groups of 128 rows stay in the first-level cache between the two passes over them.
        const WIDE: usize = 4;
        let dv = self.v.len();
        let mut c = 0;
        while c + WIDE * LANES <= dv {
            self.columns::<L, WIDE>(c, LANES);
            c += WIDE * LANES;
        }
        while c < dv {
            let n = LANES.min(dv - c);
            self.columns::<L, 1>(c, n);
            c += n;
        }
    }
}

impl KdaStep<'_> {
    /// Columns from `c` on: C groups of `n` lanes (`n < 16` only for C = 1).
    #[inline(always)]
    unsafe fn columns<L: Lanes, const C: usize>(&mut self, c: usize, n: usize) {
        let (dk, dv) = (self.k.len(), self.v.len());
        let s = self.s.as_mut_ptr().add(c);
        let mut u = [L::zero(); C];
        for i in 0..dk {
            let (g, k) = (L::splat(self.g_exp[i]), L::splat(self.k[i]));
            for (j, u) in u.iter_mut().enumerate() {
                let decayed = L::mul(L::load_part(s.add(i * dv + j * LANES), n), g);
                *u = L::fma(decayed, k, *u);
            }
        }
        let beta = L::splat(self.beta);
        let mut delta = [L::zero(); C];
        for (j, delta) in delta.iter_mut().enumerate() {
            let v = L::load_part(self.v.as_ptr().add(c + j * LANES), n);
            *delta = L::mul(beta, L::sub(v, u[j]));
        }
        let mut o = [L::zero(); C];
        for i in 0..dk {
            let (g, k, q) = (L::splat(self.g_exp[i]), L::splat(self.k[i]), L::splat(self.q[i]));
            for (j, o) in o.iter_mut().enumerate() {
                let p = s.add(i * dv + j * LANES);
                // The same product as in the first pass, so the state is written once.
                let written = L::fma(k, delta[j], L::mul(L::load_part(p, n), g));
                L::store_part(p, written, n);
                *o = L::fma(written, q, *o);
            }
        }
        for (j, o) in o.into_iter().enumerate() {
            L::store_part(self.o.as_mut_ptr().add(c + j * LANES), o, n);
        }
    }
}

/// Attention scores of N heads of one token against S cached positions, in absorbed form:
/// `scores[h, s] = scale · (q_latent[h]·latent[s] + q_rope[h]·rope[s])`, with q_latent `[N, R]`, q_rope
/// `[N, D]`, latent `[S, R]`, rope `[S, D]` and scores `[N, S]`. Each score has sixteen lanes, walked through
/// the latent and then the rope columns, and summed by halves.
///
/// # Panics
/// If the shapes disagree or the machine lacks `isa`.
#[allow(clippy::too_many_arguments)] // the operands of one equation
pub fn mla_scores(
    isa: Isa,
    heads: usize,
    q_latent: &[f32],
    q_rope: &[f32],
    latent: &[f32],
    rope: &[f32],
    scale: f32,
    scores: &mut [f32],
) {
    let positions = scores.len().checked_div(heads).unwrap_or(0);
    if positions == 0 {
        return;
    }
    let (r, d) = (q_latent.len() / heads, q_rope.len() / heads);
    assert!(q_latent.len() == heads * r && q_rope.len() == heads * d, "queries are not [N, R] and [N, D]");
    assert!(latent.len() == positions * r && rope.len() == positions * d, "caches are not [S, R] and [S, D]");
    assert_eq!(scores.len(), heads * positions, "scores are not [N, S]");
    isa.run(Scores { heads, positions, r, d, q_latent, q_rope, latent, rope, scale, scores });
}

struct Scores<'a> {
    heads: usize,
    positions: usize,
    r: usize,
    d: usize,
    q_latent: &'a [f32],
    q_rope: &'a [f32],
    latent: &'a [f32],
    rope: &'a [f32],
    scale: f32,
    scores: &'a mut [f32],
}

impl Kernel for Scores<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        match L::TILE {
            Tile::Large => self.walk::<L, 4, 4>(),
            Tile::Small => self.walk::<L, 2, 2>(),
        }
    }
}

impl Scores<'_> {
    /// Tiles of H heads and P positions; positions outermost, so that they stay in the first-level cache for
    /// all heads.
    #[inline(always)]
    unsafe fn walk<L: Lanes, const H: usize, const P: usize>(&mut self) {
        let mut s = 0;
        while s + P <= self.positions {
            let mut h = 0;
            while h + H <= self.heads {
                self.tile::<L, H, P>(h, s);
                h += H;
            }
            while h < self.heads {
                self.tile::<L, 1, P>(h, s);
                h += 1;
            }
            s += P;
        }
        while s < self.positions {
            for h in 0..self.heads {
                self.tile::<L, 1, 1>(h, s);
            }
            s += 1;
        }
    }

    /// H heads from `h` on times P positions from `s` on.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const H: usize, const P: usize>(&mut self, h: usize, s: usize) {
        let mut sums = [[L::zero(); P]; H];
        for (q, cache, width) in [(self.q_latent, self.latent, self.r), (self.q_rope, self.rope, self.d)] {
            let (q, cache) = (q.as_ptr().add(h * width), cache.as_ptr().add(s * width));
            let mut c = 0;
            while c < width {
                let n = LANES.min(width - c);
                let mut key = [L::zero(); P];
                for (i, key) in key.iter_mut().enumerate() {
                    *key = L::load_part(cache.add(i * width + c), n);
                }
                for (j, row) in sums.iter_mut().enumerate() {
                    let q = L::load_part(q.add(j * width + c), n);
                    for (sum, key) in row.iter_mut().zip(key) {
                        *sum = L::fma(q, key, *sum);
                    }
                }
                c += n;
            }
        }
        for (j, row) in sums.into_iter().enumerate() {
            for (i, sum) in row.into_iter().enumerate() {
                self.scores[(h + j) * self.positions + s + i] = self.scale * L::sum(sum);
            }
        }
    }
}

/// Positions whose weighted sum is taken on its own before it is added to the total: keeps the error of long
/// sequences small and the block in the second-level cache.
const BLOCK: usize = 64;

/// `out[h] = Σ_s p[h, s] · latent[s]` for N heads of one token, with p `[N, S]`, latent `[S, R]`, out `[N, R]`.
/// Each lane sums blocks of 64 positions from position 0 on, ascending inside and between blocks, so the bits
/// depend on S alone.
///
/// # Panics
/// If the shapes disagree or the machine lacks `isa`.
pub fn mla_weighted_sum(isa: Isa, heads: usize, p: &[f32], latent: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    let positions = p.len().checked_div(heads).unwrap_or(0);
    if positions == 0 {
        return;
    }
    let r = latent.len() / positions;
    assert_eq!(p.len(), heads * positions, "p is not [N, S]");
    assert!(latent.len() == positions * r && out.len() == heads * r, "not latent [S, R] and out [N, R]");
    isa.run(WeightedSum { heads, positions, r, p, latent, out });
}

struct WeightedSum<'a> {
    heads: usize,
    positions: usize,
    r: usize,
    p: &'a [f32],
    latent: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        match L::TILE {
            Tile::Large => self.walk::<L, 4, 4>(),
            Tile::Small => self.walk::<L, 2, 2>(),
        }
    }
}

impl WeightedSum<'_> {
    /// Tiles of H heads and C groups of sixteen columns, block by block of positions.
    #[inline(always)]
    unsafe fn walk<L: Lanes, const H: usize, const C: usize>(&mut self) {
        for s in (0..self.positions).step_by(BLOCK) {
            let mut c = 0;
            while c < self.r {
                let wide = c + C * LANES <= self.r;
                let n = if wide { LANES } else { LANES.min(self.r - c) };
                let mut h = 0;
                while h < self.heads {
                    let full = h + H <= self.heads;
                    match (full, wide) {
                        (true, true) => self.tile::<L, H, C>(h, s, c, n),
                        (true, false) => self.tile::<L, H, 1>(h, s, c, n),
                        (false, true) => self.tile::<L, 1, C>(h, s, c, n),
                        (false, false) => self.tile::<L, 1, 1>(h, s, c, n),
                    }
                    h += if full { H } else { 1 };
                }
                c += if wide { C * LANES } else { n };
            }
        }
    }

    /// Adds the block of positions at `s` for H heads and C groups of `n` columns (`n < 16` only for C = 1).
    #[inline(always)]
    unsafe fn tile<L: Lanes, const H: usize, const C: usize>(
        &mut self,
        h: usize,
        s: usize,
        c: usize,
        n: usize,
    ) {
        let mut sums = [[L::zero(); C]; H];
        for i in s..self.positions.min(s + BLOCK) {
            let mut row = [L::zero(); C];
            for (j, row) in row.iter_mut().enumerate() {
                *row = L::load_part(self.latent.as_ptr().add(i * self.r + c + j * LANES), n);
            }
            for (k, sums) in sums.iter_mut().enumerate() {
                let p = L::splat(self.p[(h + k) * self.positions + i]);
                for (sum, row) in sums.iter_mut().zip(row) {
                    *sum = L::fma(p, row, *sum);
                }
            }
        }
        for (k, sums) in sums.into_iter().enumerate() {
            for (j, sum) in sums.into_iter().enumerate() {
                let out = self.out.as_mut_ptr().add((h + k) * self.r + c + j * LANES);
                L::store_part(out, L::add(L::load_part(out, n), sum), n);
            }
        }
    }
}
