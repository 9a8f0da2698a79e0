// RMS norm of groups of a row: lane j of a warp is accumulator j of the lane sum.
//
// HELD: how many of a group's values a lane keeps in registers; 0: the group is read twice.
#include "device.cuh"
#include "ops/norm/staged.cuh"

// A warp a group. x, y [groups_in_all, width]; group i has part i mod parts of weight [parts, width].
extern "C" __global__ void norm_groups(const float* __restrict__ x, const float* __restrict__ weight,
                                       float* __restrict__ y, int groups_in_all, int width, int parts, float eps) {
    const int lane = threadIdx.x % WARP;
    const int group = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (group >= groups_in_all) return;
    const int64 begin = static_cast<int64>(group) * width;
    const float* factors = weight + static_cast<int64>(group % parts) * width;
    float total = 0.0f;
#if HELD
    // Zeros past the width change no sum: squares leave every accumulator at +0 or above.
    float held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = i * WARP + lane < width ? x[begin + i * WARP + lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) total = fma32(held[i], held[i], total);
#else
#pragma unroll 16
    for (int at = lane; at < width; at += WARP) total = fma32(x[begin + at], x[begin + at], total);
#endif
    const float inverse = rsqrt32(lane_sum(total) / static_cast<float>(width) + eps);
#if HELD
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = i * WARP + lane;
        if (at < width) y[begin + at] = (held[i] * inverse) * (1.0f + factors[at]);
    }
#else
#pragma unroll 8
    for (int at = lane; at < width; at += WARP) y[begin + at] = (x[begin + at] * inverse) * (1.0f + factors[at]);
#endif
}

// The same with a block a group; the width is a multiple of 4, and all rows lie at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(STAGED_THREADS, 1)
norm_few_groups(const float* x, const float* __restrict__ weight, float* y, int width, int parts, float eps) {
    DYNAMIC_SHARED(float, own);
    __shared__ float inverse;
    const int64 begin = static_cast<int64>(blockIdx.x) * width;
    stage_floats(own + width, weight + static_cast<int64>(blockIdx.x % parts) * width, width);
    await_inputs();
    stage_floats(own, x + begin, width);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    norm_staged(own, own + width, y + begin, width, eps, &inverse);
}
