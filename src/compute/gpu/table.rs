//! The op table: every operation, run on the device against a plain reference on fixed inputs.
//!
//! `compare --ops` prints it, and an adapter's first use runs it: a driver that computes one operation wrongly is refused
//! with the operation's name instead of producing plausible text.

use super::buffer::{GpuSlots, GpuTensor};
use super::device::Gpu;
use super::matrix::GpuMatrix;
use super::ops::kda::{Decay, KdaGate, KdaStep};
use super::ops::mla::{AttendScratch, LatentCache, MlaAttend, MlaShape};
use super::ops::moe::{Route, Routing};
use super::recorder::Recorder;
use super::reference::{self as plain, Stored, noise, widen, worst};
use crate::error::{Error, Result};

/// Largest error of an operation built on sums, products and square roots, as `max|got-want| / max|want|`.
pub const GATE: f64 = 1e-5;
/// Largest error of one that uses exp: WGSL allows exp itself 3 + 2|x| units in the last place.
pub const GATE_EXP: f64 = 3e-5;

/// An operation in the table.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    /// Name; where it has variants, with the variant.
    pub name: &'static str,
    /// What its error must not exceed.
    pub gate: f64,
    run: fn(&Gpu) -> Result<f64>,
}

impl Op {
    /// Runs the operation on `gpu` against its reference.
    ///
    /// # Errors
    /// `Device` when the device fails.
    pub fn run(&self, gpu: &Gpu) -> Result<OpResult> {
        Ok(OpResult { name: self.name, worst: (self.run)(gpu)?, gate: self.gate })
    }
}

/// What came out for one operation.
#[derive(Debug, Clone, PartialEq)]
pub struct OpResult {
    /// The operation.
    pub name: &'static str,
    /// Worst error, NaN when something was not a number.
    pub worst: f64,
    /// Its gate.
    pub gate: f64,
}

impl OpResult {
    /// Whether the error is within the gate; NaN is not.
    pub fn passed(&self) -> bool {
        self.worst <= self.gate
    }
}

/// Every operation. One that returns exact values (moves, integers) has gate 0.
pub const OPS: &[Op] = &[
    Op { name: "embed bf16", gate: 0.0, run: |g| embed(g, Stored::bf16(&noise(1, 40 * 72))) },
    Op { name: "embed mxfp4", gate: 0.0, run: |g| embed_mxfp4(g) },
    Op { name: "matvec f32", gate: GATE, run: |g| product(g, Stored::f32(&noise(2, 37 * 200)), 37, 200, 1) },
    Op {
        name: "matvec bf16",
        gate: GATE,
        run: |g| product(g, Stored::bf16(&noise(3, 37 * 1024)), 37, 1024, 1),
    },
    Op {
        name: "matvec bf16 odd",
        gate: GATE,
        run: |g| product(g, Stored::bf16(&noise(3, 9 * 33)), 9, 33, 1),
    },
    Op { name: "matvec mxfp4", gate: GATE, run: |g| product(g, Stored::mxfp4(4, 37, 1024), 37, 1024, 1) },
    Op { name: "matvec mxfp4 x5", gate: GATE, run: |g| product(g, Stored::mxfp4(5, 37, 256), 37, 256, 5) },
    Op { name: "matmul f32", gate: GATE, run: |g| product(g, Stored::f32(&noise(6, 70 * 200)), 70, 200, 35) },
    Op {
        name: "matmul bf16",
        gate: GATE,
        run: |g| product(g, Stored::bf16(&noise(7, 70 * 136)), 70, 136, 35),
    },
    Op { name: "matmul mxfp4", gate: GATE, run: |g| product(g, Stored::mxfp4(8, 70, 160), 70, 160, 35) },
    Op { name: "rmsnorm", gate: GATE, run: rmsnorm },
    Op { name: "l2norm", gate: GATE, run: l2norm },
    Op { name: "head_norm_gate", gate: GATE_EXP, run: head_norm_gate },
    Op { name: "residual_mix", gate: GATE_EXP, run: residual_mix },
    Op { name: "situ_glu", gate: GATE_EXP, run: situ_glu },
    Op { name: "short_conv", gate: GATE_EXP, run: short_conv },
    Op { name: "kda_gate", gate: GATE_EXP, run: kda_gate },
    Op { name: "kda_step", gate: GATE, run: kda_step },
    Op { name: "mla_attend", gate: GATE_EXP, run: mla_attend },
    Op { name: "router", gate: GATE_EXP, run: router },
    Op { name: "combine", gate: GATE, run: combine },
    Op { name: "add", gate: 0.0, run: add },
    Op { name: "gather_rows", gate: 0.0, run: |g| rows(g, false) },
    Op { name: "scatter_rows", gate: 0.0, run: |g| rows(g, true) },
    Op { name: "argmax", gate: 0.0, run: argmax },
    Op { name: "check_finite", gate: 0.0, run: check_finite },
];

/// Runs the table.
///
/// # Errors
/// `Device` when the device fails; a wrong result is not an error here but an [`OpResult`] that has not passed.
pub fn ops_table(gpu: &Gpu) -> Result<Vec<OpResult>> {
    OPS.iter().map(|op| op.run(gpu)).collect()
}

/// Refuses the adapter when an operation is wrong on it.
///
/// # Errors
/// `Machine`, naming the operations; `Device` when the device fails.
pub fn self_test(gpu: &Gpu) -> Result<()> {
    let wrong: Vec<String> = ops_table(gpu)?
        .iter()
        .filter(|r| !r.passed())
        .map(|r| format!("{} is off by {:.1e} (at most {:.0e})", r.name, r.worst, r.gate))
        .collect();
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Error::machine("the adapter computes wrongly")
        .device(gpu.name())
        .cause(wrong.join(", "))
        .hint("update the driver, or pass --device cpu"))
}

/// Records `body`, runs it, and gives the values of the tensor it names.
fn run(gpu: &Gpu, body: impl FnOnce(&mut Recorder) -> Result<GpuTensor>) -> Result<Vec<f32>> {
    let mut rec = gpu.record("op table");
    let out = body(&mut rec)?;
    let read = rec.read(&out)?;
    rec.submit()?;
    read.values(gpu)
}

fn tensor(gpu: &Gpu, rows: usize, values: &[f32]) -> Result<GpuTensor> {
    GpuTensor::from_slice(gpu, rows, values.len() / rows, values, "input")
}

fn embed(gpu: &Gpu, stored: Stored) -> Result<f64> {
    embed_rows(gpu, stored, 40, 72)
}

fn embed_mxfp4(gpu: &Gpu) -> Result<f64> {
    embed_rows(gpu, Stored::mxfp4(9, 40, 96), 40, 96)
}

fn embed_rows(gpu: &Gpu, stored: Stored, rows: usize, cols: usize) -> Result<f64> {
    let matrix = stored.matrix(rows, cols);
    let w = GpuMatrix::upload(gpu, &matrix, 1, "embedding")?;
    let ids = [39u32, 0, 17, 17];
    let id_tensor = GpuTensor::from_words(gpu, 1, ids.len(), &ids, "ids")?;
    let out = GpuTensor::new(gpu, ids.len(), cols, "rows")?;
    let got = run(gpu, |r| r.embed(&w, &id_tensor, &out).map(|()| out))?;
    let all = plain::widen_matrix(&matrix);
    let want: Vec<f64> = ids.iter().flat_map(|i| widen(&all[*i as usize * cols..][..cols])).collect();
    Ok(worst(&got, &want))
}

fn product(gpu: &Gpu, stored: Stored, rows: usize, cols: usize, tokens: usize) -> Result<f64> {
    let matrix = stored.matrix(rows, cols);
    let w = GpuMatrix::upload(gpu, &matrix, 1, "weight")?;
    let x = noise(10, tokens * cols);
    let before = noise(11, tokens * rows);
    let xt = tensor(gpu, tokens, &x)?;
    let out = tensor(gpu, tokens, &before)?;
    let got = run(gpu, |r| r.matmul_add(&w, &xt, &out).map(|()| out))?;
    let mut want = plain::matmul(&plain::widen_matrix(&matrix), cols, &x);
    want.iter_mut().zip(&before).for_each(|(w, b)| *w += f64::from(*b));
    Ok(worst(&got, &want))
}

fn rmsnorm(gpu: &Gpu) -> Result<f64> {
    let (x, w) = (noise(12, 3 * 257), noise(13, 257));
    let (xt, wt, out) = (tensor(gpu, 3, &x)?, tensor(gpu, 1, &w)?, GpuTensor::new(gpu, 3, 257, "out")?);
    let got = run(gpu, |r| r.rmsnorm(&xt, &wt, 1e-5, &out).map(|()| out))?;
    Ok(worst(&got, &plain::rmsnorm(&widen(&x), &w, f64::from(1e-5f32))))
}

fn l2norm(gpu: &Gpu) -> Result<f64> {
    let x = noise(14, 5 * 100);
    let (xt, out) = (tensor(gpu, 5, &x)?, GpuTensor::new(gpu, 5, 100, "out")?);
    let got = run(gpu, |r| r.l2norm(&xt, 1e-6, 0.125, &out).map(|()| out))?;
    Ok(worst(&got, &plain::l2norm(&widen(&x), 100, f64::from(1e-6f32), 0.125)))
}

fn head_norm_gate(gpu: &Gpu) -> Result<f64> {
    let (o, w, gate) = (noise(15, 6 * 72), noise(16, 72), noise(17, 6 * 72));
    let (ot, wt, gt) = (tensor(gpu, 6, &o)?, tensor(gpu, 1, &w)?, tensor(gpu, 6, &gate)?);
    let out = GpuTensor::new(gpu, 6, 72, "out")?;
    let got = run(gpu, |r| r.head_norm_gate(&ot, &wt, &gt, 1e-5, &out).map(|()| out))?;
    let mut want = plain::rmsnorm(&widen(&o), &w, f64::from(1e-5f32));
    want.iter_mut().zip(&gate).for_each(|(v, g)| *v *= plain::sigmoid(f64::from(*g)));
    Ok(worst(&got, &want))
}

fn residual_mix(gpu: &Gpu) -> Result<f64> {
    let (tokens, h, n) = (2, 150, 5);
    let slots = GpuSlots::new(gpu, n, tokens, h, "sources")?;
    let sources: Vec<Vec<f32>> = (0..n).map(|i| noise(18 + i as u64, tokens * h)).collect();
    for (i, s) in sources.iter().enumerate() {
        slots.slot(i)?.write(gpu, s)?;
    }
    let w = noise(30, h);
    let (wt, out) = (tensor(gpu, 1, &w)?, GpuTensor::new(gpu, tokens, h, "out")?);
    let probs = GpuTensor::new(gpu, tokens, n, "shares")?;
    let got = run(gpu, |r| r.residual_mix(&slots, n, &wt, 1e-5, &out, &probs).map(|()| out))?;
    let wide: Vec<Vec<f64>> = sources.iter().map(|s| widen(s)).collect();
    let refs: Vec<&[f64]> = wide.iter().map(Vec::as_slice).collect();
    let (want, shares) = plain::residual_mix(&refs, &widen(&w), f64::from(1e-5f32));
    Ok(worst(&got, &want).max(worst(&gpu.download(&probs)?, &shares)))
}

fn situ_glu(gpu: &Gpu) -> Result<f64> {
    let wide = |s| noise(s, 333).iter().map(|v| v * 12.0).collect::<Vec<f32>>();
    let (gate, up) = (wide(31), wide(32));
    let (gt, ut, out) = (tensor(gpu, 1, &gate)?, tensor(gpu, 1, &up)?, GpuTensor::new(gpu, 1, 333, "out")?);
    let got = run(gpu, |r| r.situ_glu(&gt, &ut, 4.0, 25.0, &out).map(|()| out))?;
    Ok(worst(&got, &plain::situ_glu(&gate, &up, 4.0, 25.0)))
}

fn short_conv(gpu: &Gpu) -> Result<f64> {
    let (p, tokens) = (75, 4);
    let (u, h, w) = (noise(33, tokens * p), noise(34, 3 * p), noise(35, p * 4));
    let (ut, ht, wt) = (tensor(gpu, tokens, &u)?, tensor(gpu, 3, &h)?, tensor(gpu, p, &w)?);
    let (y, next) = (GpuTensor::new(gpu, tokens, p, "y")?, GpuTensor::new(gpu, 3, p, "next")?);
    let got = run(gpu, |r| r.short_conv(&ut, &ht, &wt, &y, &next).map(|()| y))?;
    let (want, kept) = plain::short_conv(&u, &h, &w, p);
    Ok(worst(&got, &want).max(worst(&gpu.download(&next)?, &widen(&kept))))
}

fn kda_gate(gpu: &Gpu) -> Result<f64> {
    let (tokens, heads, dim) = (3, 5, 24);
    let (z, a, dt, b) =
        (noise(36, tokens * heads * dim), noise(37, 8), noise(38, heads * dim), noise(39, 15));
    let (zt, at, dtt, bt) =
        (tensor(gpu, tokens, &z)?, tensor(gpu, 1, &a)?, tensor(gpu, 1, &dt)?, tensor(gpu, 3, &b)?);
    let g = GpuTensor::new(gpu, tokens, heads * dim, "g")?;
    let beta = GpuTensor::new(gpu, tokens, heads, "beta")?;
    let gate = KdaGate { z: &zt, a_log: &at, dt_bias: &dtt, beta_logit: &bt, lower_bound: -5.0 };
    let got = run(gpu, |r| r.kda_gate(&gate, &g, &beta).map(|()| g.clone()))?;
    let one = |(i, z): (usize, &f32)| {
        let c = i % (heads * dim);
        -5.0 * plain::sigmoid(f64::from(a[c / dim]).exp() * (f64::from(*z) + f64::from(dt[c])))
    };
    let want: Vec<f64> = z.iter().enumerate().map(one).collect();
    let want_beta: Vec<f64> = b.iter().map(|b| plain::sigmoid(f64::from(*b))).collect();
    Ok(worst(&got, &want).max(worst(&gpu.download(&beta)?, &want_beta)))
}

fn kda_step(gpu: &Gpu) -> Result<f64> {
    let (tokens, heads, dk, dv) = (4, 3, 24, 70);
    let unit = |s, n: usize| plain::l2norm(&widen(&noise(s, n)), dk, 0.0, 1.0);
    let f = |v: &[f64]| v.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let (q, k) = (f(&unit(40, tokens * heads * dk)), f(&unit(41, tokens * heads * dk)));
    let v = noise(42, tokens * heads * dv);
    let decay: Vec<f32> = noise(43, tokens * heads * dk).iter().map(|x| 0.5 + 0.5 * x.abs()).collect();
    let beta: Vec<f32> = noise(44, tokens * heads).iter().map(|x| x.abs()).collect();
    let s = noise(45, heads * dk * dv);
    let (qt, kt, vt) = (tensor(gpu, tokens, &q)?, tensor(gpu, tokens, &k)?, tensor(gpu, tokens, &v)?);
    let (dt, bt, st) = (tensor(gpu, tokens, &decay)?, tensor(gpu, tokens, &beta)?, tensor(gpu, heads, &s)?);
    let next = GpuTensor::new(gpu, heads, dk * dv, "state")?;
    let o = GpuTensor::new(gpu, tokens, heads * dv, "o")?;
    let step = KdaStep { heads, q: &qt, k: &kt, v: &vt, decay: Decay::Factor(&dt), beta: &bt, s_in: &st };
    let got = run(gpu, |r| r.kda_step(&step, &next, &o).map(|()| o))?;
    let mut state = widen(&s);
    let reference = plain::Kda {
        dims: (heads, dk, dv),
        q: &widen(&q),
        k: &widen(&k),
        v: &widen(&v),
        decay: &widen(&decay),
        beta: &widen(&beta),
    };
    let want = reference.run(&mut state);
    Ok(worst(&got, &want).max(worst(&gpu.download(&next)?, &state)))
}

fn mla_attend(gpu: &Gpu) -> Result<f64> {
    let shape = MlaShape { heads: 5, rank: 40, nope: 24, rope: 8, value: 20 };
    let MlaShape { heads, rank, nope, rope, value } = shape;
    let (tokens, position) = (3, 300);
    let keys = position + tokens;
    let q = noise(50, tokens * heads * (nope + rope));
    let stored = Stored::bf16(&noise(51, heads * (nope + value) * rank));
    let matrix = stored.matrix(heads * (nope + value), rank);
    let c = noise(52, keys * (rank + rope));
    let w = noise(53, rank);
    let mut cache = LatentCache::new(gpu, shape, keys)?;
    cache.reserve(gpu, keys)?;
    let kv_b = GpuMatrix::upload(gpu, &matrix, nope + value, "kv_b")?;
    let (qt, ct, wt) = (tensor(gpu, tokens, &q)?, tensor(gpu, keys, &c)?, tensor(gpu, 1, &w)?);
    let scratch = AttendScratch::new(gpu, shape, &cache, tokens, keys)?;
    let out = GpuTensor::new(gpu, tokens, heads * value, "o")?;
    let scale = 1.0 / ((nope + rope) as f32).sqrt();
    let got = run(gpu, |r| {
        r.cache_append(&cache, &ct, &wt, 1e-6, 0)?;
        let a = MlaAttend { q: &qt, kv_b: &kv_b, cache: &cache, position, gate: None, scale };
        r.mla_attend(&a, &scratch, &out).map(|()| out)
    })?;
    let raw: Vec<f64> = c.chunks_exact(rank + rope).flat_map(|r| widen(&r[..rank])).collect();
    let latent: Vec<f32> = plain::rmsnorm(&raw, &w, f64::from(1e-6f32)).iter().map(|v| *v as f32).collect();
    let k_rope: Vec<f32> = c.chunks_exact(rank + rope).flat_map(|r| r[rank..].to_vec()).collect();
    let reference = plain::Attention {
        dims: (heads, rank, nope, rope, value),
        q: &q,
        kv_b: &plain::widen_matrix(&matrix),
        latent: &latent,
        k_rope: &k_rope,
        position,
        scale: f64::from(scale),
    };
    Ok(worst(&got, &reference.run()))
}

fn router(gpu: &Gpu) -> Result<f64> {
    let (tokens, experts, chosen) = (4, 200, 16);
    let (logits, bias) = (noise(60, tokens * experts), noise(61, experts));
    let (lt, bt) = (tensor(gpu, tokens, &logits)?, tensor(gpu, 1, &bias)?);
    let out = GpuTensor::new(gpu, tokens, 2 * chosen, "routing")?;
    let route = Route { chosen, renormalize: true, norm_eps: 1e-20, scale: 2.5 };
    run(gpu, |r| r.router(&lt, &bt, &route, &out).map(|()| out.clone()))?;
    let got = Routing::from_words(&gpu.download_words(&out)?, chosen)?;
    let mut err = 0.0f64;
    for (t, (ids, weights)) in plain::route(&logits, &bias, chosen, 2.5).iter().enumerate() {
        let same = if got.experts[t] == *ids { 0.0 } else { f64::NAN };
        let e = worst(&got.weights[t], weights) + same;
        err = if e <= err { err } else { e };
    }
    Ok(err)
}

fn combine(gpu: &Gpu) -> Result<f64> {
    let (tokens, chosen, cols) = (3, 4, 77);
    let parts = noise(62, tokens * chosen * cols);
    let weights: Vec<Vec<f32>> = (0..tokens).map(|t| noise(63 + t as u64, chosen)).collect();
    let routing = Routing { experts: vec![(0..chosen as u32).collect(); tokens], weights };
    let pt = tensor(gpu, tokens * chosen, &parts)?;
    let rt = GpuTensor::from_words(gpu, tokens, 2 * chosen, &routing.to_words(), "routing")?;
    let out = GpuTensor::new(gpu, tokens, cols, "out")?;
    let got = run(gpu, |r| r.combine(&pt, &rt, &out).map(|()| out))?;
    let part = |t: usize, j: usize, c: usize| f64::from(parts[(t * chosen + j) * cols + c]);
    let one = |t: usize, c: usize| {
        (0..chosen).map(|j| f64::from(routing.weights[t][j]) * part(t, j, c)).sum::<f64>()
    };
    let want: Vec<f64> = (0..tokens * cols).map(|i| one(i / cols, i % cols)).collect();
    Ok(worst(&got, &want))
}

fn add(gpu: &Gpu) -> Result<f64> {
    let (x, y) = (noise(66, 1757), noise(67, 1757));
    let (xt, yt) = (tensor(gpu, 1, &x)?, tensor(gpu, 1, &y)?);
    let got = run(gpu, |r| r.add(&xt, &yt).map(|()| yt))?;
    let want: Vec<f64> = x.iter().zip(&y).map(|(a, b)| f64::from(a + b)).collect();
    Ok(worst(&got, &want))
}

fn rows(gpu: &Gpu, scatter: bool) -> Result<f64> {
    let (n, cols) = (6, 33);
    let x = noise(68, n * cols);
    let ids = [4u32, 1, 5];
    let it = GpuTensor::from_words(gpu, 1, ids.len(), &ids, "ids")?;
    if !scatter {
        let (xt, out) = (tensor(gpu, n, &x)?, GpuTensor::new(gpu, ids.len(), cols, "out")?);
        let got = run(gpu, |r| r.gather_rows(&xt, &it, &out).map(|()| out))?;
        let want: Vec<f64> = ids.iter().flat_map(|i| widen(&x[*i as usize * cols..][..cols])).collect();
        return Ok(worst(&got, &want));
    }
    let base = noise(69, n * cols);
    let (xt, out) = (tensor(gpu, ids.len(), &x[..ids.len() * cols])?, tensor(gpu, n, &base)?);
    let got = run(gpu, |r| r.scatter_rows(&xt, &it, &out).map(|()| out))?;
    let mut want = widen(&base);
    for (row, i) in x.chunks_exact(cols).zip(ids) {
        want[i as usize * cols..][..cols].copy_from_slice(&widen(row));
    }
    Ok(worst(&got, &want))
}

fn argmax(gpu: &Gpu) -> Result<f64> {
    let mut x = noise(70, 2 * 1000);
    (x[700], x[300], x[1999]) = (3.0, 3.0, 2.0);
    let xt = tensor(gpu, 2, &x)?;
    let out = GpuTensor::new(gpu, 1, 2, "ids")?;
    run(gpu, |r| r.argmax(&xt, &out).map(|()| out.clone()))?;
    Ok(if gpu.download_words(&out)? == [300, 999] { 0.0 } else { f64::NAN })
}

fn check_finite(gpu: &Gpu) -> Result<f64> {
    let mut x = noise(71, 3000);
    let flags = gpu.finite_flags(2)?;
    let good = tensor(gpu, 1, &x)?;
    (x[2999], x[2500]) = (f32::NAN, f32::NEG_INFINITY);
    let bad = tensor(gpu, 1, &x)?;
    run(gpu, |r| {
        r.check_finite(&good, &flags, 0)?;
        r.check_finite(&bad, &flags, 1).map(|()| flags.clone())
    })?;
    Ok(if gpu.download_words(&flags)? == [u32::MAX, 2500] { 0.0 } else { f64::NAN })
}
