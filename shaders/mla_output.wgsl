// o[t,h,d] = (Σ_r Wv_h[d,r] * o_lat[t,h,r]) * σ(gate[t,h,d]), with Wv_h the last `value` rows of head h's block of kv_b. A
// group computes 4 rows of a head for one token. Order of the sum: as in matvec, with x the head's own latent.
struct Params {
    heads: u32,      // heads of this chunk of kv_b
    first_head: u32,
    all_heads: u32,
    value: u32,      // value rows of a head
    head_rows: u32,  // key and value rows of a head in kv_b
    units: u32,
    cols: u32,       // latent rank
    x_stride: u32,   // latent rank: a head of a token is one row of o_lat
    x_offset: u32,
    gated: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(4) var<storage, read> gate: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

const ROWS: u32 = 4u;
var<workgroup> part: array<f32, 64u * ROWS>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let head = p.first_head + wid.y;
    let d0 = wid.x * ROWS;
    let row_of_x = wid.z * p.all_heads + head;
    let first = wid.y * p.head_rows + (p.head_rows - p.value);
    var acc: array<vec4<f32>, ROWS>;
    for (var u = lane; u < p.units; u += 64u) {
        for (var r = 0u; r < ROWS; r++) {
            let row = first + min(d0 + r, p.value - 1u);
            let unit = w[row * p.units + u];
            var sum = select(acc[r], vec4<f32>(0.0), SCALED);
            for (var j = 0u; j < VECS; j++) {
                sum = sum + unpack(unit, j) * x_at(row_of_x, u * PER + 4u * j);
            }
            if (SCALED) {
                acc[r] = acc[r] + sum * unit_scale(row, u);
            } else {
                acc[r] = sum;
            }
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        let a = acc[r];
        part[r * 64u + lane] = (a.x + a.y) + (a.z + a.w);
    }
    for (var half = 32u; half > 0u; half = half >> 1u) {
        workgroupBarrier();
        if (lane < half) {
            for (var r = 0u; r < ROWS; r++) {
                let at = r * 64u + lane;
                part[at] = part[at] + part[at + half];
            }
        }
    }
    workgroupBarrier();
    if (lane < ROWS && d0 + lane < p.value) {
        let to = row_of_x * p.value + d0 + lane;
        var y = part[lane * 64u];
        if (p.gated == 1u) {
            y = y * sigmoid(gate[to]);
        }
        out[to] = y;
    }
}
