// Activations of any width: read one at a time, zero past the last column.
@group(0) @binding(3) var<storage, read> x: array<f32>;

fn x_one(base: u32, col: u32) -> f32 {
    if (col >= p.cols) {
        return 0.0;
    }
    return x[base + col];
}

fn x_at(token: u32, col: u32) -> vec4<f32> {
    let base = p.x_offset + token * p.x_stride;
    return vec4<f32>(x_one(base, col), x_one(base, col + 1u), x_one(base, col + 2u), x_one(base, col + 3u));
}
