// Whether fma rounds once: (1+e)² - (1+2e) with e = 2^-12 is e² when fused and 0 when the product is rounded first. The
// third result is a product below the normal range. The operands come from a buffer so that no compiler folds them.
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(1)
fn main() {
    out[0] = fma(x[0], x[0], -x[1]);
    out[1] = x[0] * x[0] - x[1];
    out[2] = x[2] * x[3];
}
