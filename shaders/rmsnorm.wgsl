// out = x / sqrt(mean(x²) + eps) * w, a group of 128 lanes a row. Rows may be a range of columns of a wider
// tensor on either side.
//
// Order of the sum: lane l adds the squares of the columns l, l+128, … in turn; lanes are added in a tree of halves
// (64, 32, … 1). Then inv = 1/sqrt(sum/cols + eps) and out = (x*inv)*w.
struct Params {
    rows: u32,
    cols: u32,
    x_stride: u32,
    x_offset: u32,
    out_stride: u32,
    out_offset: u32,
    eps: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

var<workgroup> part: array<f32, 128>;

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
    let base = p.x_offset + row * p.x_stride;
    var sum = 0.0;
    for (var c = lane; c < p.cols; c += 128u) {
        let v = x[base + c];
        sum = sum + v * v;
    }
    part[lane] = sum;
    for (var half = 64u; half > 0u; half = half >> 1u) {
        workgroupBarrier();
        if (lane < half) {
            part[lane] = part[lane] + part[lane + half];
        }
    }
    workgroupBarrier();
    let inv = 1.0 / sqrt(part[0] / f32(p.cols) + p.eps);
    let to = p.out_offset + row * p.out_stride;
    for (var c = lane; c < p.cols; c += 128u) {
        out[to + c] = (x[base + c] * inv) * w[c];
    }
}
