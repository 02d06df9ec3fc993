// q_abs[t,h,:] = Σ_d q_nope[t,h,d] * Wk_h[d,:], with Wk_h the first `nope` rows of head h's block of kv_b. A lane owns the
// columns of one unit and adds rows d in ascending order.
struct Params {
    heads: u32,      // heads of this chunk of kv_b
    first_head: u32,
    all_heads: u32,
    nope: u32,
    head_rows: u32,  // nope + value rows of a head in kv_b
    units: u32,
    cols: u32,       // latent rank
    q_head: u32,     // nope + rope: floats of a head in q
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let u = wid.x * 64u + lane;
    if (u >= p.units) {
        return;
    }
    let head = p.first_head + wid.y;
    let q_at = (wid.z * p.all_heads + head) * p.q_head;
    var acc: array<vec4<f32>, VECS>;
    for (var d = 0u; d < p.nope; d++) {
        let row = wid.y * p.head_rows + d;
        let unit = w[row * p.units + u];
        let factor = q[q_at + d] * unit_scale(row, u);
        for (var j = 0u; j < VECS; j++) {
            acc[j] = acc[j] + unpack(unit, j) * factor;
        }
    }
    let to = (wid.z * p.all_heads + head) * p.cols;
    for (var j = 0u; j < VECS; j++) {
        for (var c = 0u; c < 4u; c++) {
            let col = u * PER + 4u * j + c;
            if (col < p.cols) {
                out[to + col] = acc[j][c];
            }
        }
    }
}
