// Causal depthwise convolution, then SiLU: y_t[c] = silu(Σ_j w[c,j]·u_{t-(taps-1)+j}[c]), tap taps-1 being the
// current token. `history` holds the taps-1 inputs before the pass, oldest first; `next` receives those after it.
// A lane computes one y, or (past the last y) one value of `next`.
struct Params {
    tokens: u32,
    channels: u32,
    taps: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> u: array<f32>;
@group(0) @binding(2) var<storage, read> history: array<f32>;
@group(0) @binding(3) var<storage, read> w: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read_write> next: array<f32>;

// Step s counts from the oldest input in the history.
fn input_at(s: u32, c: u32) -> f32 {
    let kept = p.taps - 1u;
    if (s < kept) {
        return history[s * p.channels + c];
    }
    return u[(s - kept) * p.channels + c];
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_id(wid, nwg) * 64u + lane;
    if (i >= (p.tokens + p.taps - 1u) * p.channels) {
        return;
    }
    let t = i / p.channels;
    let c = i % p.channels;
    if (t < p.tokens) {
        var sum = 0.0;
        for (var j = 0u; j < p.taps; j++) {
            sum = sum + w[c * p.taps + j] * input_at(t + j, c);
        }
        y[i] = sum * sigmoid(sum);
    } else {
        // Row r of `next` is step tokens + r: the last taps-1 inputs.
        next[(t - p.tokens) * p.channels + c] = input_at(t, c);
    }
}
