// The KDA recurrence over the tokens of a pass, per head with state S[dk][dv]:
//   S *= decay (a factor per key channel);  u = Sᵀk;  S += k ⊗ (beta*(v-u));  o = Sᵀq  (of the updated state)
// A column of S (one value channel) never meets another, so a lane owns a column and a group 64 columns of a head. The
// state goes from `s_in` to `s_out`, which are never the same buffer: an abandoned step leaves the old state whole.
//
// Order: sums over key channels ascending in one accumulator; S = S*decay + k*(beta*(v-u)).
// DECAY_GIVEN 1: `g` holds the factors themselves; 0: their logarithms.
struct Params {
    tokens: u32,
    heads: u32,
    dk: u32,
    dv: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;
@group(0) @binding(4) var<storage, read> g: array<f32>;
@group(0) @binding(5) var<storage, read> beta: array<f32>;
@group(0) @binding(6) var<storage, read> s_in: array<f32>;
@group(0) @binding(7) var<storage, read_write> s_out: array<f32>;
@group(0) @binding(8) var<storage, read_write> o: array<f32>;

const MAX_DK: u32 = 256u;
var<workgroup> decay: array<f32, MAX_DK>;
var<workgroup> key: array<f32, MAX_DK>;
var<workgroup> query: array<f32, MAX_DK>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let head = wid.y;
    let col = wid.x * 64u + lane;
    let owns = col < p.dv;
    let state = head * p.dk * p.dv + col;
    for (var t = 0u; t < p.tokens; t++) {
        let at = (t * p.heads + head) * p.dk;
        for (var i = lane; i < p.dk; i += 64u) {
            let gi = g[at + i];
            decay[i] = select(exp_safe(gi), gi, DECAY_GIVEN == 1u);
            key[i] = k[at + i];
            query[i] = q[at + i];
        }
        workgroupBarrier();
        if (owns) {
            var u = 0.0;
            for (var i = 0u; i < p.dk; i++) {
                let source = state + i * p.dv;
                var s = 0.0;
                if (t == 0u) {
                    s = s_in[source];
                } else {
                    s = s_out[source];
                }
                s = s * decay[i];
                s_out[source] = s;
                u = u + s * key[i];
            }
            let value_at = (t * p.heads + head) * p.dv + col;
            let write = beta[t * p.heads + head] * (v[value_at] - u);
            var sum = 0.0;
            for (var i = 0u; i < p.dk; i++) {
                let source = state + i * p.dv;
                let s = s_out[source] + key[i] * write;
                s_out[source] = s;
                sum = sum + s * query[i];
            }
            o[value_at] = sum;
        }
        workgroupBarrier();
    }
}
