struct Params {
    rows: u32,       // rows of this chunk of the weight
    cols: u32,       // input features
    units: u32,      // 16-byte units of a row
    tokens: u32,
    x_stride: u32,
    x_offset: u32,
    out_stride: u32,
    out_offset: u32, // where row 0 of this chunk goes within a token's output
    accumulate: u32, // 1: add to the output (a residual), 0: replace it
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

fn emit(token: u32, row: u32, value: f32) {
    let at = p.out_offset + token * p.out_stride + row;
    if (p.accumulate == 1u) {
        out[at] = out[at] + value;
    } else {
        out[at] = value;
    }
}
