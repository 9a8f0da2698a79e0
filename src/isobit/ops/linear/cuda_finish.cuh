// From the k-shards' chains to outputs: the shards' sum, the output rotation, scales and bias.
#pragma once
#include "device.cuh"
#include "ops/linear/rotate.cuh"

// sums: float [terms, rows, columns], the terms of every output in the order of their sum.
struct Sums {
    const float* values;
    int terms, rows, columns;
};

DEVICE int64 first_sum(const Sums& sums, int row, int column) {
    return static_cast<int64>(row) * sums.columns + column;
}

constexpr int TERMS_AHEAD = 4;  // that are on their way at a time

// The sum of an output's terms up to `number`, the first of which begins it.
DEVICE double with_term(double total, float term, int number, int terms) {
    const double value = term;
    return number == 0 ? value : number < terms ? total + value : total;
}

// Sums that other blocks of the same launch may have written: read past L1, which may be older.
DEVICE float fresh(const float* at) {
#ifdef EMULATED
    return *at;
#else
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
#endif
}
DEVICE float4 fresh(const float4* at) {
#ifdef EMULATED
    return *at;
#else
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
#endif
}

// One output: its only term, or the terms added in float64 in order and rounded once.
DEVICE float total_of(const Sums& sums, int row, int column) {
    const int64 stride = static_cast<int64>(sums.rows) * sums.columns;
    const float* at = sums.values + first_sum(sums, row, column);
    if (sums.terms == 1) return fresh(at);
    double total = 0.0;
#pragma unroll 1
    for (int term = 0; term < sums.terms; term += TERMS_AHEAD) {
        float next[TERMS_AHEAD];
#pragma unroll
        for (int i = 0; i < TERMS_AHEAD; i++) next[i] = fresh(at + smaller(term + i, sums.terms - 1) * stride);
#pragma unroll
        for (int i = 0; i < TERMS_AHEAD; i++) total = with_term(total, next[i], term + i, sums.terms);
    }
    return static_cast<float>(total);
}

// Four neighbouring outputs; the column is a multiple of 4, as are the columns.
DEVICE void totals_of(const Sums& sums, int row, int column, float v[4]) {
    const int64 stride = static_cast<int64>(sums.rows) * sums.columns;
    const float* at = sums.values + first_sum(sums, row, column);
    if (sums.terms == 1) {
        const float4 four = fresh(reinterpret_cast<const float4*>(at));
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        return;
    }
    double totals[4] = {};
#pragma unroll 1
    for (int term = 0; term < sums.terms; term += TERMS_AHEAD) {
        float4 next[TERMS_AHEAD];
#pragma unroll
        for (int i = 0; i < TERMS_AHEAD; i++)
            next[i] = fresh(reinterpret_cast<const float4*>(at + smaller(term + i, sums.terms - 1) * stride));
#pragma unroll
        for (int i = 0; i < TERMS_AHEAD; i++) {
            totals[0] = with_term(totals[0], next[i].x, term + i, sums.terms);
            totals[1] = with_term(totals[1], next[i].y, term + i, sums.terms);
            totals[2] = with_term(totals[2], next[i].z, term + i, sums.terms);
            totals[3] = with_term(totals[3], next[i].w, term + i, sums.terms);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = static_cast<float>(totals[i]);
}

// What becomes of a layer's sums: float y [rows, outputs]. No scales: a plain layer, not rotated.
struct Finish {
    const half_bits* scales;
    const float* bias;
    float* y;
    int outputs;
};

// Write outputs column to column + 3 of a row, without those past the end.
DEVICE void store_outputs(const Finish& finish, int row, int column, const float v[4]) {
    float* out = finish.y + static_cast<int64>(row) * finish.outputs + column;
    if (finish.outputs % 4 == 0) {
        if (column < finish.outputs) *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i < finish.outputs) out[i] = v[i];
}

// Rotate one row's block of 128 sums out; v, and scale, hold those of columns 4 * lane to 4 * lane + 3 of the block.
DEVICE void finish_scaled(const Finish& finish, int row, int block, float v[4], const float scale[4], int lane) {
    const int column = block * ROTATION + 4 * lane;
    rotate_128(v, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = v[i] * scale[i];
        if (finish.bias) v[i] = v[i] + finish.bias[column + i];
    }
    store_outputs(finish, row, column, v);
}

DEVICE void finish_block(const Finish& finish, int row, int block, float v[4], int lane) {
    float scale[4];
    load_halves(finish.scales + block * ROTATION + 4 * lane, scale);
    finish_scaled(finish, row, block, v, scale, lane);
}

// Count `count` arrivals at a counter by one thread; whether they complete it, which then is 0 again. What others wrote
// before their arrivals is then to be seen.
DEVICE bool completes(int* counter, int count, int expected) {
#ifdef EMULATED
    const int before = *counter;
    *counter += count;
#else
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(counter), "r"(count) : "memory");
#endif
    if (before + count != expected) return false;
    *counter = 0;
    return true;
}

// The same for a whole block, in all of its threads.
DEVICE bool arrives_last(int* counter, int count, int expected) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = completes(counter, count, expected);
    __syncthreads();
    return last;
}

// Where in sums [rows, columns] the chains of a column of tiles go, the C operand of each 8 rows, from `first_output` on:
// put(place, sum) of each.
template <int COUNT, typename Put>
DEVICE void put_column(const float (&chains)[COUNT][4], int rows, int columns, int first_output, int lane, Put&& put) {
    const int output = first_output + lane / 4;
#pragma unroll
    for (int tile = 0; tile < COUNT; tile++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 8 * tile + 2 * (lane % 4) + i;
            if (row >= rows) continue;
            const int64 place = static_cast<int64>(row) * columns + output;
            put(place, chains[tile][i]);
            put(place + 8, chains[tile][2 + i]);
        }
    }
}

// Write the chains to sums.
template <int COUNT>
DEVICE void store_column(const float (&chains)[COUNT][4], float* sums, int rows, int columns, int first_output,
                         int lane) {
    put_column(chains, rows, columns, first_output, lane, [=](int64 place, float sum) { sums[place] = sum; });
}
