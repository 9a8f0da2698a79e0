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

// A warp's part of 128 inputs: rows warp, warp + GATE_WARPS, ... and its share of the weights.
template <int ROWS>
struct GateLoads {
    static constexpr int TEAM = GATE_WARPS;
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

// A row's sum with EIGHTS times eight more inputs, the next eight loaded while eight are added.
template <int EIGHTS>
DEVICE float add_eights(const float4* row, const float4* column, float sum) {
    GateEight next(row, column, 0);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const GateEight eight = next;
        if (i + 1 < EIGHTS) next = GateEight(row, column, i + 1);
        sum = eight.added_to(sum);
    }
    return sum;
}

// A row's sum with up to 128 more inputs, a multiple of 16.
DEVICE float add_gate_inputs(const float* row, const float* weights, int inputs, float sum) {
    const float4 *fours = reinterpret_cast<const float4*>(row), *column = reinterpret_cast<const float4*>(weights);
    if (inputs == BLOCK) return add_eights<BLOCK / 8>(fours, column, sum);
#pragma unroll 1
    for (int i = 0; i < inputs / 4; i += 4) sum = add_eights<2>(fours + i, column + i, sum);
    return sum;
}

// logits of up to ROWS rows from `first_row` on, by a block of GATE_WARPS warps: x [rows, hidden] times weights
// [inputs], inputs a multiple of 16.
template <int ROWS>
DEVICE void shared_gate_logits(const float* x, int hidden, int rows, int first_row, const float* weights, int inputs,
                               const float* bias, float* logits, GateInputs<ROWS>& staged) {
    static_assert(ROWS <= WARP && ROWS % GATE_WARPS == 0, "a row is a lane of the first warp");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rows_left = smaller(rows - first_row, ROWS);
    const bool has_row = warp == 0 && lane < rows_left;
    if (rows_left <= 0) return;
    const float* source = x + static_cast<int64>(first_row) * hidden;
    GateLoads<ROWS> loads;
    loads.load(source, hidden, rows_left, weights, inputs, 0, warp, lane);
    Chains<1> chain;
    for (int first = 0; first < inputs; first += BLOCK) {
        __syncthreads();
        loads.store(staged, rows_left, warp, lane);
        __syncthreads();
        if (first + BLOCK < inputs)
            loads.load(source, hidden, rows_left, weights, inputs, first + BLOCK, warp, lane);
        if (first) chain.close(first / BLOCK, inputs);
        if (has_row)
            chain.sums[0] = add_gate_inputs(staged.rows[lane], staged.weights, smaller(BLOCK, inputs - first),
                                            chain.sums[0]);
    }
    if (has_row) {
        const float logit = chain.result(0);
        logits[first_row + lane] = bias ? logit + bias[0] : logit;
    }
}

constexpr int GATE_STAGES = 2;  // of 128 inputs, on their way to one warp

// A lane's four of 128 inputs from `first` on, zeros past `count`, on their way; whole: they lie at 16 bytes.
DEVICE void stage_four(float* staged, const float* from, int first, int count, bool whole, int lane) {
    const int k = first + 4 * lane;
    float* place = staged + 4 * lane;
    if (whole && k < count) {
        copy_async_16(place, from + k);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) place[i] = k + i < count ? from[k + i] : 0.0f;
}

// The same logits by one warp, which others leave little time: as few instructions as may be.
template <int ROWS>
DEVICE void shared_gate_logits_by_warp(const float* x, int hidden, int rows, int first_row, const float* weights,
                                       int inputs, const float* bias, float* logits, GateInputs<ROWS>* staged) {
    const int lane = threadIdx.x % WARP, rows_left = smaller(rows - first_row, ROWS);
    const bool has_row = lane < rows_left, whole = hidden % 4 == 0;
    const float* source = x + static_cast<int64>(first_row) * hidden;
    const auto stage = [&](int first) {
        GateInputs<ROWS>& to = staged[first / BLOCK % GATE_STAGES];
#pragma unroll 1
        for (int row = 0; first < inputs && row < rows_left; row++)
            stage_four(to.rows[row], source + static_cast<int64>(row) * hidden, first, hidden, whole, lane);
        if (first < inputs) stage_four(to.weights, weights, first, inputs, true, lane);
        copy_async_commit();
    };
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < GATE_STAGES; i++) stage(i * BLOCK);
    Chains<1> chain;
#pragma unroll 1
    for (int first = 0; first < inputs; first += BLOCK) {
        if (first) chain.close(first / BLOCK, inputs);
        const GateInputs<ROWS>& own = staged[first / BLOCK % GATE_STAGES];
        copy_async_wait<GATE_STAGES - 1>();
        __syncwarp();
        if (has_row)
            chain.sums[0] = add_gate_inputs(own.rows[lane], own.weights, smaller(BLOCK, inputs - first),
                                            chain.sums[0]);
        __syncwarp();
        stage(first + GATE_STAGES * BLOCK);
    }
    if (!has_row) return;
    const float logit = chain.result(0);
    logits[first_row + lane] = bias ? logit + bias[0] : logit;
}
