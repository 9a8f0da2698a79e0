// Residual streams: copies into them, additions to them, and the norm's factor of each.
//
// HELD: how many of a stream's values a lane keeps in registers; 0: it is walked through twice. VALUES: how many
// neighbouring ones a thread takes at once.
#include "device.cuh"

// streams [rows, count, width] = x [rows, width] in every stream.
extern "C" __global__ void expand_streams(const float* __restrict__ x, float* __restrict__ streams, int count,
                                          int width) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int64 row = blockIdx.y;
    if (column >= width) return;
    const float value = x[row * width + column];
    for (int stream = 0; stream < count; stream++) streams[(row * count + stream) * width + column] = value;
}

#ifdef VALUES
struct alignas(4 * VALUES) Values { float of[VALUES]; };

// streams [rows, count, width] += injection [rows, count] (1 where there is none) * y [rows, width], fused; width in
// units of VALUES.
extern "C" __global__ void add_to_streams(Values* __restrict__ streams, const float* __restrict__ injection,
                                          const Values* __restrict__ y, int count, int width) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int64 row = blockIdx.y;
    if (column >= width) return;
    const Values added = y[row * width + column];
#pragma unroll 4
    for (int stream = 0; stream < count; stream++) {
        const float weight = injection ? injection[row * count + stream] : 1.0f;
        Values* at = streams + (row * count + stream) * width + column;
        Values values = *at;
#pragma unroll
        for (int i = 0; i < VALUES; i++) values.of[i] = fma32(weight, added.of[i], values.of[i]);
        *at = values;
    }
}
#endif

#ifdef HELD
DEVICE float inverse_rms(float squares, int width, float eps) {
    return rsqrt32(lane_sum(squares) / static_cast<float>(width) + eps);
}

// A warp a stream: streams [n, width] += injection [n] * y [n / count, width], fused, and inverse [n] =
// 1 / sqrt(mean of squares + eps) of what was written, summed as a norm does.
extern "C" __global__ void write_streams(float* __restrict__ streams, const float* __restrict__ injection,
                                         const float* __restrict__ y, float* __restrict__ inverse, int streams_in_all,
                                         int count, int width, float eps) {
    const int lane = threadIdx.x % WARP;
    const int stream = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (stream >= streams_in_all) return;
    float* values = streams + static_cast<int64>(stream) * width;
    const float* added = y + static_cast<int64>(stream / count) * width;
    const float weight = injection[stream];
    float squares = 0.0f;
#if HELD
    float held[HELD], more[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = i * WARP + lane;
        held[i] = at < width ? values[at] : 0.0f;
        more[i] = at < width ? added[at] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int at = i * WARP + lane;
        held[i] = fma32(weight, more[i], held[i]);
        if (at < width) {
            values[at] = held[i];
            squares = fma32(held[i], held[i], squares);
        }
    }
#else
#pragma unroll 8
    for (int at = lane; at < width; at += WARP) {
        const float value = fma32(weight, added[at], values[at]);
        values[at] = value;
        squares = fma32(value, value, squares);
    }
#endif
    const float found = inverse_rms(squares, width, eps);
    if (!lane) inverse[stream] = found;
}

// inverse [n] = 1 / sqrt(mean of squares + eps) of each of streams [n, width], a warp a stream.
extern "C" __global__ void inverse_norms(const float* __restrict__ streams, float* __restrict__ inverse,
                                         int streams_in_all, int width, float eps) {
    const int lane = threadIdx.x % WARP;
    const int stream = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (stream >= streams_in_all) return;
    const float* values = streams + static_cast<int64>(stream) * width;
    float squares = 0.0f;
#if HELD
    float held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = i * WARP + lane < width ? values[i * WARP + lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) squares = fma32(held[i], held[i], squares);
#else
#pragma unroll 16
    for (int at = lane; at < width; at += WARP) squares = fma32(values[at], values[at], squares);
#endif
    const float found = inverse_rms(squares, width, eps);
    if (!lane) inverse[stream] = found;
}
#endif
