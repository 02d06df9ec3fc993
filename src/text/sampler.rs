//! Logits to the next id.
//!
//! The order of the filters is the usual one: logits are divided by the temperature, then the top-k largest
//! are kept, then the smallest set of the most probable whose probability reaches top-p, then those at least
//! min-p times as probable as the best; each filter sees the distribution that the one before left. One id is
//! drawn from what remains.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::{Error, Kind, Result};

/// How to choose the next id. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerParams {
    /// Divides the logits; 0 takes the largest logit and ignores the rest of the parameters.
    pub temperature: f32,
    /// Keeps the most probable ids up to this share of the probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many ids; 0 keeps all.
    pub top_k: usize,
    /// Keeps ids at least this many times as probable as the best; 0 keeps all.
    pub min_p: f32,
    /// Seeds the draws.
    pub seed: u64,
}

impl Default for SamplerParams {
    fn default() -> SamplerParams {
        SamplerParams { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 }
    }
}

/// Chooses ids. Its only state is scratch memory: the choice at a position depends on the parameters, the
/// logits and the position, so a sequence taken up again continues as it would have.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Probability relative to the best candidate's: exp((logit − best) / temperature), in (0, 1].
    weight: f64,
}

/// Larger logits first, and of equal ones the lower id. A total order, NaN included; adding zero makes the
/// two zeros equal.
fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    (b.logit + 0.0).total_cmp(&(a.logit + 0.0)).then(a.id.cmp(&b.id))
}

impl Sampler {
    /// A sampler.
    ///
    /// # Errors
    /// `Usage`, naming the flag, for a parameter out of its range.
    pub fn new(params: SamplerParams) -> Result<Sampler> {
        let SamplerParams { temperature, top_p, min_p, .. } = params;
        let check = |ok: bool, flag: &str, range: &str, found: f32| match ok {
            true => Ok(()),
            false => Err(Error::usage(format!("{flag} is out of range")).expected(range, found)),
        };
        check(
            temperature.is_finite() && temperature >= 0.0,
            "--temperature",
            "0 or more, finite",
            temperature,
        )?;
        check(top_p > 0.0 && top_p <= 1.0, "--top-p", "more than 0, at most 1", top_p)?;
        check((0.0..=1.0).contains(&min_p), "--min-p", "0 to 1", min_p)?;
        Ok(Sampler { params, candidates: Vec::new() })
    }

    /// The parameters.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// The id for `position` (zero-based, the place the new id takes in the sequence) from `logits`\[V\].
    ///
    /// # Errors
    /// `NonFinite`, naming the position and the id, if any logit is not finite; `Run` for no logits. The
    /// sampler stays usable.
    pub fn sample(&mut self, logits: &[f32], position: usize) -> Result<u32> {
        let best = greedy(logits, position)?;
        if self.params.temperature == 0.0 {
            return Ok(best.id);
        }
        let temperature = f64::from(self.params.temperature);
        let weigh = |logit: f32| ((f64::from(logit) - f64::from(best.logit)) / temperature).exp();
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(logits).map(|(id, &logit)| Candidate {
            id,
            logit,
            weight: weigh(logit),
        }));
        self.keep_top_k();
        self.keep_top_p();
        let floor = f64::from(self.params.min_p);
        self.candidates.retain(|c| c.weight >= floor);

        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let mut left = uniform(self.params.seed, position) * total;
        for c in &self.candidates {
            left -= c.weight;
            if left < 0.0 {
                return Ok(c.id);
            }
        }
        // Only rounding in the sums leads here; the best candidate outlives every filter.
        Ok(best.id)
    }

    fn keep_top_k(&mut self) {
        let k = self.params.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, by_rank);
            self.candidates.truncate(k);
            // The selection leaves no order that is worth relying on.
            self.candidates.sort_unstable_by_key(|c| c.id);
        }
    }

    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.params.top_p);
        if top_p >= 1.0 {
            return;
        }
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        // n ids below (1 − p)/n of the total are together below 1 − p, so the rest reach p without them:
        // only the rest need sorting. Half of that leaves room for rounding.
        let negligible = 0.5 * (1.0 - top_p) * total / self.candidates.len() as f64;
        self.candidates.retain(|c| c.weight >= negligible);
        self.candidates.sort_unstable_by(by_rank);
        let mut sum = 0.0;
        let reached = self.candidates.iter().position(|c| {
            sum += c.weight;
            sum >= top_p * total
        });
        if let Some(last) = reached {
            self.candidates.truncate(last + 1);
        }
    }
}

/// The largest logit, the lowest id of equal ones.
fn greedy(logits: &[f32], position: usize) -> Result<Candidate> {
    let mut best: Option<Candidate> = None;
    for (id, &logit) in (0u32..).zip(logits) {
        // By its exponent bits: comparisons with NaN are false, and so would hide it.
        if logit.to_bits() & 0x7F80_0000 == 0x7F80_0000 {
            return Err(Error::new(Kind::NonFinite, "a logit is not finite")
                .position(position)
                .expected("finite logits", format_args!("{logit} for token {id}")));
        }
        if best.is_none_or(|b| logit > b.logit) {
            best = Some(Candidate { id, logit, weight: 1.0 });
        }
    }
    best.ok_or_else(|| Error::run("there are no logits to sample from").position(position))
}

/// The draw of a position: uniform in [0, 1), a function of the seed and the position alone.
fn uniform(seed: u64, position: usize) -> f64 {
    let mut key = [0u8; 32];
    for (slot, byte) in key.iter_mut().zip(seed.to_le_bytes()) {
        *slot = byte;
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(position as u64);
    // 53 bits: what an f64 in [0, 1) holds evenly spaced.
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// The largest logit m and ln Σ exp(logit − m), in f64, kept apart: their sum would lose the digits of the
/// second where logits are large.
fn log_norm(logits: &[f32]) -> (f64, f64) {
    let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    (best, logits.iter().map(|&l| (f64::from(l) - best).exp()).sum::<f64>().ln())
}

/// The natural log-probability of `id` under `logits`\[V\], in f64; its negative is the NLL. An id outside
/// the logits has probability zero: −∞. A NaN among the logits gives NaN.
pub fn log_softmax_at(logits: &[f32], id: u32) -> f64 {
    let Some(&logit) = usize::try_from(id).ok().and_then(|i| logits.get(i)) else {
        return f64::NEG_INFINITY;
    };
    let (best, norm) = log_norm(logits);
    f64::from(logit) - best - norm
}

/// The `n` most probable ids of `logits`\[V\] with their natural log-probabilities, best first, the lower id
/// first where equal; all of them if there are fewer.
pub fn top_logprobs(logits: &[f32], n: usize) -> Vec<(u32, f64)> {
    let n = n.min(logits.len());
    if n == 0 {
        return Vec::new();
    }
    let (best, norm) = log_norm(logits);
    let mut all: Vec<Candidate> =
        (0u32..).zip(logits).map(|(id, &logit)| Candidate { id, logit, weight: 0.0 }).collect();
    all.select_nth_unstable_by(n - 1, by_rank);
    all.truncate(n);
    all.sort_unstable_by(by_rank);
    all.iter().map(|c| (c.id, f64::from(c.logit) - best - norm)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(params: SamplerParams) -> Sampler {
        Sampler::new(params).expect("valid parameters")
    }

    /// Logits whose probabilities at temperature 1 are as given.
    fn logits_of(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    /// How often each id is drawn in `n` positions.
    fn counts(params: SamplerParams, logits: &[f32], n: usize) -> Vec<usize> {
        let mut s = sampler(params);
        let mut counts = vec![0; logits.len()];
        for position in 0..n {
            counts[s.sample(logits, position).expect("finite logits") as usize] += 1;
        }
        counts
    }

    const WARM: SamplerParams = SamplerParams { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 7 };

    #[test]
    fn parameters_out_of_range_name_their_flag() {
        let bad = [
            (SamplerParams { temperature: -0.1, ..WARM }, "--temperature"),
            (SamplerParams { temperature: f32::NAN, ..WARM }, "--temperature"),
            (SamplerParams { temperature: f32::INFINITY, ..WARM }, "--temperature"),
            (SamplerParams { top_p: 0.0, ..WARM }, "--top-p"),
            (SamplerParams { top_p: 1.1, ..WARM }, "--top-p"),
            (SamplerParams { top_p: f32::NAN, ..WARM }, "--top-p"),
            (SamplerParams { min_p: -0.1, ..WARM }, "--min-p"),
            (SamplerParams { min_p: 1.1, ..WARM }, "--min-p"),
            (SamplerParams { min_p: f32::NAN, ..WARM }, "--min-p"),
        ];
        for (params, flag) in bad {
            let e = Sampler::new(params).expect_err(flag);
            assert_eq!(e.kind(), Kind::Usage);
            assert!(e.to_string().contains(flag), "{e}");
        }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equal_ids() {
        let mut s = sampler(SamplerParams::default());
        assert_eq!(s.sample(&[0.0, 3.0, -1.0, 3.0], 0).unwrap(), 1);
        assert_eq!(s.sample(&[-0.0, 0.0], 0).unwrap(), 0);
        assert_eq!(s.sample(&[f32::MIN], 0).unwrap(), 0);
        assert_eq!(s.sample(&[], 3).unwrap_err().kind(), Kind::Run);
    }

    #[test]
    fn c18_a_logit_that_is_not_finite_stops_that_step_only() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7F80_0001)] {
            for params in [SamplerParams::default(), WARM] {
                let good = [0.5, 1.0, 0.25, 2.0];
                let mut s = sampler(params);
                for at in 0..good.len() {
                    let mut logits = good;
                    logits[at] = bad;
                    let e = s.sample(&logits, 41).expect_err("not finite");
                    assert_eq!(e.kind(), Kind::NonFinite);
                    assert_eq!(e.place().position, Some(41));
                    assert!(e.to_string().ends_with(&format!("for token {at}")), "{e}");
                }
                // What was refused leaves no trace.
                assert_eq!(s.sample(&good, 42).unwrap(), sampler(params).sample(&good, 42).unwrap());
            }
        }
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let p = [0.5, 0.25, 0.125, 0.125];
        let n = 20_000;
        for (id, count) in counts(WARM, &logits_of(&p), n).into_iter().enumerate() {
            // Five standard deviations of a binomial.
            let tolerance = 5.0 * (n as f64 * p[id] * (1.0 - p[id])).sqrt();
            let err = (count as f64 - n as f64 * p[id]).abs();
            assert!(err <= tolerance, "id {id}: {count}");
        }
        // At temperature ½ the probabilities are squared: 16, 4, 1, 1 of 22.
        let cool = counts(SamplerParams { temperature: 0.5, ..WARM }, &logits_of(&p), n);
        let err = (cool[0] as f64 / n as f64 - 16.0 / 22.0).abs();
        assert!(err <= 0.02, "{cool:?}");
        // Next to zero it is greedy, with no overflow on the way.
        let cold = counts(SamplerParams { temperature: f32::from_bits(1), ..WARM }, &logits_of(&p), 100);
        assert_eq!(cold, [100, 0, 0, 0]);
    }

    #[test]
    fn filters_keep_what_they_should() {
        let logits = logits_of(&[0.1, 0.4, 0.2, 0.3]);
        let kept = |params| -> Vec<usize> {
            let c = counts(params, &logits, 2000);
            (0..c.len()).filter(|&i| c[i] > 0).collect()
        };
        assert_eq!(kept(WARM), [0, 1, 2, 3]);
        assert_eq!(kept(SamplerParams { top_k: 1, ..WARM }), [1]);
        assert_eq!(kept(SamplerParams { top_k: 3, ..WARM }), [1, 2, 3]);
        assert_eq!(kept(SamplerParams { top_k: 9, ..WARM }), [0, 1, 2, 3]);
        assert_eq!(kept(SamplerParams { top_p: 0.39, ..WARM }), [1]);
        assert_eq!(kept(SamplerParams { top_p: 0.41, ..WARM }), [1, 3]);
        assert_eq!(kept(SamplerParams { top_p: 0.89, ..WARM }), [1, 2, 3]);
        assert_eq!(kept(SamplerParams { min_p: 0.6, ..WARM }), [1, 3]);
        assert_eq!(kept(SamplerParams { min_p: 1.0, ..WARM }), [1]);
        // Top-p comes after top-k: 0.4 of the 0.7 that two ids have is 57% of it.
        assert_eq!(kept(SamplerParams { top_k: 2, top_p: 0.55, ..WARM }), [1]);
        assert_eq!(kept(SamplerParams { top_k: 2, top_p: 0.6, ..WARM }), [1, 3]);
        // Equal logits: the lower ids stay.
        let c = counts(SamplerParams { top_k: 2, ..WARM }, &[1.0; 5], 500);
        assert!(c[0] > 0 && c[1] > 0 && c[2..] == [0, 0, 0], "{c:?}");
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_alone() {
        let logits = [0.0f32; 1000];
        let mut a = sampler(WARM);
        let run: Vec<u32> = (0..50).map(|p| a.sample(&logits, p).unwrap()).collect();
        // A fresh sampler that takes up the sequence in its middle, or goes backwards, draws the same.
        let mut b = sampler(WARM);
        for p in (0..50).rev() {
            assert_eq!(b.sample(&logits, p).unwrap(), run[p]);
        }
        let mut c = sampler(SamplerParams { seed: 8, ..WARM });
        let other: Vec<u32> = (0..50).map(|p| c.sample(&logits, p).unwrap()).collect();
        assert_ne!(run, other);
        // Worked out from the definition of ChaCha8, and fixed for good: saved sessions rely on it.
        assert_eq!(run[..4], [764, 934, 10, 662]);
    }

    #[test]
    fn log_probabilities_are_exact() {
        let p = [0.5, 0.25, 0.125, 0.125];
        let logits: Vec<f32> = p.iter().map(|p: &f64| p.log2() as f32).collect();
        // In base-2 units of logits the norm is known in closed form.
        let norm: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        for (id, &l) in logits.iter().enumerate() {
            let err = (log_softmax_at(&logits, id as u32) - (f64::from(l) - norm)).abs();
            assert!(err <= 1e-15, "id {id}");
        }
        // Far from zero, where exp would overflow or vanish.
        let err = (log_softmax_at(&[3e38, 3e38], 1) + std::f64::consts::LN_2).abs();
        assert!(err <= 1e-15);
        let err = (log_softmax_at(&[-1e4, -1e4 - 1.0], 0) + (1.0 + (-1.0f64).exp()).ln()).abs();
        assert!(err <= 1e-15);
        assert_eq!(log_softmax_at(&[0.0], 1), f64::NEG_INFINITY);
        assert!(log_softmax_at(&[0.0, f32::NAN], 0).is_nan());

        let top = top_logprobs(&[1.0, 3.0, 2.0, 3.0], 3);
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 2]);
        assert_eq!(top[0].1, log_softmax_at(&[1.0, 3.0, 2.0, 3.0], 1));
        assert_eq!(top_logprobs(&[1.0, 2.0], 5).len(), 2);
        assert_eq!(top_logprobs(&[1.0, 2.0], 0), []);
    }
}
