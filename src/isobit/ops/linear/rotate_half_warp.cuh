// The rotation of 128 values by half a warp, for so few units that octets would leave warps without.
//
// Value 2 p + i of lane j is number 32 * (j / 4) + 2 * (j % 4) + 8 p + i of its block: what lane j % 4 of a quad takes
// for two steps of the B operand.
#pragma once
#include "device.cuh"
#include "ops/linear/rotate.cuh"

namespace half_warp {

constexpr int LANES = 16, PAIRS = ROTATION / LANES / 2;
constexpr int UNITS = WARP / LANES;  // of a warp

// Inputs of a row from `column` on, zeros past its end; `whole` as load_inputs has it.
DEVICE void load(const float* row, int column, int inputs, bool whole, float v[2 * PAIRS]) {
    if (whole && column + 8 * (PAIRS - 1) < inputs) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const float2 two = *reinterpret_cast<const float2*>(row + column + 8 * pair);
            v[2 * pair] = two.x, v[2 * pair + 1] = two.y;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
        const int k = column + 8 * (i / 2) + i % 2;
        v[i] = k < inputs ? row[k] : 0.0f;
    }
}

// Strides 1, 2, ..., 64, times 1 / sqrt(128).
DEVICE void rotate(float (&v)[2 * PAIRS], int j) {
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

// A lane's share of a unit, as rotate_units of rotate_octet.cuh counts them and puts them: UNITS of each warp of a
// thread block. What it is made of are constants, so that it can be there before the inputs.
struct Unit {
    const float* row;
    unsigned* target;
    int column, inputs, lane;
    unsigned scale[PAIRS];
    bool whole, is_one;

    __device__ __forceinline__ Unit(unsigned* operand, const float* x, const half_bits* scales, int first_block,
                                    int units, int rows, int inputs, bool whole, int warp, int lane)
        : inputs(inputs), lane(lane), whole(whole) {
        const int j = lane % LANES, unit = UNITS * warp + lane / LANES, own = smaller(unit, units - 1);
        const int block = rows == 1 ? own : own / rows, own_row = own - block * rows;
        is_one = unit < units;
        column = (first_block + block) * ROTATION + 32 * (j / 4) + 2 * (j % 4);
        row = x + static_cast<int64>(own_row) * inputs;
        target = operand + (static_cast<int64>(block * 4 + j / 4) * rows + own_row) * 16 + j % 4 * 4;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
            scale[pair] = *reinterpret_cast<const unsigned*>(scales + column + 8 * pair);
    }

    // Once the inputs are there.
    __device__ __forceinline__ void load(float v[2 * PAIRS]) const {
        half_warp::load(row, column, inputs, whole, v);
    }

    // By a whole warp.
    __device__ __forceinline__ void rotate(float (&v)[2 * PAIRS]) const {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            v[2 * pair] = v[2 * pair] * float_of_half(static_cast<half_bits>(scale[pair] & 0xFFFFu));
            v[2 * pair + 1] = v[2 * pair + 1] * float_of_half(static_cast<half_bits>(scale[pair] >> 16));
        }
        half_warp::rotate(v, lane % LANES);
        if (is_one)
            *reinterpret_cast<uint4*>(target) = make_uint4(half_pair_of(v[0], v[1]), half_pair_of(v[2], v[3]),
                                                           half_pair_of(v[4], v[5]), half_pair_of(v[6], v[7]));
    }
};

}  // namespace half_warp
