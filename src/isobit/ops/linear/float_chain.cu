// A plain layer whose weights need float32 or bfloat16: the CPU's definition, one fused multiply-add a step.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"

#ifndef BFLOAT16
#define BFLOAT16 0
#endif

#if BFLOAT16
using Stored = unsigned short;
DEVICE float widened(Stored bits) { return float_of(static_cast<unsigned>(bits) << 16); }
#else
using Stored = float;
DEVICE float widened(Stored value) { return value; }
#endif

constexpr int CHAIN_ROWS = 8;
constexpr int CHAIN_THREADS = 128;
constexpr int CHAIN_INPUTS = 128;  // of each row that a block holds at a time

// grid (ceil(N / 128), shards, ceil(rows / 8)), 128 threads: each one output of 8 rows. weights: [K, N], K whole 16s.
// values: float [shards, rows, N].
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS)
float_chain(const Stored* weights, const float* x, float* values, int inputs, int stored_inputs, int columns,
            int rows) {
    __shared__ float staged[CHAIN_INPUTS][CHAIN_ROWS];
    const int column = blockIdx.x * CHAIN_THREADS + threadIdx.x;
    const int shard = blockIdx.y, shards = gridDim.y, first_row = blockIdx.z * CHAIN_ROWS;
    const int blocks = (stored_inputs + ROTATION - 1) / ROTATION;
    const int first = shard * blocks / shards * ROTATION;
    const int last = smaller((shard + 1) * blocks / shards * ROTATION, stored_inputs);
    float sums[CHAIN_ROWS] = {};
    for (int begin = first; begin < last; begin += CHAIN_INPUTS) {
        __syncthreads();
        for (int row = 0; row < CHAIN_ROWS; row++) {
            const int k = begin + threadIdx.x;
            const bool real = first_row + row < rows && k < inputs;
            staged[threadIdx.x][row] = real ? x[static_cast<int64>(first_row + row) * inputs + k] : 0.0f;
        }
        __syncthreads();
        if (column >= columns) continue;
        const int count = smaller(CHAIN_INPUTS, last - begin);
        const Stored* at = weights + static_cast<int64>(begin) * columns + column;
#pragma unroll 8
        for (int k = 0; k < count; k++) {
            const float weight = widened(at[static_cast<int64>(k) * columns]);
#pragma unroll
            for (int row = 0; row < CHAIN_ROWS; row++) sums[row] = fma32(staged[k][row], weight, sums[row]);
        }
    }
    if (column >= columns) return;
    for (int row = 0; row < smaller(CHAIN_ROWS, rows - first_row); row++)
        values[(static_cast<int64>(shard) * rows + first_row + row) * columns + column] = sums[row];
}
