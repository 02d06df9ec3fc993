// Adds the lanes of a matrix-vector group by subgroups, then the subgroups in order. The order within a subgroup is the
// driver's, so bits may differ from `reduce_tree` and between adapters. No subgroup size is assumed: there are at most
// 64 / 4 subgroups in a group of 64 lanes.
const MAX_SUBGROUPS: u32 = 16u;
var<workgroup> part: array<f32, MAX_SUBGROUPS * ROWS * TOKENS>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let row0 = group_id(wid, nwg) * ROWS;
    let token0 = wid.z * TOKENS;
    if (row0 >= p.rows) {
        return;
    }
    let sums = lane_sums(row0, token0, lane);
    for (var i = 0u; i < ROWS * TOKENS; i++) {
        let sum = subgroupAdd(sums[i]);
        if (place == 0u) {
            part[i * MAX_SUBGROUPS + subgroup] = sum;
        }
    }
    workgroupBarrier();
    if (lane < ROWS * TOKENS) {
        var total = 0.0;
        for (var s = 0u; s < subgroups; s++) {
            total = total + part[lane * MAX_SUBGROUPS + s];
        }
        emit_sum(row0, token0, lane, total);
    }
}
