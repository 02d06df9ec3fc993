// Weights as bf16: a 16-byte unit holds 8 columns, the even one in the low half of a word. Rows are padded
// with zeros to whole units.
const PER: u32 = 8u;
const VECS: u32 = 2u;
const SCALED: bool = false;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;

fn unpack(unit: vec4<u32>, j: u32) -> vec4<f32> {
    let pair = select(unit.xy, unit.zw, j == 1u);
    return bitcast<vec4<f32>>(vec4<u32>(pair.x << 16u, pair.x & 0xffff0000u, pair.y << 16u, pair.y & 0xffff0000u));
}

fn unit_scale(row: u32, unit: u32) -> f32 {
    return 1.0;
}
