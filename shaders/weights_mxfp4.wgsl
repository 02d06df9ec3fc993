// Weights as MXFP4: a 16-byte unit is one block of 32 columns (nibble k of the block is column k) and has one
// E8M0 scale. The scales lie as in the file, one byte a block, rows without padding between them.
const PER: u32 = 32u;
const VECS: u32 = 8u;
const SCALED: bool = true;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scales: array<u32>;

// E2M1 by integers: twice the magnitude of code m is nibble m of 0xC8643210 (0 1 2 3 4 6 8 12); bit 3 is the sign.
fn unpack(unit: vec4<u32>, j: u32) -> vec4<f32> {
    let word = unit[j >> 1u] >> ((j & 1u) * 16u);
    let code = (vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
    let twice = (vec4<u32>(0xC8643210u) >> ((code & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u);
    let magnitude = bitcast<vec4<u32>>(vec4<f32>(twice) * 0.5);
    return bitcast<vec4<f32>>(magnitude | ((code & vec4<u32>(8u)) << vec4<u32>(28u)));
}

// 2^(byte-127); byte 0 is the subnormal 2^-127 and 255 a NaN.
fn unit_scale(row: u32, unit: u32) -> f32 {
    let i = row * p.units + unit;
    let byte = (scales[i >> 2u] >> ((i & 3u) * 8u)) & 255u;
    let bits = select(select(byte << 23u, 0x00400000u, byte == 0u), 0x7fc00000u, byte == 255u);
    return bitcast<f32>(bits);
}
