// out[i] = row ids[i] of the weight, widened exactly. A lane widens one unit. Ids outside this chunk of the
// weight are left to the chunk that holds them.
struct Params {
    rows: u32,      // rows of this chunk
    first_row: u32, // the matrix row at which the chunk begins
    units: u32,
    cols: u32,
    count: u32,     // rows asked for
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_id(wid, nwg) * 64u + lane;
    if (i >= p.count * p.units) {
        return;
    }
    let n = i / p.units;
    let u = i % p.units;
    let id = ids[n];
    if (id < p.first_row || id - p.first_row >= p.rows) {
        return;
    }
    let row = id - p.first_row;
    let unit = w[row * p.units + u];
    let scale = unit_scale(row, u);
    for (var j = 0u; j < VECS; j++) {
        let v = unpack(unit, j) * scale;
        for (var c = 0u; c < 4u; c++) {
            let col = u * PER + 4u * j + c;
            if (col < p.cols) {
                out[n * p.cols + col] = v[c];
            }
        }
    }
}
