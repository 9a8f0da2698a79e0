// The norm of one group by a block, its values staged in shared memory with every load on its way at once.
#pragma once
#include "device.cuh"

constexpr int STAGED_THREADS = 128;

// Start copies of `width` floats, a multiple of 4, between places at multiples of 16 bytes.
DEVICE void stage_floats(float* shared, const float* values, int width) {
    for (int at = 4 * threadIdx.x; at < width; at += 4 * STAGED_THREADS) copy_async_16(shared + at, values + at);
}

DEVICE const float4& four_of(const float* at) { return *reinterpret_cast<const float4*>(at); }
DEVICE float4& four_of(float* at) { return *reinterpret_cast<float4*>(at); }

// out [width] = the norm of own [width] times 1 + factors [width], both in shared memory, all at multiples of 16 bytes:
// lane j of the first warp is accumulator j of the lane sum. inverse: one float in shared memory.
DEVICE void norm_staged(const float* own, const float* factors, float* out, int width, float eps, float* inverse) {
    if (threadIdx.x < WARP) {
        float squares = 0.0f;
#pragma unroll 40
        for (int at = threadIdx.x; at < width; at += WARP) squares = fma32(own[at], own[at], squares);
        const float found = rsqrt32(lane_sum(squares) / static_cast<float>(width) + eps);
        if (!threadIdx.x) *inverse = found;
    }
    __syncthreads();
    const float found = *inverse;
#pragma unroll 4
    for (int at = 4 * threadIdx.x; at < width; at += 4 * STAGED_THREADS) {
        const float4 v = four_of(own + at), factor = four_of(factors + at);
        four_of(out + at) = make_float4((v.x * found) * (1.0f + factor.x), (v.y * found) * (1.0f + factor.y),
                                        (v.z * found) * (1.0f + factor.z), (v.w * found) * (1.0f + factor.w));
    }
}
