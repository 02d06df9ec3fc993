use super::*;
use crate::checkpoint::format::MXFP4_GROUP;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A stored matrix that owns its bytes, laid one byte off so that nothing is aligned.
struct Stored {
    rows: usize,
    cols: usize,
    kind: &'static str,
    bytes: Vec<u8>,
    scale: Vec<u8>,
}

impl Stored {
    fn matrix(&self) -> Matrix<'_> {
        let bytes = &self.bytes[1..];
        let data = match self.kind {
            "f32" => Data::F32(bytes),
            "bf16" => Data::Bf16(bytes),
            _ => Data::Mxfp4 { packed: bytes, scale: &self.scale[1..] },
        };
        Matrix { rows: self.rows, cols: self.cols, data }
    }
}

fn uniform(rng: &mut ChaCha8Rng) -> f32 {
    (rng.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
}

fn activations(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| uniform(rng)).collect()
}

fn stored(rng: &mut ChaCha8Rng, kind: &'static str, rows: usize, cols: usize) -> Stored {
    let n = rows * cols;
    let (mut bytes, mut scale) = (vec![0xa5], vec![0xa5]);
    match kind {
        "f32" => bytes.extend((0..n).flat_map(|_| uniform(rng).to_le_bytes())),
        "bf16" => bytes.extend((0..n).flat_map(|_| half::bf16::from_f32(uniform(rng)).to_le_bytes())),
        _ => {
            bytes.extend((0..n / 2).map(|_| rng.next_u32() as u8));
            scale.extend((0..n / MXFP4_GROUP).map(|_| 110 + (rng.next_u32() % 20) as u8));
        }
    }
    Stored { rows, cols, kind, bytes, scale }
}

fn product(isa: Isa, x: &[f32], w: &Matrix<'_>, tokens: usize) -> Vec<f32> {
    let mut y = vec![f32::NAN; tokens * w.rows];
    matmul(isa, x, w, &mut y);
    y
}

/// The weight of the checkpoint in f64, where even scale 254 times 6 is finite.
fn weight(w: &Matrix<'_>, r: usize, c: usize) -> f64 {
    match w.data {
        Data::Mxfp4 { packed, scale } => {
            let byte = packed[(r * w.cols + c) / 2];
            let code = if c.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
            let exponent = i32::from(scale[(r * w.cols + c) / MXFP4_GROUP]) - 127;
            f64::from(crate::checkpoint::format::E2M1[usize::from(code)]) * 2f64.powi(exponent)
        }
        _ => {
            let mut row = vec![0.0; w.cols];
            w.widen_row(r, &mut row);
            f64::from(row[c])
        }
    }
}

/// Checks y against f64 sums within `2e-6·Σ|w·x|` and the last place of a subnormal.
fn check(isa: Isa, what: &str, x: &[f32], w: &Matrix<'_>, y: &[f32]) {
    for r in 0..w.rows {
        let row: Vec<f64> = (0..w.cols).map(|c| weight(w, r, c)).collect();
        for (t, x) in x.chunks_exact(w.cols).enumerate() {
            let (mut sum, mut size) = (0.0, 0.0);
            for (w, x) in row.iter().zip(x) {
                sum += w * f64::from(*x);
                size += (w * f64::from(*x)).abs();
            }
            let err = (f64::from(y[t * w.rows + r]) - sum).abs();
            assert!(
                err <= 2e-6 * size + 1e-44,
                "{} {what} token {t} row {r}: {err:e} of {size:e}",
                isa.name()
            );
        }
    }
}

fn shapes(kind: &str) -> Vec<(usize, usize)> {
    let cols: &[usize] = if kind == "mxfp4" { &[32, 64, 96, 1536, 160] } else { &[1, 31, 32, 33, 257, 1757] };
    let mut out = Vec::new();
    for &c in cols {
        out.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 33].map(|r| (r, c)));
    }
    out.push((257, cols[3]));
    out
}

const KINDS: [&str; 3] = ["f32", "bf16", "mxfp4"];
const TOKENS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 13, 16, 33];

#[test]
fn every_set_is_within_the_bound_and_independent_of_the_batch() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for kind in KINDS {
        for (rows, cols) in shapes(kind) {
            let stored = stored(&mut rng, kind, rows, cols);
            let w = stored.matrix();
            let x = activations(&mut rng, 33 * cols);
            for isa in Isa::available() {
                let what = format!("{kind} [{rows},{cols}]");
                // The largest batch against f64; every other batch and each token alone against it, by bits.
                let all = product(isa, &x, &w, 33);
                check(isa, &what, &x, &w, &all);
                for tokens in TOKENS {
                    let y = product(isa, &x[..tokens * cols], &w, tokens);
                    assert_eq!(bits(&y), bits(&all[..tokens * rows]), "{} {what} T={tokens}", isa.name());
                }
                let alone: Vec<f32> = x.chunks_exact(cols).flat_map(|x| product(isa, x, &w, 1)).collect();
                assert_eq!(bits(&alone), bits(&all), "{} {what} one by one", isa.name());
            }
        }
    }
}

fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn sets_with_fused_multiply_add_agree_by_bits() {
    let fused: Vec<Isa> = Isa::available().into_iter().filter(|isa| *isa != Isa::Portable).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for (kind, cols) in [("f32", 1757), ("bf16", 1757), ("mxfp4", 1536)] {
        let stored = stored(&mut rng, kind, 9, cols);
        let x = activations(&mut rng, 17 * cols);
        for pair in fused.windows(2) {
            let [a, b] = [pair[0], pair[1]].map(|isa| product(isa, &x, &stored.matrix(), 17));
            assert_eq!(bits(&a), bits(&b), "{kind} {pair:?}");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let pools = [1, 2, 4].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for (kind, cols) in [("f32", 777), ("bf16", 1024), ("mxfp4", 1536)] {
        let stored = stored(&mut rng, kind, 515, cols);
        let w = stored.matrix();
        let x = activations(&mut rng, 33 * cols);
        for isa in Isa::available() {
            for tokens in [1, 5, 33] {
                let x = &x[..tokens * cols];
                let mut serial = vec![f32::NAN; tokens * w.rows];
                matmul_serial(isa, x, &w, &mut serial);
                for pool in &pools {
                    let y = pool.install(|| product(isa, x, &w, tokens));
                    assert_eq!(bits(&y), bits(&serial), "{} {kind} T={tokens}", isa.name());
                }
            }
        }
    }
}

#[test]
fn mxfp4_extreme_scales_and_both_nibbles() {
    for isa in Isa::available() {
        for rows in 1..=9 {
            let cols = 128;
            // Nibbles of a byte always differ, and every code occurs in both places.
            let bytes = std::iter::once(0)
                .chain((0..rows * cols / 2).map(|i| ((i % 16) | (((i * 7 + 5 + i / 16) % 16) << 4)) as u8))
                .map(|b| if b >> 4 == b & 15 { b ^ 0x10 } else { b })
                .collect();
            let scale =
                std::iter::once(0).chain([0u8, 1, 127, 254].into_iter().cycle().take(rows * 4)).collect();
            let stored = Stored { rows, cols, kind: "mxfp4", bytes, scale };
            let w = stored.matrix();
            // One block of columns at a time, of a size that keeps every partial product in range.
            for (block, size) in [(0, 1.0f32), (1, 1.0), (2, 1.0), (3, 1e-4)] {
                for tokens in [1, 2, 4, 16] {
                    let mut x = vec![0.0; tokens * cols];
                    for (t, x) in x.chunks_exact_mut(cols).enumerate() {
                        for (i, x) in x[block * 32..][..32].iter_mut().enumerate() {
                            *x = size * (1.0 + ((i * 5 + t) % 11) as f32) / 11.0;
                        }
                    }
                    let y = product(isa, &x, &w, tokens);
                    check(isa, &format!("block {block} rows {rows}"), &x, &w, &y);
                    assert!(y.iter().any(|v| *v != 0.0));
                }
            }
        }
    }
}

#[test]
fn mxfp4_columns_come_one_by_one_in_file_order() {
    // A unit vector picks one weight: exact, so any permutation of columns or nibbles shows.
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let stored = stored(&mut rng, "mxfp4", 5, 64);
    let w = stored.matrix();
    for isa in Isa::available() {
        for c in 0..64 {
            let mut x = vec![0.0; 64];
            x[c] = 1.0;
            let y = product(isa, &x, &w, 1);
            for (r, y) in y.iter().enumerate() {
                assert_eq!(f64::from(*y), weight(&w, r, c), "{} row {r} column {c}", isa.name());
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_result() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for (kind, cols) in [("f32", 33), ("bf16", 33), ("mxfp4", 64)] {
        let stored = stored(&mut rng, kind, 6, cols);
        for isa in Isa::available() {
            for tokens in [1, 4, 13] {
                for bad in [f32::NAN, f32::INFINITY] {
                    for c in [0, 17, cols - 1] {
                        let mut x = activations(&mut rng, tokens * cols);
                        x[c] = bad;
                        let y = product(isa, &x, &stored.matrix(), tokens);
                        let what = format!("{} {kind} T={tokens} column {c}", isa.name());
                        assert!(y[..6].iter().all(|v| !v.is_finite()), "{what}: {:?}", &y[..6]);
                        assert!(y[6..].iter().all(|v| v.is_finite()), "{what}: other tokens");
                    }
                }
            }
        }
    }
}

#[test]
fn strided_results_leave_the_gaps_alone() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let stored = stored(&mut rng, "bf16", 5, 40);
    let x = activations(&mut rng, 3 * 40);
    for isa in Isa::available() {
        let packed = product(isa, &x, &stored.matrix(), 3);
        let mut y = vec![7.0; 2 * 8 + 5 + 3];
        matmul_serial_strided(isa, &x, &stored.matrix(), &mut y, 8);
        for (t, row) in y.chunks(8).enumerate() {
            assert_eq!(bits(&row[..5]), bits(&packed[t * 5..][..5]));
            assert!(row[5..].iter().all(|v| *v == 7.0));
        }
    }
}

#[test]
fn empty_products() {
    let w = Matrix { rows: 3, cols: 0, data: Data::F32(&[]) };
    for tokens in [1, 2, 33] {
        let mut y = vec![1.0; 3 * tokens];
        matmul(Isa::Portable, &[], &w, &mut y);
        assert!(y.iter().all(|v| *v == 0.0), "{y:?}");
    }
    let w = Matrix { rows: 0, cols: 4, data: Data::Bf16(&[]) };
    matmul(Isa::Portable, &[1.0; 8], &w, &mut []);
}

#[test]
#[should_panic(expected = "y is not [T, rows]")]
fn a_result_of_another_shape_is_refused() {
    let w = Matrix { rows: 2, cols: 1, data: Data::Bf16(&[0; 4]) };
    matmul(Isa::Portable, &[1.0; 2], &w, &mut [0.0; 3]);
}
