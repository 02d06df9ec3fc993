// Y = X·Wᵀ for many tokens (prefill): a group computes a tile of 64 rows by 32 tokens, 128 lanes with 4 by 4
// outputs each, over slabs of 32 columns widened into shared memory.
//
// Order of the sum: one accumulator an output, columns in ascending order.
const TILE_ROWS: u32 = 64u;
const TILE_TOKENS: u32 = 32u;
const SLAB: u32 = 32u;
const SLAB_UNITS: u32 = SLAB / PER;

var<workgroup> ws: array<f32, SLAB * TILE_ROWS>;
var<workgroup> xs: array<f32, SLAB * TILE_TOKENS>;

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row0 = group_id(wid, nwg) * TILE_ROWS;
    let token0 = wid.z * TILE_TOKENS;
    if (row0 >= p.rows) {
        return;
    }
    let my_row = (lane % 16u) * 4u;
    let my_token = (lane / 16u) * 4u;
    var acc: array<vec4<f32>, 4>;
    let slabs = (p.units + SLAB_UNITS - 1u) / SLAB_UNITS;
    for (var slab = 0u; slab < slabs; slab++) {
        for (var i = lane; i < TILE_ROWS * SLAB_UNITS; i += 128u) {
            let r = i / SLAB_UNITS;
            let local = i % SLAB_UNITS;
            let unit_index = slab * SLAB_UNITS + local;
            let inside = row0 + r < p.rows && unit_index < p.units;
            let row = min(row0 + r, p.rows - 1u);
            let column = min(unit_index, p.units - 1u);
            let unit = w[row * p.units + column];
            let scale = unit_scale(row, column);
            for (var j = 0u; j < VECS; j++) {
                let v = select(vec4<f32>(0.0), unpack(unit, j) * scale, inside);
                let at = (local * PER + 4u * j) * TILE_ROWS + r;
                ws[at] = v.x;
                ws[at + TILE_ROWS] = v.y;
                ws[at + 2u * TILE_ROWS] = v.z;
                ws[at + 3u * TILE_ROWS] = v.w;
            }
        }
        for (var i = lane; i < TILE_TOKENS * SLAB / 4u; i += 128u) {
            let t = i / (SLAB / 4u);
            let k = (i % (SLAB / 4u)) * 4u;
            let col = slab * SLAB + k;
            var v = vec4<f32>(0.0);
            if (token0 + t < p.tokens && col < p.cols) {
                v = x_at(token0 + t, col);
            }
            let at = k * TILE_TOKENS + t;
            xs[at] = v.x;
            xs[at + TILE_TOKENS] = v.y;
            xs[at + 2u * TILE_TOKENS] = v.z;
            xs[at + 3u * TILE_TOKENS] = v.w;
        }
        workgroupBarrier();
        for (var k = 0u; k < SLAB; k++) {
            let a = k * TILE_ROWS + my_row;
            let b = k * TILE_TOKENS + my_token;
            let wv = vec4<f32>(ws[a], ws[a + 1u], ws[a + 2u], ws[a + 3u]);
            acc[0] = acc[0] + wv * xs[b];
            acc[1] = acc[1] + wv * xs[b + 1u];
            acc[2] = acc[2] + wv * xs[b + 2u];
            acc[3] = acc[3] + wv * xs[b + 3u];
        }
        workgroupBarrier();
    }
    for (var t = 0u; t < 4u; t++) {
        for (var r = 0u; r < 4u; r++) {
            let row = row0 + my_row + r;
            let token = token0 + my_token + t;
            if (row < p.rows && token < p.tokens) {
                emit(token, row, acc[t][r]);
            }
        }
    }
}
