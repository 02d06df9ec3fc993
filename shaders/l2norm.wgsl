// out = x / sqrt(Σx² + eps) * scale, a group of 64 lanes a row. The eps is added to the sum, not to the mean.
// Order of the sum: as in rmsnorm, with 64 lanes.
struct Params {
    rows: u32,
    cols: u32,
    eps: f32,
    scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

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
        let v = x[base + c];
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
    let inv = 1.0 / sqrt(part[0] + p.eps);
    for (var c = lane; c < p.cols; c += 64u) {
        out[base + c] = (x[base + c] * inv) * p.scale;
    }
}
