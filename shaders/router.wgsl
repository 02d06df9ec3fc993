// Per token: s = σ(logit); the K experts with the largest s + bias, ties to the lower index; their weights
// s_j / (Σ s + norm_eps) * scale. The bias takes part in the choice alone. A group of 128 lanes a token.
// out[t] holds K expert ids (as integers' bits), in order of choice, then K weights. A logit or bias that is not finite makes
// every id of the token 0xffffffff: a row that hides no NaN.
struct Params {
    tokens: u32,
    experts: u32,
    chosen: u32,
    renormalize: u32,
    norm_eps: f32,
    scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;

const MAX_EXPERTS: u32 = 1024u;
const MAX_CHOSEN: u32 = 64u;
const TAKEN: f32 = -3e38;
var<workgroup> scores: array<f32, MAX_EXPERTS>;
var<workgroup> keys: array<f32, MAX_EXPERTS>;
var<workgroup> best: array<f32, 128>;
var<workgroup> best_id: array<u32, 128>;
var<workgroup> picked: array<u32, MAX_CHOSEN>;
var<workgroup> bad: atomic<u32>;

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
    if (lane == 0u) {
        atomicStore(&bad, 0u);
    }
    workgroupBarrier();
    for (var e = lane; e < p.experts; e += 128u) {
        let logit = logits[token * p.experts + e];
        let s = sigmoid(logit);
        let key = s + bias[e];
        if (!is_finite(logit) || !is_finite(key)) {
            atomicStore(&bad, 1u);
        }
        scores[e] = s;
        keys[e] = key;
    }
    workgroupBarrier();
    for (var j = 0u; j < p.chosen; j++) {
        var value = TAKEN;
        var id = 0xffffffffu;
        for (var e = lane; e < p.experts; e += 128u) {
            // Ascending ids: an equal key does not displace the lower index.
            if (keys[e] > value) {
                value = keys[e];
                id = e;
            }
        }
        best[lane] = value;
        best_id[lane] = id;
        for (var half = 64u; half > 0u; half = half >> 1u) {
            workgroupBarrier();
            if (lane < half) {
                let other = best[lane + half];
                let other_id = best_id[lane + half];
                if (other > best[lane] || (other == best[lane] && other_id < best_id[lane])) {
                    best[lane] = other;
                    best_id[lane] = other_id;
                }
            }
        }
        workgroupBarrier();
        if (lane == 0u) {
            picked[j] = best_id[0];
            if (best_id[0] < p.experts) {
                keys[best_id[0]] = TAKEN;
            }
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        let broken = atomicLoad(&bad) != 0u;
        let to = token * 2u * p.chosen;
        var sum = 0.0;
        for (var j = 0u; j < p.chosen; j++) {
            sum = sum + scores[min(picked[j], p.experts - 1u)];
        }
        let norm = select(1.0, sum + p.norm_eps, p.renormalize == 1u);
        for (var j = 0u; j < p.chosen; j++) {
            let weight = scores[min(picked[j], p.experts - 1u)] / norm * p.scale;
            out[to + j] = select(picked[j], 0xffffffffu, broken);
            out[to + p.chosen + j] = select(bitcast<u32>(weight), 0x7fc00000u, broken);
        }
    }
}
