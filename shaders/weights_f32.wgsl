// Weights as f32: a 16-byte unit holds 4 columns. Rows are padded with zeros to whole units.
const PER: u32 = 4u;
const VECS: u32 = 1u;
const SCALED: bool = false;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;

fn unpack(unit: vec4<u32>, j: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(unit);
}

fn unit_scale(row: u32, unit: u32) -> f32 {
    return 1.0;
}
