// y[t] = Σ_j weight[t,j] * parts[t*K + j], j ascending in one accumulator. The weights are the second half of the router's rows.
struct Params {
    tokens: u32,
    cols: u32,
    chosen: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> parts: array<f32>;
@group(0) @binding(2) var<storage, read> routing: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_id(wid, nwg) * 64u + lane;
    if (i >= p.tokens * p.cols) {
        return;
    }
    let t = i / p.cols;
    let c = i % p.cols;
    var sum = 0.0;
    for (var j = 0u; j < p.chosen; j++) {
        sum = sum + routing[t * 2u * p.chosen + p.chosen + j] * parts[(t * p.chosen + j) * p.cols + c];
    }
    out[i] = sum;
}
