//! Every operation on the device: against the golden vectors, against mirrors of the kernels' orders of sums bit by bit, and
//! on the shapes and values that break kernels elsewhere.

use safetensors::SafeTensors;
use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;
use trunkline::Kind;
use trunkline::compute::gpu::reference::{self as plain, Stored, noise, widen, worst};
use trunkline::compute::gpu::*;

/// Two devices serve all tests: one with every check and NaN in each new buffer, one as a release runs.
fn gpu(checked: bool) -> &'static Gpu {
    static CHECKED: OnceLock<Gpu> = OnceLock::new();
    static PLAIN: OnceLock<Gpu> = OnceLock::new();
    let open = || {
        let options = GpuOptions { allow_software: true, checked, poison: checked, ..Default::default() };
        Gpu::open(options)
            .unwrap_or_else(|e| panic!("{e}; apt-get install -y libvulkan1 mesa-vulkan-drivers"))
    };
    if checked { CHECKED.get_or_init(open) } else { PLAIN.get_or_init(open) }
}

/// A device that may bind 1 MiB at most.
fn narrow() -> Gpu {
    let options =
        GpuOptions { allow_software: true, binding_limit: Some(1 << 20), poison: true, ..Default::default() };
    Gpu::open(options).expect("an adapter")
}

fn tensor(gpu: &Gpu, rows: usize, values: &[f32]) -> GpuTensor {
    GpuTensor::from_slice(gpu, rows, values.len() / rows, values, "input").expect("upload")
}

fn room(gpu: &Gpu, rows: usize, cols: usize) -> GpuTensor {
    GpuTensor::new(gpu, rows, cols, "output").expect("room")
}

/// Records `body`, submits, and gives the values of `out`.
fn run(gpu: &Gpu, out: &GpuTensor, body: impl FnOnce(&mut Recorder) -> trunkline::Result<()>) -> Vec<f32> {
    let mut rec = gpu.record("test");
    body(&mut rec).expect("recorded");
    let read = rec.read(out).expect("read");
    rec.submit().expect("submitted");
    read.values(gpu).expect("values")
}

fn product(gpu: &Gpu, stored: &Stored, rows: usize, cols: usize, x: &[f32]) -> Vec<f32> {
    let w = GpuMatrix::upload(gpu, &stored.matrix(rows, cols), 1, "weight").expect("weight");
    let tokens = x.len() / cols;
    let out = room(gpu, tokens, rows);
    run(gpu, &out, |r| r.matmul(&w, &tensor(gpu, tokens, x), &out))
}

fn within(what: &str, got: &[f32], want: &[f64], gate: f64) {
    let err = worst(got, want);
    println!("{what}: {err:.2e}");
    assert!(err <= gate, "{what}: {err:e} > {gate:e}");
}

fn same_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differ = got.iter().zip(want).filter(|(g, w)| g.to_bits() != w.to_bits()).count();
    assert_eq!(differ, 0, "{what}: {differ} of {} differ", got.len());
}

/// Mirrors round products and sums separately; on a card that fuses they are no mirrors.
fn mirrors_hold(gpu: &Gpu) -> bool {
    let fma = gpu.probe_fma().expect("probe");
    assert!(!gpu.is_software() || !fma.contracts, "a software adapter that contracts: {fma:?}");
    !fma.contracts
}

// ---- the op table ---------------------------------------------------------------------------------------------------

#[test]
fn op_table_passes() {
    for (gpu, name) in [(gpu(true), "checked"), (gpu(false), "plain")] {
        for r in table::ops_table(gpu).expect("table") {
            println!("{name} {}: {:.2e} of {:.0e}", r.name, r.worst, r.gate);
            assert!(r.passed(), "{name}: {r:?}");
        }
    }
}

#[test]
fn op_table_passes_with_narrow_bindings() {
    table::self_test(&narrow()).expect("every op");
}

/// Every shader but the pieces and the probe is named by an entry of the table.
#[test]
fn op_table_is_complete() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
    let parts = ["common", "weights_", "input_", "matmul_params", "probe_fma"];
    let mut seen = 0;
    for file in std::fs::read_dir(folder).expect("shaders").flatten() {
        let name = file.path().file_stem().expect("stem").to_string_lossy().into_owned();
        if parts.iter().any(|p| name.starts_with(p)) {
            continue;
        }
        // Attention is one operation in several kernels; moving rows is two in one.
        let op = match name.as_str() {
            n if n.starts_with("mla_") => "mla_attend",
            "rows" => "gather_rows",
            n => n,
        };
        assert!(table::OPS.iter().any(|o| o.name.starts_with(op)), "{name} is not in the op table");
        seen += 1;
    }
    assert!(seen >= 15, "{seen}");
}

// ---- golden vectors --------------------------------------------------------------------------------------------------

struct Golden(HashMap<String, (Vec<usize>, Vec<u8>)>);

impl Golden {
    fn open(folder: &str) -> Golden {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/goldens").join(folder);
        let bytes = std::fs::read(path.join("ops.safetensors")).expect("golden vectors");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let all = file.tensors().into_iter();
        Golden(all.map(|(n, t)| (n, (t.shape().to_vec(), t.data().to_vec()))).collect())
    }
    fn bytes(&self, name: &str) -> &[u8] {
        &self.0[name].1
    }
    fn shape(&self, name: &str) -> &[usize] {
        &self.0[name].0
    }
    fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name).chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
    }
    fn f64(&self, name: &str) -> Vec<f64> {
        widen(&self.f32(name))
    }
}

const FOLDERS: [&str; 2] = ["base", "toggles"];

#[test]
fn golden_mxfp4_is_bit_exact() {
    for gpu in [gpu(true), gpu(false)] {
        for folder in FOLDERS {
            let g = Golden::open(folder);
            for (name, skip) in [("mxfp4.sweep", Some(255)), ("mxfp4.expert", None)] {
                let shape = g.shape(&format!("{name}.out"));
                let (rows, cols) = (shape[0], shape[1]);
                let stored = Stored::Mxfp4(
                    g.bytes(&format!("{name}.packed")).to_vec(),
                    g.bytes(&format!("{name}.scale")).to_vec(),
                );
                let w = GpuMatrix::upload(gpu, &stored.matrix(rows, cols), 1, name).expect("upload");
                let ids: Vec<u32> = (0..rows as u32).collect();
                let ids = GpuTensor::from_words(gpu, 1, rows, &ids, "ids").expect("ids");
                let out = room(gpu, rows, cols);
                let got = run(gpu, &out, |r| r.embed(&w, &ids, &out));
                let want = g.f32(&format!("{name}.out"));
                let mut compared = 0;
                for (i, (a, b)) in got.iter().zip(&want).enumerate() {
                    // An adapter may flush what is below the normal range; this one is asked to be exact if it keeps it.
                    let flushed = b.abs() < f32::MIN_POSITIVE && *a == 0.0;
                    if Some(i / cols) == skip || (flushed && !gpu.is_software()) {
                        continue;
                    }
                    assert_eq!(
                        a.to_bits(),
                        b.to_bits(),
                        "{folder} {name} row {} column {}",
                        i / cols,
                        i % cols
                    );
                    compared += 1;
                }
                assert!(compared >= (rows - 1) * cols, "{compared}");
            }
        }
    }
}

/// The product with each unit vector is the column of the dequantised weight.
#[test]
fn golden_mxfp4_through_products() {
    let g = Golden::open("base");
    let (rows, cols) = (96, 64);
    let stored =
        Stored::Mxfp4(g.bytes("mxfp4.expert.packed").to_vec(), g.bytes("mxfp4.expert.scale").to_vec());
    let want = g.f32("mxfp4.expert.out");
    let mut unit = vec![0.0; cols * cols];
    (0..cols).for_each(|i| unit[i * cols + i] = 1.0);
    for tokens in [1, 4, cols] {
        for (first, x) in unit.chunks_exact(tokens * cols).enumerate() {
            let got = product(gpu(false), &stored, rows, cols, x);
            for t in 0..tokens {
                for r in 0..rows {
                    assert_eq!(got[t * rows + r], want[r * cols + first * tokens + t], "{tokens} {r}");
                }
            }
        }
    }
}

#[test]
fn golden_norms_and_situ() {
    for gpu in [gpu(true), gpu(false)] {
        for folder in FOLDERS {
            let g = Golden::open(folder);
            let h = g.shape("rmsnorm.x")[1];
            let out = room(gpu, 4, h);
            let (x, w) = (tensor(gpu, 4, &g.f32("rmsnorm.x")), tensor(gpu, 1, &g.f32("rmsnorm.w")));
            let got = run(gpu, &out, |r| r.rmsnorm(&x, &w, g.f32("rmsnorm.eps")[0], &out));
            within("rmsnorm", &got, &g.f64("rmsnorm.y"), 1e-5);

            let x = tensor(gpu, 3, &g.f32("l2norm.x"));
            let out = room(gpu, 3, x.cols);
            let got = run(gpu, &out, |r| r.l2norm(&x, 1e-6, 1.0, &out));
            within("l2norm", &got, &g.f64("l2norm.y"), 1e-5);

            let (gate, up) = (tensor(gpu, 1, &g.f32("situ.gate")), tensor(gpu, 1, &g.f32("situ.up")));
            let out = room(gpu, 1, 64);
            let (beta, linear) = (g.f32("situ.beta")[0], g.f32("situ.linear_beta")[0]);
            let got = run(gpu, &out, |r| r.situ_glu(&gate, &up, beta, linear, &out));
            within("situ", &got, &g.f64("situ.y"), 3e-5);
        }
    }
}

#[test]
fn golden_conv_in_two_passes() {
    let gpu = gpu(true);
    for folder in FOLDERS {
        let g = Golden::open(folder);
        let p = g.shape("conv.x")[1];
        let w = tensor(gpu, p, &g.f32("conv.w"));
        let x = g.f32("conv.x");
        let before = tensor(gpu, 3, &g.f32("conv.state_in"));
        let (mid, after) = (room(gpu, 3, p), room(gpu, 3, p));
        let (y5, y1) = (room(gpu, 5, p), room(gpu, 1, p));
        let (u5, u1) = (tensor(gpu, 5, &x[..5 * p]), tensor(gpu, 1, &x[5 * p..]));
        let mut got = run(gpu, &y5, |r| {
            r.short_conv(&u5, &before, &w, &y5, &mid)?;
            r.short_conv(&u1, &mid, &w, &y1, &after)
        });
        got.extend(gpu.download(&y1).expect("y"));
        within("conv", &got, &g.f64("conv.y"), 3e-5);
        same_bits("conv state", &gpu.download(&mid).expect("mid"), &g.f32("conv.state_mid"));
        same_bits("conv state", &gpu.download(&after).expect("after"), &g.f32("conv.state_out"));
    }
}

#[test]
fn golden_kda() {
    for gpu in [gpu(true), gpu(false)] {
        for folder in FOLDERS {
            let g = Golden::open(folder);
            let shape = g.shape("kda.q").to_vec();
            let (t, n, d) = (shape[0], shape[1], shape[2]);
            let at = |name: &str| tensor(gpu, t, &g.f32(&format!("kda.{name}")));
            let [q, k, v, z, logit] = ["q", "k", "v", "z", "beta_logit"].map(at);
            let heads_of = |x: &GpuTensor| x.reshape(t * n, d).expect("heads");
            let [qn, kn, decay, o] = [(); 4].map(|()| room(gpu, t, n * d));
            let beta = room(gpu, t, n);
            let s_in = tensor(gpu, n, &g.f32("kda.S_in"));
            let s_out = room(gpu, n, d * d);
            let a_log = tensor(gpu, 1, &g.f32("kda.A_log"));
            let dt_bias = tensor(gpu, 1, &g.f32("kda.dt_bias"));
            let gate = KdaGate {
                z: &z,
                a_log: &a_log,
                dt_bias: &dt_bias,
                beta_logit: &logit,
                lower_bound: g.f32("kda.lower_bound")[0],
            };
            let got = run(gpu, &o, |r| {
                r.l2norm(&heads_of(&q), 1e-6, 1.0 / (d as f32).sqrt(), &heads_of(&qn))?;
                r.l2norm(&heads_of(&k), 1e-6, 1.0, &heads_of(&kn))?;
                r.kda_gate(&gate, &decay, &beta)?;
                let step = KdaStep {
                    heads: n,
                    q: &qn,
                    k: &kn,
                    v: &v,
                    decay: Decay::Log(&decay),
                    beta: &beta,
                    s_in: &s_in,
                };
                r.kda_step(&step, &s_out, &o)
            });
            within("kda o", &got, &g.f64("kda.o"), 3e-5);
            within("kda g", &gpu.download(&decay).expect("g"), &g.f64("kda.g"), 3e-5);
            within("kda S", &gpu.download(&s_out).expect("S"), &g.f64("kda.S_out"), 3e-5);
            same_bits("S_in is left", &gpu.download(&s_in).expect("S"), &g.f32("kda.S_in"));
        }
    }
}

#[test]
fn golden_residual_mix() {
    let gpu = gpu(true);
    for folder in FOLDERS {
        let g = Golden::open(folder);
        let h = g.shape("attn_res.sources")[2];
        let sources = g.f32("attn_res.sources");
        let slots = GpuSlots::new(gpu, 4, 3, h, "sources").expect("slots");
        let folded: Vec<f32> =
            g.f32("attn_res.norm_w").iter().zip(g.f32("attn_res.proj_w")).map(|(a, b)| a * b).collect();
        let w = tensor(gpu, 1, &folded);
        for n in [1, 2, 4] {
            for (i, s) in sources.chunks_exact(3 * h).take(n).enumerate() {
                slots.slot(i).expect("slot").write(gpu, s).expect("write");
            }
            let (out, probs) = (room(gpu, 3, h), room(gpu, 3, n));
            let eps = g.f32("attn_res.eps")[0];
            let got = run(gpu, &out, |r| r.residual_mix(&slots, n, &w, eps, &out, &probs));
            within("mix", &got, &g.f64(&format!("attn_res.out{n}")), 3e-5);
            let shares = gpu.download(&probs).expect("shares");
            within("shares", &shares, &g.f64(&format!("attn_res.probs{n}")), 3e-5);
        }
    }
}

// ---- bits ------------------------------------------------------------------------------------------------------------

type Weights = (&'static str, fn(u64, usize, usize) -> Stored);
const FORMATS: [Weights; 3] = [
    ("f32", |s, r, c| Stored::f32(&noise(s, r * c))),
    ("bf16", |s, r, c| Stored::bf16(&noise(s, r * c))),
    ("mxfp4", Stored::mxfp4),
];

#[test]
fn products_are_their_mirrors_bit_for_bit() {
    for gpu in [gpu(true), gpu(false)] {
        if !mirrors_hold(gpu) {
            continue;
        }
        for (name, make) in FORMATS {
            for (rows, cols) in [(5, 64), (33, 1024), (6, 2112), (9, if name == "mxfp4" { 96 } else { 257 })]
            {
                let stored = make(7, rows, cols);
                let matrix = stored.matrix(rows, cols);
                let x = noise(8, 11 * cols);
                // The sum's order is the same for one token and a few; the tile has its own.
                for tokens in [1, 5] {
                    let got = product(gpu, &stored, rows, cols, &x[..tokens * cols]);
                    for (t, row) in got.chunks_exact(rows).enumerate() {
                        let want = plain::mirror_matvec(&matrix, &x[t * cols..][..cols]);
                        same_bits(&format!("{name} {rows}x{cols} token {t} of {tokens}"), row, &want);
                    }
                }
                let got = product(gpu, &stored, rows, cols, &x);
                for (t, row) in got.chunks_exact(rows).enumerate() {
                    let want = plain::mirror_matmul(&matrix, &x[t * cols..][..cols]);
                    same_bits(&format!("{name} tile {rows}x{cols} token {t}"), row, &want);
                }
            }
        }
    }
}

#[test]
fn rmsnorm_is_its_mirror_bit_for_bit() {
    for gpu in [gpu(true), gpu(false)] {
        if !mirrors_hold(gpu) {
            continue;
        }
        for n in [1, 31, 257, 1757, 7168] {
            let (x, w) = (noise(20, 2 * n), noise(21, n));
            let out = room(gpu, 2, n);
            let (xt, wt) = (tensor(gpu, 2, &x), tensor(gpu, 1, &w));
            let got = run(gpu, &out, |r| r.rmsnorm(&xt, &wt, 1e-5, &out));
            same_bits(&format!("rmsnorm {n}"), &got, &plain::mirror_rmsnorm(&x, &w, 1e-5));
        }
    }
}

#[test]
fn kda_step_is_its_mirror_bit_for_bit() {
    for gpu in [gpu(true), gpu(false)] {
        if !mirrors_hold(gpu) {
            continue;
        }
        let (t, n, dk, dv) = (6, 2, 128, 128);
        let small = |s, len| noise(s, len).iter().map(|x| x * 0.1).collect::<Vec<f32>>();
        let (q, k, v) = (small(30, t * n * dk), small(31, t * n * dk), noise(32, t * n * dv));
        let decay: Vec<f32> = noise(33, t * n * dk).iter().map(|x| x.abs()).collect();
        let beta: Vec<f32> = noise(34, t * n).iter().map(|x| x.abs()).collect();
        let mut s = noise(35, n * dk * dv);
        let [qt, kt, vt, dt, bt] = [&q, &k, &v, &decay, &beta].map(|x| tensor(gpu, t, x));
        let (st, next, o) = (tensor(gpu, n, &s), room(gpu, n, dk * dv), room(gpu, t, n * dv));
        let step =
            KdaStep { heads: n, q: &qt, k: &kt, v: &vt, decay: Decay::Factor(&dt), beta: &bt, s_in: &st };
        let got = run(gpu, &o, |r| r.kda_step(&step, &next, &o));
        let want = plain::mirror_kda((n, dk, dv), [&q, &k, &v, &decay, &beta], &mut s);
        same_bits("kda o", &got, &want);
        same_bits("kda state", &gpu.download(&next).expect("state"), &s);
    }
}

/// C22: split over several buffers, a weight gives the same bits.
#[test]
fn c22_narrow_bindings_give_the_same_bits() {
    let narrow = narrow();
    for (name, make) in FORMATS {
        let (rows, cols) = (2300, 1024);
        let stored = make(40, rows, cols);
        let w = GpuMatrix::upload(&narrow, &stored.matrix(rows, cols), 1, name).expect("split");
        assert!(w.chunk_count() > 1, "{name}");
        for tokens in [1, 3, 12] {
            let x = noise(41, tokens * cols);
            let wide = product(gpu(false), &stored, rows, cols, &x);
            same_bits(name, &product(&narrow, &stored, rows, cols, &x), &wide);
        }
    }
}

#[test]
fn runs_repeat_their_bits() {
    let stored = Stored::bf16(&noise(42, 300 * 512));
    let x = noise(43, 512);
    let once = product(gpu(false), &stored, 300, 512, &x);
    same_bits("again", &product(gpu(false), &stored, 300, 512, &x), &once);
}

// ---- shapes ----------------------------------------------------------------------------------------------------------

/// C21: lengths that are no multiple of a tile, in either dimension and in tokens.
#[test]
fn c21_odd_shapes() {
    let gpu = gpu(true);
    for (name, make) in FORMATS {
        for n in [1, 31, 33, 257, 1757] {
            // Odd rows; odd columns where the form has them.
            let odd_cols = if name == "mxfp4" { 32 * (1 + n % 3) } else { n };
            for (rows, cols) in [(n, 64), (7, odd_cols)] {
                let stored = make(50, rows, cols);
                for tokens in if n > 300 { vec![1] } else { vec![1, 2, 9, 33] } {
                    let x = noise(51, tokens * cols);
                    let got = product(gpu, &stored, rows, cols, &x);
                    let want = plain::matmul(&plain::widen_matrix(&stored.matrix(rows, cols)), cols, &x);
                    // One value may cancel to near nothing: the gate is on the sum of magnitudes there.
                    let magnitudes = |v: &[f32]| v.iter().map(|x| x.abs()).collect::<Vec<f32>>();
                    let all = magnitudes(&plain::widen_matrix(&stored.matrix(rows, cols)));
                    let bound = plain::matmul(&all, cols, &magnitudes(&x));
                    for ((g, w), b) in got.iter().zip(&want).zip(&bound) {
                        let err = (f64::from(*g) - w).abs();
                        assert!(err <= 2e-6 * b, "{name} {rows}x{cols} x{tokens}: {g} {w}");
                    }
                }
            }
        }
    }
    for n in [1, 31, 33, 257, 1757] {
        let (x, y, w) = (noise(52, n), noise(53, n), noise(54, n));
        let out = room(gpu, 1, n);
        let got = run(gpu, &out, |r| r.rmsnorm(&tensor(gpu, 1, &x), &tensor(gpu, 1, &w), 1e-5, &out));
        within("rmsnorm", &got, &plain::rmsnorm(&widen(&x), &w, f64::from(1e-5f32)), 1e-5);
        let got = run(gpu, &out, |r| r.situ_glu(&tensor(gpu, 1, &x), &tensor(gpu, 1, &y), 4.0, 25.0, &out));
        within("situ", &got, &plain::situ_glu(&x, &y, 4.0, 25.0), 3e-5);
        let ids = room(gpu, 1, 1);
        run(gpu, &ids, |r| r.argmax(&tensor(gpu, 1, &x), &ids));
        let best = (0..n).max_by(|a, b| x[*a].total_cmp(&x[*b])).expect("one");
        assert_eq!(gpu.download_words(&ids).expect("id"), [best as u32]);
    }
}

/// C23: more rows than a dispatch has groups in one dimension, and more elements.
#[test]
fn c23_more_groups_than_a_dimension_has() {
    for (rows, gpu) in [(65_537, gpu(true)), (70_000, gpu(false)), (300_001, gpu(false))] {
        let cols = 32;
        let stored = Stored::mxfp4(60, rows, cols);
        let x = noise(61, cols);
        let got = product(gpu, &stored, rows, cols, &x);
        let matrix = stored.matrix(rows, cols);
        for r in [0, 1, 65_534, 65_535, 65_536, rows - 2, rows - 1] {
            let want = plain::mirror_matvec(&matrix.row_range(r, 1), &x)[0];
            assert!(
                (got[r] - want).abs() <= 1e-6 * want.abs().max(1e-3),
                "{rows} row {r}: {} {want}",
                got[r]
            );
        }
        assert!(got.iter().all(|v| v.is_finite()));
    }
    // Norms have a group a row.
    let gpu = gpu(true);
    let x = noise(62, 70_000 * 3);
    let out = room(gpu, 70_000, 3);
    let got = run(gpu, &out, |r| r.rmsnorm(&tensor(gpu, 70_000, &x), &tensor(gpu, 1, &[1.0; 3]), 1e-5, &out));
    within("70000 rows", &got, &plain::rmsnorm(&widen(&x), &[1.0; 3], f64::from(1e-5f32)), 1e-5);
}

/// C20: both nibbles differ, few rows, the scale bytes at the ends of their range.
#[test]
fn c20_mxfp4_scales_and_few_rows() {
    let gpu = gpu(true);
    for rows in 1..=9 {
        let Stored::Mxfp4(packed, _) = Stored::mxfp4(70, rows, 64) else { panic!("mxfp4") };
        let scales: Vec<u8> = (0..rows * 2).map(|i| [1, 127, 0, 200, 64, 130, 127][i % 7]).collect();
        let stored = Stored::Mxfp4(packed, scales);
        let matrix = stored.matrix(rows, 64);
        let x = noise(71, 64);
        let got = product(gpu, &stored, rows, 64, &x);
        for (r, (g, w)) in got.iter().zip(plain::matmul(&plain::widen_matrix(&matrix), 64, &x)).enumerate() {
            let top = plain::widen_matrix(&matrix.row_range(r, 1)).iter().fold(0.0f32, |m, v| m.max(v.abs()));
            assert!((f64::from(*g) - w).abs() <= 1e-5 * f64::from(top) + 1e-37, "{rows} row {r}: {g} {w}");
        }
    }
    // 254 makes values that overflow; 255 is no number: neither may come out as one.
    for (scale, ok) in [(254u8, f32::is_infinite as fn(f32) -> bool), (255, f32::is_nan)] {
        let stored = Stored::Mxfp4(vec![0x77; 16], vec![scale]);
        let got = product(gpu, &stored, 1, 32, &[1.0; 32]);
        assert!(ok(got[0]), "scale {scale}: {}", got[0]);
    }
}

#[test]
fn embedding_rows_from_every_chunk() {
    let gpu = narrow();
    let (rows, cols) = (9000, 100);
    let stored = Stored::bf16(&noise(80, rows * cols));
    let w = GpuMatrix::upload(&gpu, &stored.matrix(rows, cols), 1, "embedding").expect("split");
    assert!(w.chunk_count() > 1);
    let ids = [0u32, 8999, 4500, 4500, 5041, 5042];
    let out = room(&gpu, ids.len(), cols);
    let id_tensor = GpuTensor::from_words(&gpu, 1, ids.len(), &ids, "ids").expect("ids");
    let got = run(&gpu, &out, |r| r.embed(&w, &id_tensor, &out));
    for (row, id) in got.chunks_exact(cols).zip(ids) {
        let mut want = vec![0.0; cols];
        stored.matrix(rows, cols).widen_row(id as usize, &mut want);
        same_bits(&format!("row {id}"), row, &want);
    }
}

#[test]
fn residual_products_add_to_what_is_there() {
    let gpu = gpu(true);
    let stored = Stored::bf16(&noise(81, 40 * 64));
    let w = GpuMatrix::upload(gpu, &stored.matrix(40, 64), 1, "w").expect("w");
    for tokens in [1, 4, 20] {
        let (x, y) = (noise(82, tokens * 64), noise(83, tokens * 40));
        let out = tensor(gpu, tokens, &y);
        let xt = tensor(gpu, tokens, &x);
        let got = run(gpu, &out, |r| r.matmul_add(&w, &xt, &out));
        let alone = product(gpu, &stored, 40, 64, &x);
        let want: Vec<f32> = y.iter().zip(alone).map(|(y, p)| y + p).collect();
        same_bits("residual", &got, &want);
    }
}

// ---- attention -------------------------------------------------------------------------------------------------------

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
        let mut cache = LatentCache::new(gpu, self.shape).expect("cache");
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
    let mut cache = LatentCache::new(&narrow, shape).expect("cache");
    cache.reserve(&narrow, 1540).expect("room");
    assert!(cache.chunks().len() > 1);
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

// ---- values that are not finite, ties --------------------------------------------------------------------------------

#[test]
fn c18_values_that_are_not_finite_are_found() {
    for gpu in [gpu(true), gpu(false)] {
        for n in [1, 31, 33, 257, 1757, 65_537] {
            let good = noise(100, n);
            let flags = gpu.finite_flags(8).expect("flags");
            let mut bad =
                [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, f32::from_bits(0x7f80_0001)]
                    .map(|v| {
                        let mut x = good.clone();
                        x[n - 1] = v;
                        x
                    })
                    .to_vec();
            bad.push(vec![f32::MAX; n]);
            bad.push(good);
            let tensors: Vec<GpuTensor> = bad.iter().map(|x| tensor(gpu, 1, x)).collect();
            run(gpu, &flags, |r| {
                tensors.iter().enumerate().try_for_each(|(i, x)| r.check_finite(x, &flags, i))
            });
            let last = n as u32 - 1;
            let none = u32::MAX;
            let got = gpu.download_words(&flags).expect("flags");
            assert_eq!(got, [last, last, last, last, last, none, none, none], "{n}");
        }
        // The next token is unaffected: nothing sticks to the device.
        gpu.check().expect("well");
    }
}

#[test]
fn c18_argmax_and_router_hide_no_nan() {
    let gpu = gpu(true);
    let mut x = noise(101, 3 * 500);
    x[700] = f32::NAN;
    x[1400] = f32::INFINITY;
    let (xt, ids) = (tensor(gpu, 3, &x), room(gpu, 1, 3));
    run(gpu, &ids, |r| r.argmax(&xt, &ids));
    let got = gpu.download_words(&ids).expect("ids");
    assert!(got[0] < 500 && got[1] == u32::MAX && got[2] == u32::MAX, "{got:?}");

    let route = Route { chosen: 8, renormalize: true, norm_eps: 1e-20, scale: 1.0 };
    let bias = tensor(gpu, 1, &noise(102, 500));
    let out = room(gpu, 3, 16);
    run(gpu, &out, |r| r.router(&xt, &bias, &route, &out));
    let words = gpu.download_words(&out).expect("words");
    let e = Routing::from_words(&words, 8).expect_err("token 1 has a NaN");
    assert_eq!((e.kind(), e.place().position), (Kind::NonFinite, Some(1)));
    assert!(Routing::from_words(&words[..16], 8).is_ok(), "token 0 is routed");
}

#[test]
fn router_ties_go_to_the_lower_index() {
    let gpu = gpu(true);
    let mut logits = vec![0.5f32; 300];
    logits[299] = 0.6;
    let (lt, bias, out) = (tensor(gpu, 1, &logits), tensor(gpu, 1, &[0.0; 300]), room(gpu, 1, 10));
    let route = Route { chosen: 5, renormalize: true, norm_eps: 1e-20, scale: 1.0 };
    run(gpu, &out, |r| r.router(&lt, &bias, &route, &out));
    let got = Routing::from_words(&gpu.download_words(&out).expect("words"), 5).expect("finite");
    assert_eq!(got.experts[0], [299, 0, 1, 2, 3]);
    let sum: f32 = got.weights[0].iter().sum();
    assert!((sum - 1.0).abs() <= 1e-6, "{sum}");
    // The bias decides the choice and is no part of the weight.
    let mut pull = vec![0.0; 300];
    pull[150] = 9.0;
    let bias = tensor(gpu, 1, &pull);
    run(gpu, &out, |r| r.router(&lt, &bias, &Route { renormalize: false, ..route }, &out));
    let got = Routing::from_words(&gpu.download_words(&out).expect("words"), 5).expect("finite");
    assert_eq!(got.experts[0], [150, 299, 0, 1, 2]);
    assert!((f64::from(got.weights[0][0]) - plain::sigmoid(0.5)).abs() <= 1e-6);
}

#[test]
fn extreme_inputs_of_gates() {
    let gpu = gpu(true);
    let gate =
        [-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.15];
    let up = [1.0f32; 11];
    let out = room(gpu, 1, 11);
    let got = run(gpu, &out, |r| r.situ_glu(&tensor(gpu, 1, &gate), &tensor(gpu, 1, &up), 4.0, 25.0, &out));
    let want = plain::situ_glu(&gate, &up, 4.0, 25.0);
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        if i == 9 {
            assert!(g.is_nan());
        } else {
            assert!((f64::from(*g) - w).abs() <= 3e-5, "gate {}: {g} {w}", gate[i]);
        }
    }
}

// ---- recording -------------------------------------------------------------------------------------------------------

#[test]
fn passes_are_named_and_timed() {
    let options = GpuOptions { allow_software: true, gpu_debug: true, ..Default::default() };
    let gpu = Gpu::open(options).expect("an adapter");
    let x = tensor(&gpu, 1, &noise(110, 1000));
    let y = tensor(&gpu, 1, &noise(111, 1000));
    let mut rec = gpu.record("timed");
    rec.time_passes();
    for layer in 0..3 {
        rec.scope(&format!("layer {layer}"), |r| {
            r.scope("moe", |r| (0..500).try_for_each(|_| r.add(&x, &y)))
        })
        .expect("recorded");
    }
    assert_eq!(rec.dispatches(), 1500);
    let done = rec.submit().expect("submitted");
    done.wait(&gpu).expect("done");
    let times = done.pass_times(&gpu).expect("times");
    assert_eq!(times.len(), if gpu.has_timestamps() { 1500 } else { 0 });
    assert!(times.iter().all(|t| t.label.starts_with("layer ") && t.label.ends_with(" / moe / add")));
    assert!(times.windows(2).all(|w| w[0].begin_ns <= w[1].begin_ns), "in order");
    assert!(times.iter().any(|t| t.ns > 0) || times.is_empty());
    let want: Vec<f32> =
        noise(110, 1000).iter().zip(noise(111, 1000)).map(|(x, y)| (0..1500).fold(y, |s, _| s + x)).collect();
    same_bits("1500 additions", &gpu.download(&y).expect("y"), &want);
}

#[test]
fn a_failed_scope_leaves_the_recorder_whole() {
    let gpu = gpu(true);
    let (x, y) = (tensor(gpu, 1, &[1.0; 8]), tensor(gpu, 1, &[2.0; 8]));
    let wrong = tensor(gpu, 1, &[0.0; 4]);
    let got = run(gpu, &y, |r| {
        assert!(r.scope("layer 0", |r| r.add(&x, &wrong)).is_err());
        r.scope("layer 1", |r| r.add(&x, &y))
    });
    assert_eq!(got, [3.0; 8]);
}

#[test]
fn uploads_of_every_size_arrive() {
    let gpu = gpu(false);
    // Through wgpu's own staging, one staging buffer, several, and rows that are padded.
    for n in [1, 16_384, 16_385, (1 << 20) - 1, (1 << 20) + 1, 4_000_003] {
        let x = noise(120, n);
        same_bits(&format!("{n}"), &gpu.download(&tensor(gpu, 1, &x)).expect("back"), &x);
    }
    let (rows, cols) = (4099, 1031);
    let stored = Stored::bf16(&noise(121, rows * cols));
    let w = GpuMatrix::upload(gpu, &stored.matrix(rows, cols), 1, "padded").expect("upload");
    let ids = GpuTensor::from_words(gpu, 1, 2, &[4098, 2033], "ids").expect("ids");
    let out = room(gpu, 2, cols);
    let got = run(gpu, &out, |r| r.embed(&w, &ids, &out));
    let mut want = vec![0.0; cols];
    stored.matrix(rows, cols).widen_row(4098, &mut want);
    same_bits("last padded row", &got[..cols], &want);
    let e = w.fill(gpu, &stored.matrix(rows, cols).row_range(0, 4098)).expect_err("another shape");
    assert_eq!((e.kind(), e.place().tensor.as_deref()), (Kind::Refused, Some("padded")));
}
