// The shared expert's gate, a plain layer of one output: the CPU's float32 chain, one lane a row.
#pragma once
#include "ops/experts/layers.cuh"

constexpr int GATE_WARPS = 4, GATE_THREADS = GATE_WARPS * WARP;  // of a block that computes nothing else

// 128 inputs of ROWS rows and of the weights; a lane a row reads four columns without conflicts.
template <int ROWS>
struct GateInputs {
    alignas(16) float rows[ROWS][BLOCK + 4];
    alignas(16) float weights[BLOCK];
};

// A warp's part of 128 inputs: rows warp, warp + TEAM, ... and its share of the weights.
template <int ROWS, int TEAM>
struct GateLoads {
    static constexpr int count = ROWS / TEAM, own_weights = BLOCK / WARP / TEAM;
    float rows[count][4];
    float own[own_weights];

    __device__ __forceinline__ void load(const float* x, int hidden, int rows_left, const float* weights, int inputs,
                                         int first, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < count; i++) {
            const int row = warp + TEAM * i;
            if (row >= rows_left) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int k = first + WARP * j + lane;
                rows[i][j] = k < hidden ? x[static_cast<int64>(row) * hidden + k] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < own_weights; i++) {
            const int k = first + WARP * (warp + TEAM * i) + lane;
            own[i] = k < inputs ? weights[k] : 0.0f;
        }
    }
    __device__ __forceinline__ void store(GateInputs<ROWS>& to, int rows_left, int warp, int lane) const {
#pragma unroll
        for (int i = 0; i < count; i++) {
            const int row = warp + TEAM * i;
            if (row >= rows_left) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) to.rows[row][WARP * j + lane] = rows[i][j];
        }
#pragma unroll
        for (int i = 0; i < own_weights; i++) to.weights[WARP * (warp + TEAM * i) + lane] = own[i];
    }
};

// Eight inputs of a row and their weights.
struct GateEight {
    float4 values[2], factors[2];

    __device__ __forceinline__ GateEight(const float4* row, const float4* column, int i)
        : values{row[2 * i], row[2 * i + 1]}, factors{column[2 * i], column[2 * i + 1]} {}
    __device__ __forceinline__ float added_to(float sum) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum = fma32(values[i].x, factors[i].x, sum);
            sum = fma32(values[i].y, factors[i].y, sum);
            sum = fma32(values[i].z, factors[i].z, sum);
            sum = fma32(values[i].w, factors[i].w, sum);
        }
        return sum;
    }
};

template <int TEAM>
DEVICE void sync_gate_warps() {
    if (TEAM == 1) __syncwarp();
    else __syncthreads();
}

// logits of up to ROWS rows from `first_row` on: x [rows, hidden] times weights [inputs], inputs a multiple of 16.
//
// By a block of TEAM warps, or with TEAM 1 by a warp of a block.
template <int ROWS, int TEAM = GATE_WARPS>
DEVICE void shared_gate_logits(const float* x, int hidden, int rows, int first_row, const float* weights, int inputs,
                               const float* bias, float* logits, GateInputs<ROWS>& staged) {
    static_assert(ROWS <= WARP && ROWS % TEAM == 0, "a row is a lane of the first warp");
    const int lane = threadIdx.x % WARP, warp = TEAM == 1 ? 0 : threadIdx.x / WARP;
    const int rows_left = smaller(rows - first_row, ROWS);
    const bool has_row = warp == 0 && lane < rows_left;
    if (rows_left <= 0) return;
    const float* source = x + static_cast<int64>(first_row) * hidden;
    GateLoads<ROWS, TEAM> loads;
    loads.load(source, hidden, rows_left, weights, inputs, 0, warp, lane);
    Chains<1> chain;
    for (int first = 0; first < inputs; first += BLOCK) {
        sync_gate_warps<TEAM>();
        loads.store(staged, rows_left, warp, lane);
        sync_gate_warps<TEAM>();
        if (first + BLOCK < inputs)
            loads.load(source, hidden, rows_left, weights, inputs, first + BLOCK, warp, lane);
        if (first) chain.close(first / BLOCK, inputs);
        const int eights = smaller(BLOCK, inputs - first) / 8;
        if (has_row) {
            const float4* row = reinterpret_cast<const float4*>(staged.rows[lane]);
            const float4* column = reinterpret_cast<const float4*>(staged.weights);
            GateEight next(row, column, 0);
#pragma unroll 4
            for (int i = 0; i < eights; i++) {
                const GateEight eight = next;
                next = GateEight(row, column, smaller(i + 1, eights - 1));
                chain.sums[0] = eight.added_to(chain.sums[0]);
            }
        }
    }
    if (has_row) {
        const float logit = chain.result(0);
        logits[first_row + lane] = bias ? logit + bias[0] : logit;
    }
}
