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

// The row so many after the first, or the last.
template <int COUNT>
DEVICE int row_of(const Sums& sums, int first, int number) {
    return COUNT == 1 ? first : smaller(first + number, sums.rows - 1);
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

// Four neighbouring outputs of COUNT rows from `first` on, on their way together; rows past the last repeat it. The
// column is a multiple of 4, as are the columns.
template <int COUNT>
DEVICE void totals_of_rows(const Sums& sums, int first, int column, float v[COUNT][4]) {
    const int64 stride = static_cast<int64>(sums.rows) * sums.columns;
    const float* at[COUNT];
#pragma unroll
    for (int row = 0; row < COUNT; row++)
        at[row] = sums.values + first_sum(sums, row_of<COUNT>(sums, first, row), column);
    if (sums.terms == 1) {
#pragma unroll
        for (int row = 0; row < COUNT; row++) {
            const float4 four = fresh(reinterpret_cast<const float4*>(at[row]));
            v[row][0] = four.x, v[row][1] = four.y, v[row][2] = four.z, v[row][3] = four.w;
        }
        return;
    }
    double totals[COUNT][4] = {};
#pragma unroll 1
    for (int term = 0; term < sums.terms; term += TERMS_AHEAD) {
        float4 next[COUNT][TERMS_AHEAD];
#pragma unroll
        for (int row = 0; row < COUNT; row++)
#pragma unroll
            for (int i = 0; i < TERMS_AHEAD; i++) {
                const int own = smaller(term + i, sums.terms - 1);
                next[row][i] = fresh(reinterpret_cast<const float4*>(at[row] + own * stride));
            }
#pragma unroll
        for (int row = 0; row < COUNT; row++)
#pragma unroll
            for (int i = 0; i < TERMS_AHEAD; i++) {
                totals[row][0] = with_term(totals[row][0], next[row][i].x, term + i, sums.terms);
                totals[row][1] = with_term(totals[row][1], next[row][i].y, term + i, sums.terms);
                totals[row][2] = with_term(totals[row][2], next[row][i].z, term + i, sums.terms);
                totals[row][3] = with_term(totals[row][3], next[row][i].w, term + i, sums.terms);
            }
    }
#pragma unroll
    for (int row = 0; row < COUNT; row++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[row][i] = static_cast<float>(totals[row][i]);
}

// The same of one row.
DEVICE void totals_of(const Sums& sums, int row, int column, float v[4]) {
    totals_of_rows<1>(sums, row, column, reinterpret_cast<float(*)[4]>(v));
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

// Scale and store one row's block of 128 rotated sums; v, and scale, hold its columns 4 * lane to 4 * lane + 3.
DEVICE void finish_rotated(const Finish& finish, int row, int block, float v[4], const float scale[4], int lane) {
    const int column = block * ROTATION + 4 * lane;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = v[i] * scale[i];
        if (finish.bias) v[i] = v[i] + finish.bias[column + i];
    }
    store_outputs(finish, row, column, v);
}

// Rotate one row's block of 128 sums out.
DEVICE void finish_scaled(const Finish& finish, int row, int block, float v[4], const float scale[4], int lane) {
    rotate_128(v, lane);
    finish_rotated(finish, row, block, v, scale, lane);
}

DEVICE void finish_block(const Finish& finish, int row, int block, float v[4], int lane) {
    float scale[4];
    load_halves(finish.scales + block * ROTATION + 4 * lane, scale);
    finish_scaled(finish, row, block, v, scale, lane);
}

// The same of COUNT rows from `first` on, of sums that were added up; rows past the last repeat it.
template <int COUNT>
DEVICE void finish_rows(const Sums& sums, const Finish& finish, int first, int block, int lane) {
    float v[COUNT][4];
    totals_of_rows<COUNT>(sums, first, block * ROTATION + 4 * lane, v);
    if (COUNT == 1) {
        finish_block(finish, first, block, v[0], lane);
        return;
    }
    float scale[4];
    load_halves(finish.scales + block * ROTATION + 4 * lane, scale);
#pragma unroll
    for (int row = 0; row < COUNT; row++) rotate_128(v[row], lane);
#pragma unroll
    for (int row = 0; row < COUNT; row++)
        finish_rotated(finish, row_of<COUNT>(sums, first, row), block, v[row], scale, lane);
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

// Where in sums [rows, columns] the chains of a column of tiles go, the C operand of each 8 rows, from `first_output`
// on: put(place, sum) of each.
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
