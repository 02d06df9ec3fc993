// Lowers flags[slot] to the lowest index of a value that is an infinity or a NaN, told by its exponent bits.
struct Params {
    count: u32,
    slot: u32,
    per_lane: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> flags: array<atomic<u32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) wid: vec3<u32>,
    @builtin(num_workgroups) nwg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let base = group_id(wid, nwg) * 64u * p.per_lane + lane;
    for (var j = 0u; j < p.per_lane; j++) {
        let i = base + j * 64u;
        if (i < p.count && (x[i] & 0x7f800000u) == 0x7f800000u) {
            atomicMin(&flags[p.slot], i);
        }
    }
}
