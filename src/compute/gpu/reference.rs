//! Plain references of the operations in f64, the mirrors of kernels whose sums have a fixed order in f32, and the seeded
//! inputs both are tried on.
//!
//! References take and give `f64`/`f32` slices in the layouts of the operations. They are written for plainness, to be
//! checked by eye against the equations.

use crate::checkpoint::format::{Data, Matrix};
use half::bf16;

/// `n` values in (-1, 1), the same for the same seed on every machine (SplitMix64).
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..n).map(|_| ((next() >> 40) as f32 + 0.5) / (1 << 23) as f32 - 1.0).collect()
}

/// Bytes of a weight in one of its stored forms.
#[derive(Debug, Clone)]
pub enum Stored {
    /// f32
    F32(Vec<u8>),
    /// bf16
    Bf16(Vec<u8>),
    /// Packed codes and scales.
    Mxfp4(Vec<u8>, Vec<u8>),
}

impl Stored {
    /// As the matrix that these bytes are.
    pub fn matrix(&self, rows: usize, cols: usize) -> Matrix<'_> {
        let data = match self {
            Stored::F32(b) => Data::F32(b),
            Stored::Bf16(b) => Data::Bf16(b),
            Stored::Mxfp4(packed, scale) => Data::Mxfp4 { packed, scale },
        };
        Matrix { rows, cols, data }
    }

    /// Values as f32.
    pub fn f32(values: &[f32]) -> Stored {
        Stored::F32(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Values rounded to bf16.
    pub fn bf16(values: &[f32]) -> Stored {
        Stored::Bf16(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect())
    }

    /// Codes and scales from noise: every code occurs, scales 2^-9 to 2^-2.
    pub fn mxfp4(seed: u64, rows: usize, cols: usize) -> Stored {
        let bits = |seed: u64, n: usize| -> Vec<u8> {
            noise(seed, n).iter().map(|v| (v.to_bits() >> 7) as u8 ^ (v.to_bits() >> 15) as u8).collect()
        };
        let scale = bits(seed ^ 0x5CA1E, rows * cols / 32).iter().map(|b| 118 + b % 8).collect();
        Stored::Mxfp4(bits(seed, rows * cols / 2), scale)
    }
}

/// Row-major f64 copy.
pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// All of a weight, widened.
pub fn widen_matrix(w: &Matrix) -> Vec<f32> {
    let mut all = vec![0.0; w.rows * w.cols];
    for (r, row) in all.chunks_exact_mut(w.cols.max(1)).enumerate() {
        w.widen_row(r, row);
    }
    all
}

/// `max|got - want| / max|want|`, NaN when anything is not a number: the goldens' measure.
pub fn worst(got: &[f32], want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::NAN;
    }
    let top = want.iter().fold(0.0f64, |m, v| if v.abs() <= m { m } else { v.abs() });
    let diff = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs());
    let err = diff.fold(0.0f64, |m, d| if d <= m { m } else { d });
    if top == 0.0 { err } else { err / top }
}

/// `1 / (1 + exp(-x))`
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `y[T, rows] = x[T, cols] · Wᵀ`
pub fn matmul(w: &[f32], cols: usize, x: &[f32]) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    x.chunks_exact(cols).flat_map(|row| w.chunks_exact(cols).map(move |wr| dot(wr, row))).collect()
}

/// RMSNorm of rows of `w.len()`.
pub fn rmsnorm(x: &[f64], w: &[f32], eps: f64) -> Vec<f64> {
    let n = w.len();
    let row = |r: &[f64]| -> Vec<f64> {
        let inv = 1.0 / (r.iter().map(|v| v * v).sum::<f64>() / n as f64 + eps).sqrt();
        r.iter().zip(w).map(|(v, w)| v * inv * f64::from(*w)).collect()
    };
    x.chunks_exact(n).flat_map(row).collect()
}

/// L2 norm of rows of `n`, times `scale`.
pub fn l2norm(x: &[f64], n: usize, eps: f64, scale: f64) -> Vec<f64> {
    let row = |r: &[f64]| -> Vec<f64> {
        let inv = scale / (r.iter().map(|v| v * v).sum::<f64>() + eps).sqrt();
        r.iter().map(|v| v * inv).collect()
    };
    x.chunks_exact(n).flat_map(row).collect()
}

/// SiTU-GLU.
pub fn situ_glu(gate: &[f32], up: &[f32], beta: f64, linear_beta: f64) -> Vec<f64> {
    let one = |g: f64, u: f64| beta * (g / beta).tanh() * sigmoid(g) * linear_beta * (u / linear_beta).tanh();
    gate.iter().zip(up).map(|(g, u)| one(f64::from(*g), f64::from(*u))).collect()
}

/// Short convolution with SiLU: outputs, and the inputs to keep.
pub fn short_conv(u: &[f32], history: &[f32], w: &[f32], channels: usize) -> (Vec<f64>, Vec<f32>) {
    let taps = w.len() / channels;
    let all: Vec<f32> = history.iter().chain(u).copied().collect();
    let tokens = u.len() / channels;
    let mut y = Vec::with_capacity(u.len());
    for t in 0..tokens {
        for c in 0..channels {
            let tap = |j: usize| f64::from(w[c * taps + j]) * f64::from(all[(t + j) * channels + c]);
            let s: f64 = (0..taps).map(tap).sum();
            y.push(s * sigmoid(s));
        }
    }
    (y, all[tokens * channels..].to_vec())
}

/// The KDA recurrence; `decay` are factors. Changes `s` `[N, dk, dv]`, gives `o` `[T, N, dv]`.
pub struct Kda<'a> {
    /// N, Dk, Dv.
    pub dims: (usize, usize, usize),
    /// `[T, N, Dk]`
    pub q: &'a [f64],
    /// `[T, N, Dk]`
    pub k: &'a [f64],
    /// `[T, N, Dv]`
    pub v: &'a [f64],
    /// `[T, N, Dk]`
    pub decay: &'a [f64],
    /// `[T, N]`
    pub beta: &'a [f64],
}

impl Kda<'_> {
    /// Runs all tokens.
    pub fn run(&self, s: &mut [f64]) -> Vec<f64> {
        let (heads, dk, dv) = self.dims;
        let mut o = vec![0.0; self.v.len()];
        for th in 0..self.beta.len() {
            let s = &mut s[(th % heads) * dk * dv..][..dk * dv];
            let (q, k) = (&self.q[th * dk..][..dk], &self.k[th * dk..][..dk]);
            for (row, f) in s.chunks_exact_mut(dv).zip(&self.decay[th * dk..][..dk]) {
                row.iter_mut().for_each(|x| *x *= f);
            }
            for c in 0..dv {
                let u: f64 = (0..dk).map(|i| s[i * dv + c] * k[i]).sum();
                let write = self.beta[th] * (self.v[th * dv + c] - u);
                for i in 0..dk {
                    s[i * dv + c] += k[i] * write;
                }
                o[th * dv + c] = (0..dk).map(|i| s[i * dv + c] * q[i]).sum();
            }
        }
        o
    }
}

/// Attention in expanded form: `q` `[T, N, nope+rope]`, `kv_b` `[N, nope+value, R]`, `latent` `[S, R]`, `k_rope` `[S, rope]`.
pub struct Attention<'a> {
    /// N, R, nope, rope, value.
    pub dims: (usize, usize, usize, usize, usize),
    /// Queries.
    pub q: &'a [f32],
    /// Weight.
    pub kv_b: &'a [f32],
    /// Latents.
    pub latent: &'a [f32],
    /// Rope keys.
    pub k_rope: &'a [f32],
    /// Position of token 0.
    pub position: usize,
    /// Factor on the scores.
    pub scale: f64,
}

impl Attention<'_> {
    /// `o` `[T, N, value]`, before any gate.
    pub fn run(&self) -> Vec<f64> {
        let (heads, rank, nope, rope, value) = self.dims;
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let tokens = self.q.len() / (heads * (nope + rope));
        let mut o = Vec::with_capacity(tokens * heads * value);
        for t in 0..tokens {
            for h in 0..heads {
                let q = &self.q[(t * heads + h) * (nope + rope)..][..nope + rope];
                let block = &self.kv_b[h * (nope + value) * rank..][..(nope + value) * rank];
                let seen = self.position + t + 1;
                let score = |s: usize| -> f64 {
                    let lat = &self.latent[s * rank..][..rank];
                    let nope_part: f64 =
                        (0..nope).map(|d| f64::from(q[d]) * dot(&block[d * rank..][..rank], lat)).sum();
                    (nope_part + dot(&q[nope..], &self.k_rope[s * rope..][..rope])) * self.scale
                };
                let scores: Vec<f64> = (0..seen).map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = p.iter().sum();
                for d in 0..value {
                    let row = &block[(nope + d) * rank..][..rank];
                    let v = |s: usize| dot(row, &self.latent[s * rank..][..rank]);
                    o.push((0..seen).map(|s| p[s] / total * v(s)).sum());
                }
            }
        }
        o
    }
}

/// Router: ids in order of choice and their weights, a token.
pub fn route(logits: &[f32], bias: &[f32], chosen: usize, scale: f64) -> Vec<(Vec<u32>, Vec<f64>)> {
    let token = |l: &[f32]| {
        let s: Vec<f64> = l.iter().map(|v| sigmoid(f64::from(*v))).collect();
        let mut order: Vec<usize> = (0..s.len()).collect();
        let key = |i: usize| s[i] + f64::from(bias[i]);
        order.sort_by(|a, b| key(*b).total_cmp(&key(*a)).then(a.cmp(b)));
        order.truncate(chosen);
        let sum: f64 = order.iter().map(|i| s[*i]).sum::<f64>() + 1e-20;
        let weights = order.iter().map(|i| s[*i] / sum * scale).collect();
        (order.iter().map(|i| *i as u32).collect(), weights)
    };
    logits.chunks_exact(bias.len()).map(token).collect()
}

/// Residual mix of `sources` (each `[T, H]`) with the folded weight `w`: output and shares.
pub fn residual_mix(sources: &[&[f64]], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let h = w.len();
    let tokens = sources.first().map_or(0, |s| s.len() / h);
    let (mut out, mut shares) = (Vec::new(), Vec::new());
    for t in 0..tokens {
        let rows: Vec<&[f64]> = sources.iter().map(|s| &s[t * h..][..h]).collect();
        let a: Vec<f64> = rows
            .iter()
            .map(|v| {
                let rms = (v.iter().map(|x| x * x).sum::<f64>() / h as f64 + eps).sqrt();
                v.iter().zip(w).map(|(x, w)| x / rms * w).sum()
            })
            .collect();
        let top = a.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = a.iter().map(|x| (x - top).exp()).collect();
        let total: f64 = e.iter().sum();
        let p: Vec<f64> = e.iter().map(|x| x / total).collect();
        out.extend((0..h).map(|c| rows.iter().zip(&p).map(|(v, p)| p * v[c]).sum::<f64>()));
        shares.extend(p);
    }
    (out, shares)
}

/// The order of sums of `shaders/matvec.wgsl`, multiplying and adding with two roundings.
pub fn mirror_matvec(w: &Matrix, x: &[f32]) -> Vec<f32> {
    let (per, cols) = (units(w), w.cols);
    let codes = unscaled(w);
    let mut out = Vec::with_capacity(w.rows);
    for (r, row) in codes.values.chunks_exact(cols).enumerate() {
        let mut lanes = [0.0f32; 64];
        for (lane, value) in lanes.iter_mut().enumerate() {
            let mut acc = [0.0f32; 4];
            for u in (lane..cols.div_ceil(per)).step_by(64) {
                let scale = codes.scale(r, u);
                let mut sum = if scale.is_some() { [0.0f32; 4] } else { acc };
                for c in u * per..(u + 1) * per {
                    let (wv, xv) = (row.get(c).copied().unwrap_or(0.0), x.get(c).copied().unwrap_or(0.0));
                    sum[c % 4] += wv * xv;
                }
                match scale {
                    Some(s) => acc.iter_mut().zip(sum).for_each(|(a, v)| *a += v * s),
                    None => acc = sum,
                }
            }
            *value = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        }
        out.push(tree(&mut lanes));
    }
    out
}

/// The order of sums of `shaders/matmul.wgsl` for one token.
pub fn mirror_matmul(w: &Matrix, x: &[f32]) -> Vec<f32> {
    let all = widen_matrix(w);
    all.chunks_exact(w.cols).map(|row| row.iter().zip(x).fold(0.0f32, |s, (w, x)| s + w * x)).collect()
}

/// The order of sums of `shaders/rmsnorm.wgsl`.
pub fn mirror_rmsnorm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(w.len()) {
        let mut lanes = [0.0f32; 128];
        for (c, v) in row.iter().enumerate() {
            lanes[c % 128] += v * v;
        }
        let inv = 1.0 / (tree(&mut lanes) / w.len() as f32 + eps).sqrt();
        out.extend(row.iter().zip(w).map(|(v, w)| (v * inv) * w));
    }
    out
}

/// The order of operations of `shaders/kda_step.wgsl`, decay given as factors. Changes `s`.
pub fn mirror_kda(dims: (usize, usize, usize), inputs: [&[f32]; 5], s: &mut [f32]) -> Vec<f32> {
    let (heads, dk, dv) = dims;
    let [q, k, v, decay, beta] = inputs;
    let mut o = vec![0.0f32; v.len()];
    for th in 0..beta.len() {
        let s = &mut s[(th % heads) * dk * dv..][..dk * dv];
        for c in 0..dv {
            let mut u = 0.0f32;
            for i in 0..dk {
                s[i * dv + c] *= decay[th * dk + i];
                u += s[i * dv + c] * k[th * dk + i];
            }
            let write = beta[th] * (v[th * dv + c] - u);
            let mut sum = 0.0f32;
            for i in 0..dk {
                s[i * dv + c] += k[th * dk + i] * write;
                sum += s[i * dv + c] * q[th * dk + i];
            }
            o[th * dv + c] = sum;
        }
    }
    o
}

/// Sum by a tree of halves: element i takes i + n/2, then n/4, … 1.
fn tree(lanes: &mut [f32]) -> f32 {
    let mut half = lanes.len() / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Columns in a 16-byte unit.
fn units(w: &Matrix) -> usize {
    super::matrix::Format::of(w).per_unit()
}

/// Values before their block's scale, and the scales: what the kernels multiply first.
struct Unscaled {
    values: Vec<f32>,
    scales: Vec<f32>,
    per_row: usize,
}

impl Unscaled {
    fn scale(&self, row: usize, unit: usize) -> Option<f32> {
        self.scales.get(row * self.per_row + unit).copied()
    }
}

fn unscaled(w: &Matrix) -> Unscaled {
    match w.data {
        Data::Mxfp4 { packed, scale } => {
            let ones = vec![127u8; scale.len()];
            let plain = Matrix { data: Data::Mxfp4 { packed, scale: &ones }, ..*w };
            let scales = scale.iter().map(|s| crate::checkpoint::format::e8m0(*s)).collect();
            Unscaled { values: widen_matrix(&plain), scales, per_row: w.cols / 32 }
        }
        _ => Unscaled { values: widen_matrix(w), scales: Vec::new(), per_row: 0 },
    }
}
