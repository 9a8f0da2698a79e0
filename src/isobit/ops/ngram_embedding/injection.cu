// The gates of the injection and what its convolution reads; docs/arithmetic.md, *ngram_embedding*. Macro: HIDDEN.
#include "device.cuh"

constexpr float LEAST_DOT = 1e-6f;

// A warp copies a row to shared memory; the copy is there after copy_async_wait and __syncwarp.
DEVICE void copy_row(float* to, const float* from) {
    if (HIDDEN % 4 == 0) {
        for (int i = 4 * threadIdx.x; i < HIDDEN; i += 4 * WARP) copy_async_16(to + i, from + i);
    } else {
        for (int i = threadIdx.x; i < HIDDEN; i += WARP) to[i] = from[i];
    }
}

DEVICE float inverse_rms(float squares, float eps) {
    return rsqrt32(lane_sum(squares) / static_cast<float>(HIDDEN) + eps);
}

DEVICE float normed(float x, float inverse, float weight) { return (x * inverse) * (1.0f + weight); }

DEVICE float gate_of(float dot) {
    const float size = sqrt32(absolute(dot) < LEAST_DOT ? LEAST_DOT : absolute(dot));
    return sigmoid32(dot > 0.0f ? size : dot < 0.0f ? -size : 0.0f);
}

// One warp a block, for one stream of one row. streams, key, conv_input [rows * count, HIDDEN]; value [rows, HIDDEN];
// norm weights [count, HIDDEN]; gates [rows * count]. Dynamic shared memory: 3 * HIDDEN floats.
extern "C" __global__ void gate_streams(
    const float* streams, const float* key, const float* value, const float* __restrict__ norm_key,
    const float* __restrict__ norm_query, const float* __restrict__ norm_conv, float root, float eps, int count,
    float* __restrict__ gates, float* __restrict__ conv_input) {
    DYNAMIC_SHARED(float, keys);
    float* queries = keys + HIDDEN;
    float* values = queries + HIDDEN;
    const int64 at = static_cast<int64>(blockIdx.x) * HIDDEN;
    const int weights = blockIdx.x % count * HIDDEN;
    copy_row(keys, key + at);
    copy_row(queries, streams + at);
    copy_async_commit();
    copy_row(values, value + static_cast<int64>(blockIdx.x / count) * HIDDEN);
    copy_async_commit();

    copy_async_wait<1>();
    __syncwarp();
    float key_squares = 0.0f, query_squares = 0.0f;
#pragma unroll 20
    for (int i = threadIdx.x; i < HIDDEN; i += WARP) {
        key_squares = fma32(keys[i], keys[i], key_squares);
        query_squares = fma32(queries[i], queries[i], query_squares);
    }
    const float key_inverse = inverse_rms(key_squares, eps), query_inverse = inverse_rms(query_squares, eps);
    float product = 0.0f;
#pragma unroll 20
    for (int i = threadIdx.x; i < HIDDEN; i += WARP)
        product = fma32(normed(keys[i], key_inverse, norm_key[weights + i]),
                        normed(queries[i], query_inverse, norm_query[weights + i]), product);
    const float gate = gate_of(lane_sum(product) / root);
    if (threadIdx.x == 0) gates[blockIdx.x] = gate;

    copy_async_wait<0>();
    __syncwarp();
    float squares = 0.0f;
#pragma unroll 20
    for (int i = threadIdx.x; i < HIDDEN; i += WARP) {
        const float gated = gate * values[i];
        squares = fma32(gated, gated, squares);
    }
    const float inverse = inverse_rms(squares, eps);
#pragma unroll 20
    for (int i = threadIdx.x; i < HIDDEN; i += WARP)
        conv_input[at + i] = normed(gate * values[i], inverse, norm_conv[weights + i]);
}
