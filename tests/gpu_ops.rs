//! Every operation on the device: against mirrors of the kernels' orders of sums bit by bit, and on the shapes and values that
//! break kernels elsewhere.

mod gpu_common;

use gpu_common::*;
use std::path::Path;
use trunkline::Kind;
use trunkline::compute::gpu::reference::{self as plain, Stored, noise, widen};
use trunkline::compute::gpu::*;

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

/// The subgroup variants, where the adapter has subgroups; elsewhere the base kernels run and pass as well.
#[test]
fn subgroup_variants_agree_with_the_base() {
    let options = GpuOptions { allow_software: true, subgroups: true, ..Default::default() };
    let with = Gpu::open(options).expect("an adapter");
    assert_eq!(with.uses_subgroups(), with.adapter().features.contains(&"subgroups"));
    assert!(!gpu(false).uses_subgroups(), "not unless asked for");
    for (name, make) in FORMATS {
        for (rows, cols) in [(1, 32), (37, 1024), (257, 2080)] {
            let stored = make(130, rows, cols);
            for tokens in [1, 6] {
                let x = noise(131, tokens * cols);
                let base = product(gpu(false), &stored, rows, cols, &x);
                let what = format!("{name} {rows}x{cols} x{tokens}");
                within(&what, &product(&with, &stored, rows, cols, &x), &widen(&base), 1e-6);
            }
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
    let parts = ["common", "weights_", "input_", "reduce_", "matmul_params", "probe_fma"];
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

// ---- bits ------------------------------------------------------------------------------------------------------------

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

#[test]
fn copies_and_clears() {
    let gpu = gpu(true);
    let slots = GpuSlots::new(gpu, 3, 2, 33, "slots").expect("slots");
    let (a, b) = (slots.slot(0).expect("slot"), slots.slot(2).expect("slot"));
    let x = noise(140, 66);
    let xt = tensor(gpu, 2, &x);
    let got = run(gpu, &b, |r| {
        assert!(r.copy(&a, &b).is_err(), "one buffer");
        assert!(r.copy(&tensor(gpu, 1, &[0.0; 67]), &b).is_err(), "too long");
        r.clear(&a);
        r.copy(&xt, &b)
    });
    same_bits("copied", &got, &x);
    assert_eq!(gpu.download(&a).expect("a"), [0.0; 66]);
    // The slot between was touched by neither.
    assert!(gpu.download(&slots.slot(1).expect("slot")).expect("b").iter().all(|v| v.is_nan()));
}
