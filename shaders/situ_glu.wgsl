// out = beta*tanh(gate/beta) * σ(gate) * linear_beta*tanh(up/linear_beta). The sigmoid takes the uncapped gate.
struct Params {
    count: u32,
    beta: f32,
    linear_beta: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> gate: array<f32>;
@group(0) @binding(2) var<storage, read> up: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_id(wid, nwg) * 64u + lane;
    if (i >= p.count) {
        return;
    }
    let g = gate[i];
    let capped = p.beta * tanh_safe(g / p.beta) * sigmoid(g);
    out[i] = capped * (p.linear_beta * tanh_safe(up[i] / p.linear_beta));
}
