// Per token, over the sources v_0 … v_{n-1} (the running sum last): a_i = Σ v_i*w / sqrt(mean(v_i²) + eps), w the product
// of the norm's and the projection's weights; probs = softmax(a); out = Σ probs_i * v_i. A group of 128 lanes a token.
// Order of the sums: as in rmsnorm; sources ascending.
struct Params {
    tokens: u32,
    cols: u32,
    sources: u32,
    slot_stride: u32, // floats from one source to the next
    eps: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> v: array<f32>;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<storage, read_write> probs: array<f32>;

const MAX_SOURCES: u32 = 32u;
var<workgroup> squares: array<f32, 128>;
var<workgroup> products: array<f32, 128>;
var<workgroup> share: array<f32, MAX_SOURCES>;

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let token = group_id(wid, nwg);
    if (token >= p.tokens) {
        return;
    }
    for (var i = 0u; i < p.sources; i++) {
        let base = i * p.slot_stride + token * p.cols;
        var square = 0.0;
        var product = 0.0;
        for (var c = lane; c < p.cols; c += 128u) {
            let value = v[base + c];
            square = square + value * value;
            product = product + value * w[c];
        }
        squares[lane] = square;
        products[lane] = product;
        for (var half = 64u; half > 0u; half = half >> 1u) {
            workgroupBarrier();
            if (lane < half) {
                squares[lane] = squares[lane] + squares[lane + half];
                products[lane] = products[lane] + products[lane + half];
            }
        }
        workgroupBarrier();
        if (lane == 0u) {
            share[i] = products[0] * (1.0 / sqrt(squares[0] / f32(p.cols) + p.eps));
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        var top = share[0];
        for (var i = 1u; i < p.sources; i++) {
            top = max(top, share[i]);
        }
        var total = 0.0;
        for (var i = 0u; i < p.sources; i++) {
            share[i] = exp_safe(share[i] - top);
            total = total + share[i];
        }
        for (var i = 0u; i < p.sources; i++) {
            share[i] = share[i] / total;
            probs[token * p.sources + i] = share[i];
        }
    }
    workgroupBarrier();
    for (var c = lane; c < p.cols; c += 128u) {
        var sum = 0.0;
        for (var i = 0u; i < p.sources; i++) {
            sum = sum + share[i] * v[i * p.slot_stride + token * p.cols + c];
        }
        out[token * p.cols + c] = sum;
    }
}
