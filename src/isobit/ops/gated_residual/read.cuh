// What the kernels of a gated read share. STREAMS, HIDDEN: of a site; STEPS: steps of 16 inputs of its layer `up`.
#pragma once
#include "device.cuh"

constexpr int SIDE = 16;
constexpr int ROW_TILE = 8;

// silu of a mean over streams, rounded as the next layer's input.
DEVICE half_bits activated(float sum) { return half_of(silu32(sum / static_cast<float>(STREAMS))); }

// 1 / d for d from 1 to 2, correctly rounded: how a division begins, without its branch for other d.
DEVICE float inverse_from_one_to_two(float d) {
#ifdef EMULATED
    return 1.0f / d;
#else
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return fma32(r, fma32(-d, r, 1.0f), r);
#endif
}

// sigmoid32 of functions.cuh, to the bit, in one run of instructions, so that many can overlap.
DEVICE float mixing_sigmoid(float x) {
    const float below = -absolute(x);
    const ExpParts parts = exp_parts32(below < EXP_LOWEST ? EXP_LOWEST : below);
    const bool positive = x >= 0.0f;
    const float e = parts.scaled * parts.factor, d = 1.0f + e, d_rest = e - (d - 1.0f);
    const float inverse = inverse_from_one_to_two(d);
    const float numerator = positive ? 1.0f : parts.scaled;
    const float quotient = numerator * inverse;
    const float residual = fma32(-quotient, d_rest, fma32(-quotient, d, numerator) + 0.0f);
    return fma32(residual, inverse, quotient) * (positive ? 1.0f : parts.factor);
}

DEVICE float injection_of(float sum) { return 2.0f * sigmoid32(sum / static_cast<float>(STREAMS)); }

// Two steps' worth of a product: c += a b with the operands as they lie in memory.
DEVICE void multiply(float c[4], const uint4& a, unsigned first, unsigned second) {
    const unsigned left[4] = {a.x, a.y, a.z, a.w}, right[2] = {first, second};
    mma_16x8x16(c, left, right);
}
