// Attention of one token and 4 heads over one split of the latent cache, in absorbed form:
//   score = (q_abs·latent + q_rope·k_rope) * scale,   visible when key <= position of the token
// Written per (token, head, split): the largest score m, l = Σ exp(score-m), and acc[r] = Σ exp(score-m)*latent[r].
// A split with no visible key gives m = MASK, l = 0, acc = 0. Keys go in tiles of 128, a lane a key for the scores and a
// lane a few latent columns for acc, keys ascending.
struct Params {
    heads: u32,
    rank: u32,
    rope: u32,
    nope: u32,
    first_key: u32,   // position of the first key of this chunk of the cache
    keys: u32,        // keys held in this chunk
    position: u32,    // position of the first token of this turn
    split_len: u32,
    first_split: u32, // number of this chunk's first split among all
    splits: u32,      // splits of the whole cache
    scale: f32,
    first_token: u32, // the pass's token that this turn begins with
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q_abs: array<f32>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> latent: array<f32>;
@group(0) @binding(4) var<storage, read> k_rope: array<f32>;
@group(0) @binding(5) var<storage, read_write> partial: array<f32>;

const HEADS: u32 = 4u;
const MAX_RANK: u32 = 512u;
const MAX_ROPE: u32 = 128u;
const COLUMNS: u32 = 4u; // MAX_RANK / 128
var<workgroup> qa: array<f32, HEADS * MAX_RANK>;
var<workgroup> qr: array<f32, HEADS * MAX_ROPE>;
var<workgroup> weight: array<f32, HEADS * 128u>;
var<workgroup> red: array<f32, 128>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = wid.z;
    let head0 = wid.y * HEADS;
    let start = wid.x * p.split_len;
    let end = min(start + p.split_len, p.keys);
    // Keys of this split that this token sees: none, or start..visible.
    let horizon = p.position + token + 1u;
    var visible = 0u;
    if (horizon > p.first_key) {
        visible = min(end, horizon - p.first_key);
    }
    for (var h = 0u; h < HEADS; h++) {
        let head = min(head0 + h, p.heads - 1u);
        let row = (p.first_token + token) * p.heads + head;
        for (var r = lane; r < p.rank; r += 128u) {
            qa[h * MAX_RANK + r] = q_abs[row * p.rank + r];
        }
        for (var r = lane; r < p.rope; r += 128u) {
            qr[h * MAX_ROPE + r] = q[row * (p.nope + p.rope) + p.nope + r];
        }
    }
    workgroupBarrier();
    var m: array<f32, HEADS>;
    var l: array<f32, HEADS>;
    var acc: array<f32, HEADS * COLUMNS>;
    for (var h = 0u; h < HEADS; h++) {
        m[h] = MASK;
    }
    for (var tile = start; tile < visible; tile += 128u) {
        let key = tile + lane;
        var score: array<f32, HEADS>;
        let seen = key < visible;
        if (seen) {
            for (var r = 0u; r < p.rank; r++) {
                let c = latent[key * p.rank + r];
                for (var h = 0u; h < HEADS; h++) {
                    score[h] = score[h] + qa[h * MAX_RANK + r] * c;
                }
            }
            for (var r = 0u; r < p.rope; r++) {
                let c = k_rope[key * p.rope + r];
                for (var h = 0u; h < HEADS; h++) {
                    score[h] = score[h] + qr[h * MAX_ROPE + r] * c;
                }
            }
        }
        for (var h = 0u; h < HEADS; h++) {
            let s = select(MASK, score[h] * p.scale, seen);
            red[lane] = s;
            for (var half = 64u; half > 0u; half = half >> 1u) {
                workgroupBarrier();
                if (lane < half) {
                    red[lane] = max(red[lane], red[lane + half]);
                }
            }
            workgroupBarrier();
            let top = max(m[h], red[0]);
            let before = exp_safe(m[h] - top);
            m[h] = top;
            l[h] = l[h] * before;
            for (var c = 0u; c < COLUMNS; c++) {
                acc[h * COLUMNS + c] = acc[h * COLUMNS + c] * before;
            }
            weight[h * 128u + lane] = select(0.0, exp_safe(s - top), seen);
            workgroupBarrier();
        }
        let count = min(128u, visible - tile);
        for (var i = 0u; i < count; i++) {
            for (var h = 0u; h < HEADS; h++) {
                l[h] = l[h] + weight[h * 128u + i];
            }
            for (var c = 0u; c < COLUMNS; c++) {
                let r = lane + 128u * c;
                if (r < p.rank) {
                    let value = latent[(tile + i) * p.rank + r];
                    for (var h = 0u; h < HEADS; h++) {
                        acc[h * COLUMNS + c] = acc[h * COLUMNS + c] + weight[h * 128u + i] * value;
                    }
                }
            }
        }
        workgroupBarrier();
    }
    for (var h = 0u; h < HEADS; h++) {
        if (head0 + h < p.heads) {
            let to = ((token * p.heads + head0 + h) * p.splits + p.first_split + wid.x) * (p.rank + 2u);
            if (lane == 0u) {
                partial[to] = m[h];
                partial[to + 1u] = l[h];
            }
            for (var c = 0u; c < COLUMNS; c++) {
                let r = lane + 128u * c;
                if (r < p.rank) {
                    partial[to + 2u + r] = acc[h * COLUMNS + c];
                }
            }
        }
    }
}
