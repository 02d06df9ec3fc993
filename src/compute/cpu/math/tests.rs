use super::*;

/// About half a million values over the whole range of `f32` near the functions' interesting parts.
fn samples(limit: f32) -> Vec<f32> {
    let mut out: Vec<f32> = (0..200_000).map(|i| (i as f32 / 100_000.0 - 1.0) * limit).collect();
    // Every binade down to the subnormals, both signs, with a few mantissas.
    for exponent in -149..7 {
        for m in 0..64 {
            let x = 2f32.powi(exponent) * (1.0 + m as f32 / 64.0);
            if x <= limit {
                out.extend([x, -x]);
            }
        }
    }
    out.extend([0.0, -0.0]);
    out
}

/// Worst relative error against `f`, with results below the smallest normal value compared absolutely.
fn worst(isa: Isa, run: fn(Isa, &mut [f32]), f: fn(f64) -> f64, limit: f32) -> f64 {
    let x = samples(limit);
    let mut y = x.clone();
    run(isa, &mut y);
    let mut worst = 0.0f64;
    for (x, y) in x.iter().zip(&y) {
        let want = f(f64::from(*x));
        let err = (f64::from(*y) - want).abs() / want.abs().max(f64::from(f32::MIN_POSITIVE));
        assert!(!err.is_nan(), "{} f({x:e}) = {y:e}, not {want:e}", isa.name());
        worst = worst.max(err);
    }
    worst
}

#[test]
fn relative_errors_are_small() {
    for isa in Isa::available() {
        let bound = 2.5e-7;
        for (name, err) in [
            ("exp", worst(isa, exp, f64::exp, 87.0)),
            ("sigmoid", worst(isa, sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 87.0)),
            ("tanh", worst(isa, tanh, f64::tanh, 30.0)),
            ("silu", worst(isa, silu, |x| x / (1.0 + (-x).exp()), 80.0)),
        ] {
            assert!(err <= bound, "{} {name}: {err:e}", isa.name());
        }
    }
}

#[test]
fn situ_glu_is_the_formula() {
    let gate: Vec<f32> = (0..4001).map(|i| (i as f32 - 2000.0) / 20.0).collect();
    let up: Vec<f32> = (0..4001).map(|i| ((i * 7919) % 4001) as f32 / 10.0 - 200.0).collect();
    for isa in Isa::available() {
        for (beta, linear_beta) in [(4.0, 25.0), (1.5, 3.0)] {
            let mut out = gate.clone();
            situ_glu(isa, &mut out, &up, beta, linear_beta);
            for ((g, u), y) in gate.iter().zip(&up).zip(&out) {
                let want = scalar::situ_glu(*g, *u, beta, linear_beta);
                let err = (y - want).abs();
                // Below 2^-126 the sigmoid is 0.
                let least = beta * linear_beta * f32::MIN_POSITIVE;
                assert!(err <= 1e-6 * want.abs() + least, "{} situ({g}, {u}) = {y}, not {want}", isa.name());
                assert!(y.abs() <= beta * linear_beta * 1.000_001);
            }
        }
    }
}

#[test]
fn limits_and_not_a_number() {
    let inf = f32::INFINITY;
    for isa in Isa::available() {
        let apply = |f: fn(Isa, &mut [f32]), x: f32| {
            let mut v = [x];
            f(isa, &mut v);
            v[0]
        };
        for f in [exp, sigmoid, tanh, silu] {
            assert!(apply(f, f32::NAN).is_nan(), "{}", isa.name());
            assert!(apply(f, -f32::NAN).is_nan(), "{}", isa.name());
        }
        assert_eq!([apply(exp, inf), apply(exp, 88.73), apply(exp, f32::MAX)], [inf; 3]);
        assert!(apply(exp, 88.72).is_finite());
        assert_eq!([apply(exp, -inf), apply(exp, -104.0), apply(exp, f32::MIN)], [0.0; 3]);
        assert!(apply(exp, -103.0) > 0.0, "subnormal results are kept");
        assert_eq!([apply(exp, 0.0), apply(exp, -0.0)], [1.0; 2]);
        assert_eq!([apply(sigmoid, inf), apply(sigmoid, 100.0), apply(sigmoid, 0.0)], [1.0, 1.0, 0.5]);
        assert_eq!([apply(sigmoid, -inf), apply(sigmoid, -120.0)], [0.0; 2]);
        assert_eq!([apply(tanh, inf), apply(tanh, 30.0), apply(tanh, -inf)], [1.0, 1.0, -1.0]);
        assert_eq!(apply(tanh, -0.0).to_bits(), (-0.0f32).to_bits());

        let mut gate = [f32::NAN, 1.0, 2.0];
        situ_glu(isa, &mut gate, &[1.0, f32::NAN, 2.0], 4.0, 25.0);
        assert!(gate[0].is_nan() && gate[1].is_nan() && gate[2].is_finite());
        let mut x = [f32::NAN, 1.0, 2.0];
        sigmoid_gate(isa, &mut x, &[1.0, f32::NAN, 2.0]);
        assert!(x[0].is_nan() && x[1].is_nan() && x[2].is_finite());
    }
}

#[test]
fn a_result_does_not_depend_on_its_place() {
    let x: Vec<f32> = (0..77).map(|i| (i as f32 - 38.0) * 0.37).collect();
    for isa in Isa::available() {
        for f in [exp, sigmoid, tanh, silu] {
            let mut whole = x.clone();
            f(isa, &mut whole);
            for size in [1, 3, 16, 31] {
                let mut parts = x.clone();
                parts.chunks_mut(size).for_each(|part| f(isa, part));
                assert!(parts.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", isa.name());
            }
        }
        let (mut whole, mut parts) = (x.clone(), x.clone());
        situ_glu(isa, &mut whole, &x, 4.0, 25.0);
        parts.chunks_mut(5).zip(x.chunks(5)).for_each(|(g, u)| situ_glu(isa, g, u, 4.0, 25.0));
        assert!(parts.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", isa.name());
    }
}

#[test]
fn scalar_functions_are_correctly_rounded_at_known_points() {
    assert_eq!(scalar::exp(1.0), std::f32::consts::E);
    assert_eq!(scalar::sigmoid(0.0), 0.5);
    assert_eq!(scalar::silu(0.0), 0.0);
    assert_eq!(scalar::tanh(0.5), 0.462_117_16);
    assert!(scalar::sigmoid(f32::NAN).is_nan());
}
