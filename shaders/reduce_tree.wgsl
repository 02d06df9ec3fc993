// Adds the lanes of a matrix-vector group in a tree of halves: lane i += lane i+32, then +16, 8, 4, 2, 1.
var<workgroup> part: array<f32, 64u * ROWS * TOKENS>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row0 = group_id(wid, nwg) * ROWS;
    let token0 = wid.z * TOKENS;
    if (row0 >= p.rows) {
        return;
    }
    let sums = lane_sums(row0, token0, lane);
    for (var i = 0u; i < ROWS * TOKENS; i++) {
        part[i * 64u + lane] = sums[i];
    }
    for (var half = 32u; half > 0u; half = half >> 1u) {
        workgroupBarrier();
        if (lane < half) {
            for (var i = 0u; i < ROWS * TOKENS; i++) {
                let at = i * 64u + lane;
                part[at] = part[at] + part[at + half];
            }
        }
    }
    workgroupBarrier();
    if (lane < ROWS * TOKENS) {
        emit_sum(row0, token0, lane, part[lane * 64u]);
    }
}
