// A plain layer whose weights need float32 or bfloat16: the CPU's definition, one fused multiply-add a step.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"

#ifndef BFLOAT16
#define BFLOAT16 0
#endif
#ifndef THREAD_ROWS
#define THREAD_ROWS 2
#endif

#if BFLOAT16
using Stored = unsigned short;
DEVICE float widened(Stored bits) { return float_of(static_cast<unsigned>(bits) << 16); }
#else
using Stored = float;
DEVICE float widened(Stored value) { return value; }
#endif

constexpr int CHAIN_OUTPUTS = 32, CHAIN_WARPS = 4, CHAIN_THREADS = CHAIN_WARPS * WARP;
constexpr int CHAIN_ROWS = CHAIN_WARPS * THREAD_ROWS;  // of a block; a warp has every output of its own rows
constexpr int CHAIN_INPUTS = 64;                       // of a stage
constexpr int CHAIN_STAGES = 4;
constexpr int PIECE = 16 / sizeof(Stored);  // weights in 16 bytes
constexpr int ROW_PIECES = CHAIN_OUTPUTS / PIECE;
constexpr int STAGED = CHAIN_INPUTS * CHAIN_ROWS / CHAIN_THREADS;  // inputs that a thread fetches of a stage

struct alignas(16) ChainStage {
    Stored weights[CHAIN_INPUTS][CHAIN_OUTPUTS];
};

// Stage the weights of inputs first on, of those before `last`, for the block's outputs.
DEVICE void stage_weights(ChainStage& stage, const Stored* weights, int first, int last, int column, int columns) {
    for (int i = threadIdx.x; i < CHAIN_INPUTS * ROW_PIECES; i += CHAIN_THREADS) {
        const int row = i / ROW_PIECES, place = i % ROW_PIECES * PIECE;
        const Stored* from = weights + static_cast<int64>(first + row) * columns + column + place;
        if (first + row < last && column + place < columns) copy_async_16(&stage.weights[row][place], from);
    }
}

// A thread's share of the rows' inputs first to first + 63, 0 past the end: input i of row r is its (64r + i) / 128th.
DEVICE void fetch_inputs(float fetched[STAGED], const float* x, int first, int inputs, int first_row, int rows) {
#pragma unroll
    for (int i = 0; i < STAGED; i++) {
        const int place = i * CHAIN_THREADS + threadIdx.x;
        const int row = first_row + place / CHAIN_INPUTS, k = first + place % CHAIN_INPUTS;
        fetched[i] = row < rows && k < inputs ? x[static_cast<int64>(row) * inputs + k] : 0.0f;
    }
}

// grid (ceil(N / 32), shards, ceil(rows / CHAIN_ROWS)), 128 threads. weights: [K, N], K and N whole 16s. values: float
// [shards, rows, N].
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS)
float_chain(const Stored* weights, const float* x, float* values, int inputs, int stored_inputs, int columns,
            int rows) {
    __shared__ ChainStage stages[CHAIN_STAGES];
    __shared__ float own_inputs[2][CHAIN_INPUTS][CHAIN_ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first_column = blockIdx.x * CHAIN_OUTPUTS, column = first_column + lane;
    const int shard = blockIdx.y, shards = gridDim.y, first_row = blockIdx.z * CHAIN_ROWS;
    const int blocks = (stored_inputs + ROTATION - 1) / ROTATION;
    const int first = shard * blocks / shards * ROTATION;
    const int last = smaller((shard + 1) * blocks / shards * ROTATION, stored_inputs);

    int staged = first;
#pragma unroll
    for (int stage = 0; stage < CHAIN_STAGES - 1; stage++, staged += CHAIN_INPUTS) {
        stage_weights(stages[stage], weights, staged, last, first_column, columns);
        copy_async_commit();
    }
    float fetched[STAGED];
    fetch_inputs(fetched, x, first, inputs, first_row, rows);
    float sums[THREAD_ROWS] = {};
    int stage = 0;
#pragma unroll 1
    for (int begin = first; begin < last; begin += CHAIN_INPUTS, staged += CHAIN_INPUTS) {
        float(*inputs_now)[CHAIN_ROWS] = own_inputs[stage % 2];
#pragma unroll
        for (int i = 0; i < STAGED; i++) {
            const int place = i * CHAIN_THREADS + threadIdx.x;
            inputs_now[place % CHAIN_INPUTS][place / CHAIN_INPUTS] = fetched[i];
        }
        copy_async_wait<CHAIN_STAGES - 2>();
        __syncthreads();
        stage_weights(
            stages[(stage + CHAIN_STAGES - 1) % CHAIN_STAGES], weights, staged, last, first_column, columns);
        copy_async_commit();
        fetch_inputs(fetched, x, begin + CHAIN_INPUTS, inputs, first_row, rows);
        const int count = smaller(CHAIN_INPUTS, last - begin);
        // Whole 16s; what lies past the columns is not stored.
#pragma unroll 16
        for (int k = 0; k < count; k++) {
            const float weight = widened(stages[stage].weights[k][lane]);
#pragma unroll
            for (int row = 0; row < THREAD_ROWS; row++)
                sums[row] = fma32(inputs_now[k][warp * THREAD_ROWS + row], weight, sums[row]);
        }
        stage = (stage + 1) % CHAIN_STAGES;
    }
    if (column >= columns) return;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        const int row = first_row + warp * THREAD_ROWS + i;
        if (row < rows) values[(static_cast<int64>(shard) * rows + row) * columns + column] = sums[i];
    }
}
