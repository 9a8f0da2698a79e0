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

// A row of floats in the registers of a warp: element lane + 32 t in lane's of[t].
template <int ROW_WIDTH>
struct HeldRow {
    float of[whole(ROW_WIDTH, WARP)];
};
template <int ROW_WIDTH>
DEVICE HeldRow<ROW_WIDTH> hold(const float* x) {
    HeldRow<ROW_WIDTH> held = {};
#pragma unroll
    for (int t = 0; t < whole(ROW_WIDTH, WARP); t++) {
        const int i = lane_of_warp() + t * WARP;
        if (i < ROW_WIDTH) held.of[t] = x[i];
    }
    return held;
}

// The cosines and sines of a position, [ROTATED / 2] each, in the registers of a warp.
template <int ROTATED>
struct Angles {
    HeldRow<ROTATED / 2 ? ROTATED / 2 : 1> cosines, sines;
};
template <int ROTATED>
DEVICE Angles<ROTATED> angles_at(int position, const float* cosines, const float* sines) {
    if constexpr (ROTATED == 0) {
        return {};
    } else {
        constexpr int HALF = ROTATED / 2;
        const int64 at = static_cast<int64>(position) * HALF;
        return {hold<HALF>(cosines + at), hold<HALF>(sines + at)};
    }
}

// out = x normed (weight holds 1 + w) and its first ROTATED elements rotated; by one warp.
template <int ROW_WIDTH, int ROTATED>
DEVICE void norm_and_rotate(
    const HeldRow<ROW_WIDTH>& x, const HeldRow<ROW_WIDTH>& weight, float eps, const Angles<ROTATED>& angles, float* out
) {
    const int lane = lane_of_warp();
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < whole(ROW_WIDTH, WARP); t++)
        if (lane + t * WARP < ROW_WIDTH) sum = fma32(x.of[t], x.of[t], sum);
    const float inverse = rsqrt32(lane_sum(sum) / static_cast<float>(ROW_WIDTH) + eps);
#pragma unroll
    for (int t = 0; t < whole(ROW_WIDTH, WARP); t++)
        if (lane + t * WARP < ROW_WIDTH) out[lane + t * WARP] = (x.of[t] * inverse) * weight.of[t];
    __syncwarp();
    constexpr int HALF = ROTATED / 2;
#pragma unroll
    for (int t = 0; t < whole(HALF, WARP); t++) {
        const int i = lane + t * WARP;
        if (i >= HALF) break;
        const float first = out[i], second = out[HALF + i], cosine = angles.cosines.of[t], sine = angles.sines.of[t];
        out[i] = first * cosine - second * sine;
        out[HALF + i] = second * cosine + first * sine;
    }
    __syncwarp();
}
