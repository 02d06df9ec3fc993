// Per row the column of the largest value, the lowest where several are equal; 0xffffffff when a value is not finite. A
// group of 128 lanes a row.
struct Params {
    rows: u32,
    cols: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<u32>;

var<workgroup> best: array<f32, 128>;
var<workgroup> best_id: array<u32, 128>;
var<workgroup> bad: atomic<u32>;

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group_id(wid, nwg);
    if (row >= p.rows) {
        return;
    }
    if (lane == 0u) {
        atomicStore(&bad, 0u);
    }
    workgroupBarrier();
    var value = 0.0;
    var id = 0xffffffffu;
    for (var c = lane; c < p.cols; c += 128u) {
        let v = x[row * p.cols + c];
        if (!is_finite(v)) {
            atomicStore(&bad, 1u);
        }
        if (id == 0xffffffffu || v > value) {
            value = v;
            id = c;
        }
    }
    best[lane] = value;
    best_id[lane] = id;
    for (var half = 64u; half > 0u; half = half >> 1u) {
        workgroupBarrier();
        if (lane < half) {
            let other = best[lane + half];
            let other_id = best_id[lane + half];
            // A lane that saw no column has id 0xffffffff and no value.
            let better = other > best[lane] || (other == best[lane] && other_id < best_id[lane]);
            if (other_id != 0xffffffffu && (best_id[lane] == 0xffffffffu || better)) {
                best[lane] = other;
                best_id[lane] = other_id;
            }
        }
    }
    workgroupBarrier();
    if (lane == 0u) {
        out[row] = select(best_id[0], 0xffffffffu, atomicLoad(&bad) != 0u);
    }
}
