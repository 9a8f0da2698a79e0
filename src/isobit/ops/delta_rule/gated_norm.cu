// The norm of each head times its gate; docs/arithmetic.md, *delta_rule*. Macros: WIDTH of a head, SILU (0 or 1).
#include "device.cuh"

constexpr int VALUES = (WIDTH + WARP - 1) / WARP;

// x, z, out [count, WIDTH]: a warp takes one head of one row.
extern "C" __global__ void gated_norm(
    const float* x, const float* z, const float* weight, float eps, int count, float* out) {
    const int lane = threadIdx.x % WARP;
    const int head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    float weights[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) weights[i] = i * WARP + lane < WIDTH ? weight[i * WARP + lane] : 0.0f;
    await_inputs();
    if (head >= count) return;
    const int64 at = static_cast<int64>(head) * WIDTH;
    float values[VALUES], gates[VALUES], total = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const int column = i * WARP + lane;
        values[i] = column < WIDTH ? x[at + column] : 0.0f;
        gates[i] = column < WIDTH ? z[at + column] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        if (i * WARP + lane < WIDTH) total = fma32(values[i], values[i], total);
    const float inverse = rsqrt32(lane_sum(total) / static_cast<float>(WIDTH) + eps);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const int column = i * WARP + lane;
        if (column >= WIDTH) continue;
        const float gate = SILU ? silu32(gates[i]) : sigmoid32(gates[i]);
        out[at + column] = (weights[i] * (values[i] * inverse)) * gate;
    }
}
