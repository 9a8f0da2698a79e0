// The rotation of 128 values by half a warp, for so few units that octets would leave warps without.
//
// Value 2 p + i of lane j is number 32 * (j / 4) + 2 * (j % 4) + 8 p + i of its block: what lane j % 4 of a quad takes for
// two steps of the B operand.
#pragma once
#include "device.cuh"
#include "ops/linear/rotate.cuh"

namespace half_warp {

constexpr int LANES = 16, PAIRS = ROTATION / LANES / 2;
constexpr int UNITS = WARP / LANES;  // of a warp

// Inputs of a row from `column` on, zeros past its end; `whole` as load_inputs has it.
DEVICE void load(const float* row, int column, int inputs, bool whole, float v[2 * PAIRS]) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const int k = column + 8 * pair;
        float2 two = make_float2(0.0f, 0.0f);
        if (whole) {
            if (k < inputs) two = *reinterpret_cast<const float2*>(row + k);
        } else {
            if (k < inputs) two.x = row[k];
            if (k + 1 < inputs) two.y = row[k + 1];
        }
        v[2 * pair] = two.x, v[2 * pair + 1] = two.y;
    }
}

template <int STRIDE>
DEVICE void add_in_lane(float v[2 * PAIRS]) {
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
        if (i & STRIDE) continue;
        const float low = v[i], high = v[i + STRIDE];
        v[i] = low + high;
        v[i + STRIDE] = low - high;
    }
}

DEVICE void add_between_lanes(float v[2 * PAIRS], int j, int mask) {
    // A product with 1 or -1 is exact, so that every lane adds.
    const float sign = j & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) v[i] = fma32(sign, v[i], shuffle_xor(v[i], mask));
}

// Strides 1, 2, ..., 64, times 1 / sqrt(128).
DEVICE void rotate(float v[2 * PAIRS], int j) {
    add_in_lane<1>(v);
    add_between_lanes(v, j, 1);
    add_between_lanes(v, j, 2);
    add_in_lane<2>(v);
    add_in_lane<4>(v);
    add_between_lanes(v, j, 4);
    add_between_lanes(v, j, 8);
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) v[i] = v[i] * INVERSE_ROOT;
}

// What rotate_units of rotate_octet.cuh does, of at most UNITS units a warp of the thread block.
DEVICE void rotate_units(unsigned* operand, const float* x, const half_bits* scales, int first_block, int units, int rows,
                         int inputs, bool whole, int warp, int lane) {
    if (UNITS * warp >= units) return;
    const int j = lane % LANES, unit = UNITS * warp + lane / LANES, own = smaller(unit, units - 1);
    const int block = rows == 1 ? own : own / rows, row = own - block * rows;
    const int column = (first_block + block) * ROTATION + 32 * (j / 4) + 2 * (j % 4);
    float v[2 * PAIRS];
    load(x + static_cast<int64>(row) * inputs, column, inputs, whole, v);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const unsigned two = *reinterpret_cast<const unsigned*>(scales + column + 8 * pair);
        v[2 * pair] = v[2 * pair] * float_of_half(static_cast<half_bits>(two & 0xFFFFu));
        v[2 * pair + 1] = v[2 * pair + 1] * float_of_half(static_cast<half_bits>(two >> 16));
    }
    rotate(v, j);
    if (unit >= units) return;
    unsigned* at = operand + (static_cast<int64>(block * 4 + j / 4) * rows + row) * 16 + j % 4 * 4;
    *reinterpret_cast<uint4*>(at) = make_uint4(half_pair_of(v[0], v[1]), half_pair_of(v[2], v[3]),
                                               half_pair_of(v[4], v[5]), half_pair_of(v[6], v[7]));
}

}  // namespace half_warp
