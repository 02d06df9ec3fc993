use super::*;

/// A reproducible value in -1..1.
fn value(i: usize) -> f32 {
    let mut h = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^= h >> 29;
    h = h.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (h >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn values(seed: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| value(seed * 1_000_003 + i)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

const LENGTHS: [usize; 8] = [1, 15, 16, 17, 33, 257, 1757, 7168];

#[test]
fn rms_norm_divides_by_the_root_of_the_mean_square_plus_eps() {
    for n in LENGTHS {
        let (x, w) = (values(1, n), values(2, n));
        for eps in [1e-5, 1e-6, 0.5] {
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
            let mut out = vec![0.0; n];
            rms_norm(&x, &w, eps, &mut out);
            for i in 0..n {
                let want = f64::from(x[i]) / (mean + f64::from(eps)).sqrt() * f64::from(w[i]);
                let err = (f64::from(out[i]) - want).abs();
                assert!(err <= 3e-7 * want.abs(), "n {n} i {i}: {} {want}", out[i]);
            }
            let mut same = x.clone();
            rms_norm_in_place(&mut same, &w, eps);
            assert_eq!(bits(&same), bits(&out));
        }
    }
    let mut out = [0.0; 2];
    rms_norm(&[f32::NAN, 1.0], &[1.0; 2], 1e-5, &mut out);
    assert!(out.iter().all(|v| v.is_nan()));
}

#[test]
fn l2_norm_adds_eps_to_the_sum() {
    let x = values(3, 128);
    let sum: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
    let mut y = x.clone();
    l2_norm(&mut y, 3.0, 0.25);
    for (x, y) in x.iter().zip(&y) {
        let want = f64::from(*x) / (sum + 3.0).sqrt() * 0.25;
        assert!((f64::from(*y) - want).abs() <= 3e-7 * want.abs());
    }
    let mut zero = [0.0; 4];
    l2_norm(&mut zero, 1e-6, 1.0);
    assert_eq!(zero, [0.0; 4]);
}

#[test]
fn dot_and_axpy() {
    for isa in Isa::available() {
        for n in LENGTHS {
            let (a, b) = (values(4, n), values(5, n));
            let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let size: f64 = a.iter().zip(&b).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
            let err = (f64::from(dot(isa, &a, &b)) - want).abs();
            assert!(err <= 2e-6 * size, "{} n {n}: {err}", isa.name());

            let mut y = b.clone();
            axpy(isa, 0.7, &a, &mut y);
            for i in 0..n {
                let want = f64::from(b[i]) + f64::from(0.7f32) * f64::from(a[i]);
                assert!((f64::from(y[i]) - want).abs() <= 2.5e-7);
            }
            let mut parts = b.clone();
            parts.chunks_mut(7).zip(a.chunks(7)).for_each(|(y, x)| axpy(isa, 0.7, x, y));
            assert_eq!(bits(&parts), bits(&y));
        }
    }
    let mut y = [1.0, 2.0];
    add(&[3.0, 4.0], &mut y);
    scale(0.5, &mut y);
    assert_eq!(y, [2.0, 3.0]);
}

#[test]
fn softmax_sums_to_one_and_hides_nothing() {
    for isa in Isa::available() {
        for n in LENGTHS {
            let x: Vec<f32> = values(6, n).iter().map(|v| v * 30.0).collect();
            let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let e: Vec<f64> = x.iter().map(|v| f64::from(v - max).exp()).collect();
            let sum: f64 = e.iter().sum();
            let mut p = x.clone();
            softmax(isa, &mut p);
            for (p, e) in p.iter().zip(&e) {
                let want = e / sum;
                assert!((f64::from(*p) - want).abs() <= 5e-7 * want, "{} n {n}", isa.name());
            }
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut p = [1.0, bad, 2.0];
            softmax(isa, &mut p);
            assert!(p.iter().any(|v| v.is_nan()));
        }
        let mut masked = [0.0, f32::NEG_INFINITY];
        softmax(isa, &mut masked);
        assert_eq!(masked, [1.0, 0.0]);
        softmax(isa, &mut []);
    }
}

#[test]
fn finiteness_is_seen_at_every_place() {
    let mut x = vec![f32::MAX, f32::MIN, -0.0, f32::MIN_POSITIVE / 2.0];
    x.resize(2051, 1.0);
    assert!(all_finite(&x) && first_non_finite(&x).is_none() && all_finite(&[]));
    for i in [0, 3, 1023, 1024, 2050] {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)] {
            let kept = std::mem::replace(&mut x[i], bad);
            assert!(!all_finite(&x), "{bad} at {i}");
            assert_eq!(first_non_finite(&x), Some(i));
            x[i] = kept;
        }
    }
}

#[test]
fn argmax_takes_the_lowest_of_equals() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), Some(1));
    assert_eq!(argmax(&[f32::NAN, -1.0, f32::NAN, -1.0]), Some(1));
    assert_eq!(argmax(&[f32::NEG_INFINITY; 2]), Some(0));
    assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
    assert_eq!(argmax(&[f32::NAN]), None);
    assert_eq!(argmax(&[]), None);
}

/// The recurrence of the architecture page in f64, step by step.
fn kda_reference(s: &mut [f64], q: &[f32], k: &[f32], v: &[f32], g: &[f32], beta: f32) -> Vec<f64> {
    let (dk, dv) = (k.len(), v.len());
    for i in 0..dk {
        s[i * dv..][..dv].iter_mut().for_each(|s| *s *= f64::from(g[i]));
    }
    let read =
        |s: &[f64], by: &[f32], j: usize| (0..dk).map(|i| s[i * dv + j] * f64::from(by[i])).sum::<f64>();
    for j in 0..dv {
        let delta = f64::from(beta) * (f64::from(v[j]) - read(s, k, j));
        for i in 0..dk {
            s[i * dv + j] += f64::from(k[i]) * delta;
        }
    }
    (0..dv).map(|j| read(s, q, j)).collect()
}

#[test]
fn kda_steps_follow_the_recurrence() {
    for isa in Isa::available() {
        for (dk, dv) in [(16, 16), (24, 24), (128, 128), (5, 67), (128, 24), (1, 1)] {
            let mut s: Vec<f32> = values(7, dk * dv);
            let mut exact: Vec<f64> = s.iter().map(|v| f64::from(*v)).collect();
            for step in 0..6 {
                let at = 10 * step;
                let (mut q, mut k, v) = (values(at, dk), values(at + 1, dk), values(at + 2, dv));
                l2_norm(&mut q, 1e-6, 0.5);
                l2_norm(&mut k, 1e-6, 1.0);
                let g: Vec<f32> = values(at + 3, dk).iter().map(|v| (2.5 * (v - 1.0)).exp()).collect();
                let beta = 0.5 + 0.4 * value(at);
                let want = kda_reference(&mut exact, &q, &k, &v, &g, beta);
                let mut o = vec![f32::NAN; dv];
                kda_head_step(isa, &mut s, &q, &k, &v, &g, beta, &mut o);
                for (o, want) in o.iter().zip(&want) {
                    let err = (f64::from(*o) - want).abs();
                    assert!(err <= 2e-6, "{} {dk}x{dv} step {step}: {o} {want}", isa.name());
                }
            }
            for (s, want) in s.iter().zip(&exact) {
                assert!((f64::from(*s) - want).abs() <= 2e-6, "{} {dk}x{dv} state", isa.name());
            }
        }
        let (mut s, mut o) = (vec![0.5; 4], [0.0; 2]);
        kda_head_step(isa, &mut s, &[1.0; 2], &[1.0; 2], &[f32::NAN, 1.0], &[1.0; 2], 1.0, &mut o);
        assert!(o[0].is_nan() && s[0].is_nan() && s[2].is_nan() && o[1].is_finite());
    }
}

#[test]
fn kda_columns_do_not_depend_on_the_width() {
    // A column alone, in a narrow state and in a wide one: same bits.
    let (dk, dv) = (24, 130);
    let (q, k, v, g) = (values(1, dk), values(2, dk), values(3, dv), vec![0.9; dk]);
    let state = values(4, dk * dv);
    for isa in Isa::available() {
        let (mut s, mut o) = (state.clone(), vec![0.0; dv]);
        kda_head_step(isa, &mut s, &q, &k, &v, &g, 0.3, &mut o);
        for c in [0, 70, 129] {
            let mut alone: Vec<f32> = (0..dk).map(|i| state[i * dv + c]).collect();
            let mut one = [0.0];
            kda_head_step(isa, &mut alone, &q, &k, &v[c..=c], &g, 0.3, &mut one);
            assert_eq!(one[0].to_bits(), o[c].to_bits(), "{} column {c}", isa.name());
            assert!((0..dk).all(|i| alone[i].to_bits() == s[i * dv + c].to_bits()));
        }
    }
}

#[test]
fn mla_sums_are_right_and_independent_of_other_heads_and_positions() {
    for isa in Isa::available() {
        for (heads, positions, r, d) in [(1, 1, 16, 8), (3, 5, 24, 4), (6, 9, 512, 64), (5, 131, 67, 0)] {
            let (ql, qr) = (values(1, heads * r), values(2, heads * d));
            let (latent, rope) = (values(3, positions * r), values(4, positions * d));
            let mut scores = vec![f32::NAN; heads * positions];
            mla_scores(isa, heads, &ql, &qr, &latent, &rope, 0.3, &mut scores);
            let dot64 = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            for h in 0..heads {
                for s in 0..positions {
                    let want = dot64(&ql[h * r..][..r], &latent[s * r..][..r])
                        + dot64(&qr[h * d..][..d], &rope[s * d..][..d]);
                    let err = (f64::from(scores[h * positions + s]) - f64::from(0.3f32) * want).abs();
                    assert!(err <= 1e-6 * (r + d) as f64, "{} head {h} position {s}", isa.name());
                }
                // One head, and fewer positions: the same bits.
                for fewer in [positions, positions.div_ceil(2)] {
                    let mut alone = vec![f32::NAN; fewer];
                    let (ql, qr) = (&ql[h * r..][..r], &qr[h * d..][..d]);
                    mla_scores(isa, 1, ql, qr, &latent[..fewer * r], &rope[..fewer * d], 0.3, &mut alone);
                    assert_eq!(bits(&alone), bits(&scores[h * positions..][..fewer]));
                }
            }
            let mut out = vec![f32::NAN; heads * r];
            mla_weighted_sum(isa, heads, &scores, &latent, &mut out);
            for h in 0..heads {
                let p = &scores[h * positions..][..positions];
                for c in 0..r {
                    let at = |s: usize| f64::from(p[s]) * f64::from(latent[s * r + c]);
                    let want: f64 = (0..positions).map(at).sum();
                    let size: f64 = (0..positions).map(|s| at(s).abs()).sum();
                    let err = (f64::from(out[h * r + c]) - want).abs();
                    assert!(err <= 2e-6 * size, "{} head {h} column {c}", isa.name());
                }
                let mut alone = vec![f32::NAN; r];
                mla_weighted_sum(isa, 1, p, &latent, &mut alone);
                assert_eq!(bits(&alone), bits(&out[h * r..][..r]));
            }
        }
    }
}
