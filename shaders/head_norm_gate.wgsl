// Per head of a token: out = (o / sqrt(mean(o²) + eps) * w) * σ(gate), a group of 64 lanes a head.
// Order of the sum: as in rmsnorm, with 64 lanes.
struct Params {
    rows: u32, // tokens times heads
    cols: u32, // channels of a head
    eps: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> o: array<f32>;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read> gate: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

var<workgroup> part: array<f32, 64>;

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
    let base = row * p.cols;
    var sum = 0.0;
    for (var c = lane; c < p.cols; c += 64u) {
        let v = o[base + c];
        sum = sum + v * v;
    }
    part[lane] = sum;
    for (var half = 32u; half > 0u; half = half >> 1u) {
        workgroupBarrier();
        if (lane < half) {
            part[lane] = part[lane] + part[lane + half];
        }
    }
    workgroupBarrier();
    let inv = 1.0 / sqrt(part[0] / f32(p.cols) + p.eps);
    for (var c = lane; c < p.cols; c += 64u) {
        out[base + c] = ((o[base + c] * inv) * w[c]) * sigmoid(gate[base + c]);
    }
}
