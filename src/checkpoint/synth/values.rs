//! Values of synthetic tensors: each a function of the seed, the tensor's name and the value's position alone, so that
//! neither threads nor the order of writing change a byte.

use crate::checkpoint::config::Config;
use crate::checkpoint::format::MXFP4_GROUP;
use crate::checkpoint::names::{DType, EMBED, EXPERT_PARTS, Expected, Name, classify};
use half::bf16;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use sha2::{Digest, Sha256};

/// Values that a sum of four random bytes can have.
const SUMS: usize = 4 * 255 + 1;
/// Standard deviation of that sum.
const SUM_STD: f64 = 147.8;
/// Root mean square of the sixteen E2M1 values.
const E2M1_RMS: f64 = 2.926;
/// Scales of the release lie between these.
const SCALES: std::ops::RangeInclusive<u8> = 0x70..=0x7a;

/// How a tensor is filled.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fill {
    /// About normal.
    Normal { mean: f64, std: f64 },
    /// `ln U(1,16)` for the first values, then zeros: `A_log` and its padding.
    LogDecay { heads: usize },
    /// Uniform codes.
    Codes,
    /// Scale bytes within one of `middle`.
    Scales { middle: u8 },
}

/// Means and deviations keep every activation near one, so that no softmax, gate or router saturates.
fn fill(c: &Config, t: &Expected) -> Fill {
    if let Name::Expert { part, .. } = classify(&t.name) {
        if !EXPERT_PARTS[part].is_scale() {
            return Fill::Codes;
        }
        let columns = t.shape.last().map_or(1, |groups| groups * MXFP4_GROUP);
        let exponent = -((columns as f64).sqrt() * E2M1_RMS).log2();
        // Saturates: far below 0x70 for very wide experts.
        let middle = (127.0 + exponent.round()) as u8;
        return Fill::Scales { middle: middle.clamp(SCALES.start() + 1, SCALES.end() - 1) };
    }
    let columns = t.shape.last().copied().unwrap_or(1).max(1) as f64;
    let centred = |std: f64| Fill::Normal { mean: 0.0, std };
    if t.name.ends_with("A_log") {
        return Fill::LogDecay { heads: c.kda.heads };
    }
    if t.name.ends_with("dt_bias") {
        return Fill::Normal { mean: -0.5, std: 0.25 };
    }
    if t.name.ends_with("e_score_correction_bias") {
        return centred(0.02);
    }
    if t.name.ends_with("res_proj.weight") {
        return centred(0.5 / columns.sqrt());
    }
    if t.name.ends_with("norm.weight") || t.name.contains(".norm") {
        return Fill::Normal { mean: 1.0, std: 0.1 };
    }
    if t.name == EMBED {
        return centred(1.0);
    }
    centred(1.0 / columns.sqrt())
}

/// The values of one tensor.
pub struct Values {
    fill: Fill,
    dtype: DType,
    key: [u8; 32],
    /// Value by sum of four bytes.
    table: Vec<f32>,
}

impl Values {
    /// Values of tensor `t` of a checkpoint with `seed`.
    pub fn new(c: &Config, t: &Expected, seed: u64) -> Values {
        let mut digest = Sha256::new();
        digest.update(seed.to_le_bytes());
        digest.update(t.name.as_bytes());
        let fill = fill(c, t);
        let table = match fill {
            Fill::Normal { mean, std } => (0..SUMS)
                .map(|sum| (mean + std * (sum as f64 - (SUMS - 1) as f64 / 2.0) / SUM_STD) as f32)
                .collect(),
            _ => Vec::new(),
        };
        Values { fill, dtype: t.dtype, key: digest.finalize().into(), table }
    }

    /// Bytes `from..from + out.len()` of the tensor; `scratch` is kept between calls for its memory. `from` lies on a
    /// whole value, and on a multiple of 4 where values are bytes.
    pub fn write(&self, from: u64, out: &mut [u8], scratch: &mut Vec<u8>) {
        let mut rng = ChaCha8Rng::from_seed(self.key);
        let size = self.dtype.size() as u64;
        let (bytes_per_value, word) = match self.fill {
            Fill::Codes | Fill::Scales { .. } => (1, from / 4),
            Fill::Normal { .. } | Fill::LogDecay { .. } => (4, from / size),
        };
        rng.set_word_pos(u128::from(word));
        if bytes_per_value == 1 {
            rng.fill_bytes(out);
            if let Fill::Scales { middle } = self.fill {
                for b in out {
                    *b = middle - 1 + *b % 3;
                }
            }
            return;
        }
        scratch.resize(out.len() / self.dtype.size() * 4, 0);
        rng.fill_bytes(scratch);
        let words = scratch.chunks_exact(4);
        let value = |i: usize, word: &[u8]| match self.fill {
            Fill::LogDecay { heads } if word_index(from, size) + i < heads => {
                let u = f64::from(u32::from_le_bytes([word[0], word[1], word[2], word[3]])) / 4_294_967_296.0;
                (1.0 + 15.0 * u).ln() as f32
            }
            Fill::LogDecay { .. } => 0.0,
            _ => self.table[word.iter().map(|b| usize::from(*b)).sum::<usize>()],
        };
        match self.dtype {
            DType::F32 => {
                for (i, (o, w)) in out.chunks_exact_mut(4).zip(words).enumerate() {
                    o.copy_from_slice(&value(i, w).to_le_bytes());
                }
            }
            _ => {
                for (i, (o, w)) in out.chunks_exact_mut(2).zip(words).enumerate() {
                    o.copy_from_slice(&bf16::from_f32(value(i, w)).to_le_bytes());
                }
            }
        }
    }
}

fn word_index(from: u64, size: u64) -> usize {
    usize::try_from(from / size).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: DType, shape: &[usize]) -> Expected {
        Expected { name: name.into(), dtype, shape: shape.to_vec(), padded: false }
    }

    fn whole(t: &Expected) -> Vec<u8> {
        let n: usize = t.shape.iter().product::<usize>() * t.dtype.size();
        let mut out = vec![0; n];
        Values::new(&Config::released(), t, 7).write(0, &mut out, &mut Vec::new());
        out
    }

    fn tensors() -> Vec<Expected> {
        let prefix = "language_model.model.layers.1.";
        vec![
            tensor(&format!("{prefix}self_attn.q_proj.weight"), DType::Bf16, &[64, 96]),
            tensor(&format!("{prefix}self_attn.A_log"), DType::F32, &[128]),
            tensor(&format!("{prefix}self_attn.o_norm.weight"), DType::F32, &[128]),
            tensor(&format!("{prefix}block_sparse_moe.experts.3.w1.weight_packed"), DType::U8, &[64, 1792]),
            tensor(&format!("{prefix}block_sparse_moe.experts.3.w1.weight_scale"), DType::U8, &[64, 112]),
        ]
    }

    #[test]
    fn any_range_is_that_of_the_whole() {
        for t in tensors() {
            let all = whole(&t);
            let values = Values::new(&Config::released(), &t, 7);
            for (from, n) in [(0, 4), (4, 8), (64, 260), (252, 260), (all.len() - 12, 12)] {
                let mut part = vec![0; n];
                values.write(from as u64, &mut part, &mut vec![9; 3]);
                assert_eq!(part, all[from..from + n], "{} {from}", t.name);
            }
        }
    }

    #[test]
    fn seed_and_name_choose_the_values() {
        let t = &tensors()[0];
        let write = |t: &Expected, seed| {
            let mut out = [0; 64];
            Values::new(&Config::released(), t, seed).write(0, &mut out, &mut Vec::new());
            out
        };
        assert_eq!(write(t, 7), write(t, 7));
        assert_ne!(write(t, 7), write(t, 8));
        let other = tensor("language_model.model.layers.2.self_attn.q_proj.weight", DType::Bf16, &[64, 96]);
        assert_ne!(write(t, 7), write(&other, 7));
    }

    #[test]
    fn deviations_are_those_of_the_table() {
        let all = tensors();
        let values: Vec<f64> =
            whole(&all[0]).chunks_exact(2).map(|b| f64::from(bf16::from_le_bytes([b[0], b[1]]))).collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let std = (values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n).sqrt();
        let expected = 1.0 / 96f64.sqrt();
        assert!((std / expected - 1.0).abs() < 0.05, "{std} for {expected}");
        assert!(mean.abs() < 0.05 * expected, "{mean}");
        let f32s = |bytes: Vec<u8>| -> Vec<f32> {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let decay = f32s(whole(&all[1]));
        assert!(
            decay[..96].iter().all(|v| (0.0..=16f32.ln()).contains(v))
                && decay[..96].iter().any(|v| *v > 1.0)
        );
        assert!(decay[96..].iter().all(|v| *v == 0.0), "the padding is zero");
        let norm = f32s(whole(&all[2]));
        assert!(norm.iter().all(|v| (0.5..1.5).contains(v)));
        assert!(norm.iter().any(|v| bf16::from_f32(*v).to_f32() != *v), "F32 tensors need more than bf16");
    }

    #[test]
    fn codes_are_uniform_and_scales_fit_the_width() {
        let all = tensors();
        let mut seen = [0usize; 16];
        let codes = whole(&all[3]);
        for b in &codes {
            seen[usize::from(b & 15)] += 1;
            seen[usize::from(b >> 4)] += 1;
        }
        let share = codes.len() * 2 / 16;
        assert!(seen.iter().all(|n| (share * 9 / 10..share * 11 / 10).contains(n)), "{seen:?}");
        let scales = whole(&all[4]);
        let rms = {
            let mean_square = scales.iter().map(|s| 4f64.powi(i32::from(*s) - 127)).sum::<f64>();
            (mean_square / scales.len() as f64).sqrt() * E2M1_RMS
        };
        assert!(scales.iter().all(|s| SCALES.contains(s)));
        let wanted = 1.0 / 3584f64.sqrt();
        assert!((wanted / 2.0..wanted * 2.0).contains(&rms), "{rms} for {wanted}");
    }
}
