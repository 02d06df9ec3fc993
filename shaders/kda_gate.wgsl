// g = lower_bound * σ(exp(a_log[h]) * (z + dt_bias)) a channel, beta = σ(logit) a head. a_log may be padded past the
// heads; only its first `heads` entries are read.
struct Params {
    tokens: u32,
    heads: u32,
    dim: u32,
    lower_bound: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> z: array<f32>;
@group(0) @binding(2) var<storage, read> a_log: array<f32>;
@group(0) @binding(3) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(4) var<storage, read> beta_logit: array<f32>;
@group(0) @binding(5) var<storage, read_write> g: array<f32>;
@group(0) @binding(6) var<storage, read_write> beta: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_id(wid, nwg) * 64u + lane;
    let width = p.heads * p.dim;
    if (i >= p.tokens * width) {
        return;
    }
    let channel = i % width;
    let a = exp_safe(a_log[channel / p.dim]);
    g[i] = p.lower_bound * sigmoid(a * (z[i] + dt_bias[channel]));
    if (i < p.tokens * p.heads) {
        beta[i] = sigmoid(beta_logit[i]);
    }
}
