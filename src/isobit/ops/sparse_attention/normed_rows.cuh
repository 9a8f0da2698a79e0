// Rows that are normed and rotated by one warp, and where a stream's rows lie in the pools.
#pragma once
#include "device.cuh"

constexpr int PAGE_ROWS = 64;

DEVICE constexpr int whole(int count, int unit) { return (count + unit - 1) / unit; }

DEVICE int warp_of_block() { return threadIdx.x / WARP; }
DEVICE int lane_of_warp() { return threadIdx.x % WARP; }

// The row of the pools that holds a position of a stream with these pages.
DEVICE int pool_row(const int* pages, int position) {
    return pages[position / PAGE_ROWS] * PAGE_ROWS + position % PAGE_ROWS;
}

// out = x [ROW_WIDTH] normed (weight holds 1 + w) and its first ROTATED elements rotated; by one warp. `out` may be x.
// cosines and sines: those of the row's position, [ROTATED / 2].
template <int ROW_WIDTH, int ROTATED>
DEVICE void norm_and_rotate(
    const float* x, const float* weight, float eps, const float* cosines, const float* sines, float* out
) {
    constexpr int HELD = whole(ROW_WIDTH, WARP);
    const int lane = lane_of_warp();
    float held[HELD], sum = 0.0f;
#pragma unroll
    for (int t = 0; t < HELD; t++) {
        const int i = lane + t * WARP;
        held[t] = i < ROW_WIDTH ? x[i] : 0.0f;
        if (i < ROW_WIDTH) sum = fma32(held[t], held[t], sum);
    }
    const float inverse = rsqrt32(lane_sum(sum) / static_cast<float>(ROW_WIDTH) + eps);
#pragma unroll
    for (int t = 0; t < HELD; t++) {
        const int i = lane + t * WARP;
        if (i < ROW_WIDTH) out[i] = (held[t] * inverse) * weight[i];
    }
    __syncwarp();
    constexpr int HALF = ROTATED / 2;
    for (int i = lane; i < HALF; i += WARP) {
        const float first = out[i], second = out[HALF + i], cosine = cosines[i], sine = sines[i];
        out[i] = first * cosine - second * sine;
        out[HALF + i] = second * cosine + first * sine;
    }
    __syncwarp();
}
