// Activations read four at a time: rows and offsets are multiples of 4, columns of the weight's unit.
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;

fn x_at(token: u32, col: u32) -> vec4<f32> {
    return x[(p.x_offset + token * p.x_stride + col) >> 2u];
}
