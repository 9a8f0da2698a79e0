// The rotation of 128 values by a warp: four neighbours a lane, docs/arithmetic.md, *linear*.
#pragma once
#include "device.cuh"

constexpr int ROTATION = 128;
constexpr float INVERSE_ROOT = 0x1.6a09e6p-4f;  // float32(1 / sqrt(128))

// The butterfly of values 4 * lane to 4 * lane + 3, strides 1, 2, ..., 64, times 1 / sqrt(128).
DEVICE void rotate_128(float v[4], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
#pragma unroll
    for (int mask = 1; mask < WARP; mask <<= 1) {
        // Negating one term of a sum is exact, so that every lane adds.
        const unsigned sign = lane & mask ? 0x80000000u : 0u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float other = shuffle_xor(v[i], mask);
            v[i] = other + float_of(bits_of(v[i]) ^ sign);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = v[i] * INVERSE_ROOT;
}

// Two nearest halves, saturating, packed; NaN stays NaN.
DEVICE unsigned half_pair_of(float low, float high) {
#ifdef EMULATED
    return pack_half2(half_of(low), half_of(high));
#else
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;\n\t"
        "min.NaN.f16x2 %0, %0, %3;\n\t"
        "max.NaN.f16x2 %0, %0, %4;"
        : "=&r"(packed) : "f"(low), "f"(high), "r"(0x7BFF7BFFu), "r"(0xFBFFFBFFu));
    return packed;
#endif
}

// Four neighbouring halves as floats.
DEVICE void load_halves(const half_bits* from, float v[4]) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    v[0] = float_of_half(static_cast<half_bits>(pairs.x & 0xFFFFu));
    v[1] = float_of_half(static_cast<half_bits>(pairs.x >> 16));
    v[2] = float_of_half(static_cast<half_bits>(pairs.y & 0xFFFFu));
    v[3] = float_of_half(static_cast<half_bits>(pairs.y >> 16));
}

// Inputs column to column + 3 of a row, 0 past its end; `whole`: rows begin at 16 bytes and end at whole fours.
DEVICE void load_inputs(const float* row, int column, int inputs, bool whole, float v[4]) {
    if (whole) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column < inputs) four = *reinterpret_cast<const float4*>(row + column);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = column + i < inputs ? row[column + i] : 0.0f;
}

// Values 4 * lane to 4 * lane + 3 of a block of 128, scaled, rotated and rounded to half: two packed pairs.
DEVICE uint2 rotated(float v[4], const float scale[4], int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = v[i] * scale[i];
    rotate_128(v, lane);
    return make_uint2(half_pair_of(v[0], v[1]), half_pair_of(v[2], v[3]));
}

// The butterfly's stage of a stride between the values of a lane.
template <int STRIDE, int COUNT>
DEVICE void add_in_lane(float (&v)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (i & STRIDE) continue;
        const float low = v[i], high = v[i + STRIDE];
        v[i] = low + high;
        v[i + STRIDE] = low - high;
    }
}

// The stage of a stride that is between lanes whose numbers differ by `mask`; j: this one's.
template <int COUNT>
DEVICE void add_between_lanes(float (&v)[COUNT], int j, int mask) {
    // A product with 1 or -1 is exact, so that every lane adds.
    const float sign = j & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = fma32(sign, v[i], shuffle_xor(v[i], mask));
}
