// Moves rows of f32: out row (ids[i] when SCATTER, else i) takes `cols` columns of x row (i when SCATTER, else ids[i]);
// with IDS 0 there is no list and row i goes to row i. Rows may be ranges of columns of wider tensors. An id outside its
// tensor moves nothing.
struct Params {
    count: u32,
    cols: u32,
    x_stride: u32,
    x_offset: u32,
    out_stride: u32,
    out_offset: u32,
    limit: u32, // rows of the tensor that the ids point into
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_id(wid, nwg) * 64u + lane;
    if (i >= p.count * p.cols) {
        return;
    }
    let n = i / p.cols;
    let c = i % p.cols;
    var other = n;
    if (IDS == 1u) {
        other = ids[n];
        if (other >= p.limit) {
            return;
        }
    }
    let source = select(other, n, SCATTER == 1u);
    let to = select(n, other, SCATTER == 1u);
    out[p.out_offset + to * p.out_stride + c] = x[p.x_offset + source * p.x_stride + c];
}
