// y = x·Wᵀ for one token or a few: a group computes ROWS rows for TOKENS tokens with 64 lanes.
//
// Order of the sum, the same for every row and token count: lane l takes the units l, l+64, … and adds the products of four
// columns at a time, in column order, to a vec4. For a form with scales a unit's products have a vec4 of their own,
// which times the scale is added to the lane's. The lane's value is (x+y)+(z+w); lanes are added in a tree of halves:
// lane i += lane i+32, then +16, 8, 4, 2, 1. (Products of a unit without a scale are not summed apart: a driver may
// take a+(b+c) for (a+b)+c, and one did.)
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
    var acc: array<vec4<f32>, ROWS * TOKENS>;
    for (var u = lane; u < p.units; u += 64u) {
        var units: array<vec4<u32>, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            units[r] = w[min(row0 + r, p.rows - 1u) * p.units + u];
        }
        var sum: array<vec4<f32>, ROWS * TOKENS>;
        if (!SCALED) {
            sum = acc;
        }
        for (var j = 0u; j < VECS; j++) {
            var xs: array<vec4<f32>, TOKENS>;
            for (var t = 0u; t < TOKENS; t++) {
                xs[t] = x_at(min(token0 + t, p.tokens - 1u), u * PER + 4u * j);
            }
            for (var r = 0u; r < ROWS; r++) {
                let v = unpack(units[r], j);
                for (var t = 0u; t < TOKENS; t++) {
                    sum[r * TOKENS + t] = sum[r * TOKENS + t] + v * xs[t];
                }
            }
        }
        if (SCALED) {
            for (var r = 0u; r < ROWS; r++) {
                let scale = unit_scale(min(row0 + r, p.rows - 1u), u);
                for (var t = 0u; t < TOKENS; t++) {
                    acc[r * TOKENS + t] = acc[r * TOKENS + t] + sum[r * TOKENS + t] * scale;
                }
            }
        } else {
            acc = sum;
        }
    }
    for (var i = 0u; i < ROWS * TOKENS; i++) {
        let a = acc[i];
        part[i * 64u + lane] = (a.x + a.y) + (a.z + a.w);
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
        let row = row0 + lane / TOKENS;
        let token = token0 + lane % TOKENS;
        if (row < p.rows && token < p.tokens) {
            emit(token, row, part[lane * 64u]);
        }
    }
}
