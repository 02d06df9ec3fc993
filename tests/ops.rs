//! Single operations against the reference vectors, on the CPU.

mod common;

use common::{Golden, assert_close, open_golden};
use trunkline::checkpoint::format::{Data, Matrix};
use trunkline::compute::backend::Recurrence;
use trunkline::compute::cpu::{Isa, math, vector};
use trunkline::compute::device::{Cpu, Tensor};
use trunkline::compute::ops::{kda, moe, norm, residual};

/// The gate of single operations.
const OP: f64 = 1e-5;
const SETS: [&str; 2] = ["base", "toggles"];

fn cpu() -> Cpu {
    Cpu::new(2).unwrap()
}

fn tensor(g: &Golden, name: &str, cols: usize) -> Tensor {
    let values = g.f32(name);
    Tensor::from_vec(values.len() / cols, cols, values)
}

#[test]
fn mxfp4_is_bit_exact() {
    for set in SETS {
        let g = Golden::open(set, "ops.safetensors");
        for name in ["sweep", "expert"] {
            let (packed, scale) =
                (g.raw(&format!("mxfp4.{name}.packed")), g.raw(&format!("mxfp4.{name}.scale")));
            let shape = g.shape(&format!("mxfp4.{name}.packed"));
            let (rows, cols) = (shape[0], shape[1] * 2);
            let m = Matrix { rows, cols, data: Data::Mxfp4 { packed: &packed, scale: &scale } };
            assert!(m.is_consistent());
            let expected = g.f32(&format!("mxfp4.{name}.out"));
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                m.widen_row(r, &mut row);
                for (c, (found, want)) in row.iter().zip(&expected[r * cols..]).enumerate() {
                    // Scale byte 255 has no value; such a row never reaches a product.
                    let unspecified = name == "sweep" && r == 255;
                    assert!(
                        unspecified || found.to_bits() == want.to_bits(),
                        "{set} {name}[{r},{c}]: {found} for {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn norms() {
    for set in SETS {
        let g = Golden::open(set, "ops.safetensors");
        let w = g.f32("rmsnorm.w");
        let x = tensor(&g, "rmsnorm.x", w.len());
        let eps = g.f32("rmsnorm.eps")[0];
        let mut y = Tensor::default();
        norm::rmsnorm(&cpu(), &x, &Tensor::from_vec(1, w.len(), w), eps, &mut y);
        assert_close(&format!("{set} rmsnorm"), y.host(), &g.f32("rmsnorm.y"), OP);
        let dim = *g.shape("l2norm.x").last().unwrap();
        let mut x = tensor(&g, "l2norm.x", dim);
        norm::l2norm(&cpu(), &mut x, dim, 1e-6, 1.0);
        assert_close(&format!("{set} l2norm"), x.host(), &g.f32("l2norm.y"), OP);
    }
}

#[test]
fn situ() {
    for set in SETS {
        let g = Golden::open(set, "ops.safetensors");
        let mut gate = g.f32("situ.gate");
        let (beta, linear) = (g.f32("situ.beta")[0], g.f32("situ.linear_beta")[0]);
        math::situ_glu(Isa::detect().unwrap(), &mut gate, &g.f32("situ.up"), beta, linear);
        assert_close(&format!("{set} situ"), &gate, &g.f32("situ.y"), OP);
    }
}

#[test]
fn short_conv_fed_in_two_parts() {
    for set in SETS {
        let g = Golden::open(set, "ops.safetensors");
        let p = g.shape("conv.w")[0];
        let w = g.f32("conv.w");
        let taps = w.len() / p;
        let mut outer = Tensor::zeros(taps, p);
        for c in 0..p {
            for j in 0..taps {
                outer.row_mut(j)[c] = w[c * taps + j];
            }
        }
        let x = g.f32("conv.x");
        let first = Tensor::from_vec(5, p, x[..5 * p].to_vec());
        let second = Tensor::from_vec(1, p, x[5 * p..].to_vec());
        let start = tensor(&g, "conv.state_in", p);
        let (mut y1, mut y2, mut mid, mut end) = <(Tensor, Tensor, Tensor, Tensor)>::default();
        kda::short_conv(&cpu(), &first, &outer, &start, &mut y1, &mut mid);
        kda::short_conv(&cpu(), &second, &outer, &mid, &mut y2, &mut end);
        assert_close(&format!("{set} conv.y"), &[y1.host(), y2.host()].concat(), &g.f32("conv.y"), OP);
        assert_close(&format!("{set} conv.state_mid"), mid.host(), &g.f32("conv.state_mid"), OP);
        assert_close(&format!("{set} conv.state_out"), end.host(), &g.f32("conv.state_out"), OP);
    }
}

#[test]
fn kda_recurrence() {
    for set in SETS {
        let g = Golden::open(set, "ops.safetensors");
        let shape = g.shape("kda.q");
        let (tokens, heads, dim) = (shape[0], shape[1], shape[2]);
        let p = heads * dim;
        let dev = cpu();
        let mut decay = tensor(&g, "kda.z", p);
        let a = g.f32("kda.A_log")[..heads].to_vec();
        let bias = Tensor::from_vec(1, p, g.f32("kda.dt_bias"));
        kda::decay(&dev, &mut decay, &Tensor::from_vec(1, heads, a), &bias, g.f32("kda.lower_bound")[0]);
        let log: Vec<f32> = decay.host().iter().map(|v| v.ln()).collect();
        assert_close(&format!("{set} kda.g"), &log, &g.f32("kda.g"), OP);
        let mut beta = tensor(&g, "kda.beta_logit", heads);
        kda::sigmoid(&dev, &mut beta);
        let (mut q, mut k, v) = (tensor(&g, "kda.q", p), tensor(&g, "kda.k", p), tensor(&g, "kda.v", p));
        norm::l2norm(&dev, &mut q, dim, 1e-6, (dim as f32).sqrt().recip());
        norm::l2norm(&dev, &mut k, dim, 1e-6, 1.0);
        let start = tensor(&g, "kda.S_in", dim);
        let (mut next, mut o) = (Tensor::zeros(p, dim), Tensor::default());
        let r = Recurrence { q: &q, k: &k, v: &v, decay: &decay, beta: &beta };
        kda::recurrence(&dev, &r, &start, &mut next, &mut o);
        assert_eq!(o.rows(), tokens);
        assert_close(&format!("{set} kda.o"), o.host(), &g.f32("kda.o"), OP);
        assert_close(&format!("{set} kda.S_out"), next.host(), &g.f32("kda.S_out"), OP);
        assert_close("the state before", start.host(), &g.f32("kda.S_in"), 0.0);
    }
}

#[test]
fn residual_mix() {
    for set in SETS {
        let g = Golden::open(set, "ops.safetensors");
        let h = g.shape("attn_res.norm_w")[0];
        let folded: Vec<f32> =
            g.f32("attn_res.norm_w").iter().zip(g.f32("attn_res.proj_w")).map(|(n, p)| n * p).collect();
        let w = Tensor::from_vec(1, h, folded);
        let sources: Vec<Tensor> =
            g.f32("attn_res.sources").chunks(3 * h).map(|c| Tensor::from_vec(3, h, c.to_vec())).collect();
        for n in [1, 2, 4] {
            let (mut out, mut probs) = <(Tensor, Tensor)>::default();
            residual::mix(&cpu(), &sources[..n], &w, g.f32("attn_res.eps")[0], &mut out, &mut probs);
            assert_close(
                &format!("{set} attn_res.out{n}"),
                out.host(),
                &g.f32(&format!("attn_res.out{n}")),
                OP,
            );
            assert_close(
                &format!("{set} attn_res.probs{n}"),
                probs.host(),
                &g.f32(&format!("attn_res.probs{n}")),
                OP,
            );
        }
    }
}

#[test]
fn router_ties_go_to_the_lower_index_and_the_bias_only_selects() {
    let dev = cpu();
    let mut logits = Tensor::from_vec(1, 5, vec![0.0, 1.0, 1.0, 1.0, -2.0]);
    let bias = Tensor::from_vec(1, 5, vec![0.0, 0.0, 0.0, 0.0, 5.0]);
    let mut out = moe::Routing::default();
    let router = moe::Router { chosen: 3, renormalize: true, scale: 2.5 };
    moe::route(&dev, &mut logits, &bias, router, &mut out).unwrap();
    assert_eq!(out.experts, [4, 1, 2]);
    let s = |x: f64| 1.0 / (1.0 + (-x).exp());
    let sum = s(-2.0) + 2.0 * s(1.0);
    let expected: Vec<f32> = [s(-2.0), s(1.0), s(1.0)].iter().map(|v| (v / sum * 2.5) as f32).collect();
    assert_close("weights", &out.weights, &expected, OP);
}

#[test]
fn a_router_logit_that_is_not_finite_is_an_error() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = Tensor::from_vec(1, 3, vec![0.0, bad, 1.0]);
        let router = moe::Router { chosen: 2, renormalize: true, scale: 1.0 };
        let r = moe::route(&cpu(), &mut logits, &Tensor::zeros(1, 3), router, &mut moe::Routing::default());
        assert_eq!(r.err().map(|e| e.kind()), Some(trunkline::Kind::NonFinite));
    }
}

#[test]
fn blocks_fed_in_two_parts() {
    for set in SETS {
        common::reference::blocks(set, &open_golden(set).0, OP);
    }
}

#[test]
fn non_finite_values_are_seen_wherever_they_stand() {
    for n in [1, 15, 16, 17, 31, 33, 257, 1757] {
        let clean = vec![1.0f32; n];
        assert!(vector::all_finite(&clean));
        for at in [0, n / 2, n - 1] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = clean.clone();
                x[at] = bad;
                assert!(!vector::all_finite(&x), "{bad} at {at} of {n}");
            }
        }
    }
}
