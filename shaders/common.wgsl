// Placed before every kernel: the linear id of a folded dispatch, tests by bits, and the transcendental
// functions with their ranges written out. A float comparison cannot find a NaN in WGSL and min, max and
// clamp drop it, so each function hands a NaN on by a test of its bits.

// Stands for "not visible" in attention scores: far below any score, and finite.
const MASK: f32 = -1e38;

// A dispatch has at most 65,535 groups a dimension: x and y together count the groups.
fn group_id(wid: vec3<u32>, nwg: vec3<u32>) -> u32 {
    return wid.x + wid.y * nwg.x;
}

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

// exp, exactly 0 below -87 (where the result would be subnormal), held below the largest float.
fn exp_safe(x: f32) -> f32 {
    let y = select(exp(min(x, 88.7)), 0.0, x < -87.0);
    return select(y, x, is_nan(x));
}

// 1 / (1 + exp(-x))
fn sigmoid(x: f32) -> f32 {
    let y = 1.0 / (1.0 + exp(clamp(-x, -87.0, 87.0)));
    return select(y, x, is_nan(x));
}

// 1 - 2 / (exp(2x) + 1), and near zero, where that cancels, the first terms of the series.
fn tanh_safe(x: f32) -> f32 {
    let t = clamp(x, -10.0, 10.0);
    let far = 1.0 - 2.0 / (exp(2.0 * t) + 1.0);
    let s = t * t;
    let near = t * (1.0 + s * (-0.33333334 + s * (0.13333334 - s * 0.053968254)));
    return select(select(far, near, abs(t) < 0.15), x, is_nan(x));
}
