// The rotation of 128 values by an octet, eight lanes: with fewer exchanges than by a warp, four blocks a warp at once.
//
// Value 2 p + i of lane j is number octet_place(j) + octet_offset(p) + i of its block: of every 32 inputs a lane has
// what lane j % 4 of a quad takes for one of two steps of the B operand.
#pragma once
#include "device.cuh"
#include "ops/linear/rotate.cuh"

namespace octet {

constexpr int LANES = 8, PAIRS = ROTATION / LANES / 2;

DEVICE int place_of(int j) { return 16 * (j / 4) + 2 * (j % 4); }
DEVICE constexpr int offset_of(int pair) { return 32 * (pair / 2) + 8 * (pair % 2); }

// Inputs of a row's block from `column` on, zeros past the row's end; `whole` as load_inputs has it.
DEVICE void load(const float* row, int column, int inputs, bool whole, float v[2 * PAIRS]) {
    if (whole && column + offset_of(PAIRS - 1) < inputs) {
        const float* from = row + column;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const float2 two = *reinterpret_cast<const float2*>(from + offset_of(pair));
            v[2 * pair] = two.x, v[2 * pair + 1] = two.y;
        }
        return;
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const int k = column + offset_of(pair);
        float2 two = make_float2(0.0f, 0.0f);
        if (whole && k < inputs) two = *reinterpret_cast<const float2*>(row + k);
        if (!whole && k < inputs) two.x = row[k];
        if (!whole && k + 1 < inputs) two.y = row[k + 1];
        v[2 * pair] = two.x, v[2 * pair + 1] = two.y;
    }
}

DEVICE void scale(const half_bits* scales, float v[2 * PAIRS]) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const unsigned two = *reinterpret_cast<const unsigned*>(scales + offset_of(pair));
        v[2 * pair] = v[2 * pair] * float_of_half(static_cast<half_bits>(two & 0xFFFFu));
        v[2 * pair + 1] = v[2 * pair + 1] * float_of_half(static_cast<half_bits>(two >> 16));
    }
}

// Strides 1, 2, ..., 64, times 1 / sqrt(128). NATURAL: lane j has values 4 j to 4 j + 3 of every 32 instead.
template <bool NATURAL = false>
DEVICE void rotate(float (&v)[2 * PAIRS], int j) {
    add_in_lane<1>(v);
    if (NATURAL) add_in_lane<2>(v);
    add_between_lanes(v, j, 1);
    add_between_lanes(v, j, 2);
    if (!NATURAL) add_in_lane<2>(v);
    add_between_lanes(v, j, 4);
    add_in_lane<4>(v);
    add_in_lane<8>(v);
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) v[i] = v[i] * INVERSE_ROOT;
}

}  // namespace octet

// Rotate units, each a row's block of inputs, from `first_unit` to before `units` by the `threads` of a thread block:
// unit = (block - first_block) * rows + row. They go where few_rows finds them, in the order of the B operand's
// registers: uint4 [K / 32, rows, 4]; of row r and t = 0 to 3 the pairs of k = 2t, 2t + 8, 2t + 16, 2t + 24 of each 32.
DEVICE void rotate_units(unsigned* operand, const float* x, const half_bits* scales, int first_block, int first_unit,
                         int units, int rows, int inputs, bool whole, int thread, int threads) {
    const int j = thread % octet::LANES, octets = threads / octet::LANES;
    const int warp_first = first_unit + thread / WARP * (WARP / octet::LANES);
#pragma unroll 1
    for (int first = warp_first; first < units; first += octets) {
        const int unit = first + thread % WARP / octet::LANES, own = smaller(unit, units - 1);
        const int block = rows == 1 ? own : own / rows, row = own - block * rows;
        const int column = (first_block + block) * ROTATION + octet::place_of(j);
        float v[2 * octet::PAIRS];
        octet::load(x + static_cast<int64>(row) * inputs, column, inputs, whole, v);
        octet::scale(scales + column, v);
        octet::rotate(v, j);
        if (unit >= units) continue;
        unsigned* at = operand + (static_cast<int64>(block * 4) * rows + row) * 16 + j % 4 * 4 + j / 4 * 2;
#pragma unroll
        for (int quarter = 0; quarter < ROTATION / 32; quarter++)
            *reinterpret_cast<uint2*>(at + quarter * rows * 16) =
                make_uint2(half_pair_of(v[4 * quarter], v[4 * quarter + 1]),
                           half_pair_of(v[4 * quarter + 2], v[4 * quarter + 3]));
    }
}
