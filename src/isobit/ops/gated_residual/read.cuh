// What the kernels of a gated read share. STREAMS, HIDDEN: of a site; STEPS: steps of 16 inputs of its layer `up`.
#pragma once
#include "device.cuh"

constexpr int SIDE = 16;
constexpr int ROW_TILE = 8;

// silu of a mean over streams, rounded as the next layer's input.
DEVICE half_bits activated(float sum) { return half_of(silu32(sum / static_cast<float>(STREAMS))); }

DEVICE float injection_of(float sum) { return 2.0f * sigmoid32(sum / static_cast<float>(STREAMS)); }

// Two steps' worth of a product: c += a b with the operands as they lie in memory.
DEVICE void multiply(float c[4], const uint4& a, unsigned first, unsigned second) {
    const unsigned left[4] = {a.x, a.y, a.z, a.w}, right[2] = {first, second};
    mma_16x8x16(c, left, right);
}
