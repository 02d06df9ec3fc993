// Joins the splits of one token and head: out[r] = Σ_s e_s*acc_s[r] / Σ_s e_s*l_s with e_s = exp(m_s - max m), splits
// ascending. With nothing visible at all the result is 0.
struct Params {
    rows: u32, // tokens times heads
    splits: u32,
    rank: u32,
    first_row: u32, // of the output, for these rows
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> partial: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group_id(wid, nwg);
    if (row >= p.rows) {
        return;
    }
    let base = row * p.splits * (p.rank + 2u);
    var top = MASK;
    for (var s = 0u; s < p.splits; s++) {
        top = max(top, partial[base + s * (p.rank + 2u)]);
    }
    for (var r = lane; r < p.rank; r += 64u) {
        var total = 0.0;
        var sum = 0.0;
        for (var s = 0u; s < p.splits; s++) {
            let at = base + s * (p.rank + 2u);
            let e = exp_safe(partial[at] - top);
            total = total + e * partial[at + 1u];
            sum = sum + e * partial[at + 2u + r];
        }
        out[(p.first_row + row) * p.rank + r] = select(sum / total, 0.0, total == 0.0);
    }
}
