// y = x·Wᵀ for one token or a few: a group computes ROWS rows for TOKENS tokens with 64 lanes. This piece is a lane's share of the
// sums; `reduce_tree` (portable) or `reduce_subgroup` adds the lanes.
//
// Order of a lane's sum, the same for every row and token count: lane l takes the units l, l+64, … and adds the products of
// four columns at a time, in column order, to a vec4. For a form with scales a unit's products have a vec4 of their
// own, which times the scale is added to the lane's. The lane's value is (x+y)+(z+w). (Products of a unit without a
// scale are not summed apart: a driver may take a+(b+c) for (a+b)+c, and one did.)
fn lane_sums(row0: u32, token0: u32, lane: u32) -> array<f32, ROWS * TOKENS> {
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
    var sums: array<f32, ROWS * TOKENS>;
    for (var i = 0u; i < ROWS * TOKENS; i++) {
        let a = acc[i];
        sums[i] = (a.x + a.y) + (a.z + a.w);
    }
    return sums;
}

// Hands out result i of the group that begins at row0 and token0.
fn emit_sum(row0: u32, token0: u32, i: u32, value: f32) {
    let row = row0 + i / TOKENS;
    let token = token0 + i % TOKENS;
    if (row < p.rows && token < p.tokens) {
        emit(token, row, value);
    }
}
