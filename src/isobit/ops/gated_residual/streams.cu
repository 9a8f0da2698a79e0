// Residual streams: copies into them, additions to them, and the norm's factor of each.
//
// HELD: how many of a stream's values a lane keeps in registers; 0: it is walked through twice. VALUES: how many
// neighbouring ones a thread takes at once.
#include "device.cuh"
#include "ops/norm/staged.cuh"

// streams [rows, count, width] = x [rows, width] in every stream.
extern "C" __global__ void expand_streams(const float* x, float* streams, int count, int width) {
    await_inputs();
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

// Ask for weights that the next kernels read; `bytes` is a multiple of 16.
DEVICE void fetch(const unsigned char* weights, int64 bytes, int thread, int threads) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    constexpr int64 PIECE = 4096;
    for (int64 at = thread * PIECE; at < bytes; at += threads * PIECE)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                     :: "l"(weights + at), "r"(static_cast<unsigned>(smaller(PIECE, bytes - at))) : "memory");
#endif
}

// For few rows. normed [n, width] = the norm of streams [n, width] times 1 + weight [count, width], a block a stream;
// where there is a y, streams += injection * y before, as write_streams. Blocks past the streams ask for the weights of
// what follows. The width is a multiple of 4, and all rows lie at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(STAGED_THREADS, 1)
norm_streams(float* streams, const float* injection, const float* y, const float* __restrict__ weight, float* normed,
             int streams_in_all, int count, int width, float eps, const unsigned char* first_weights, int64 first_bytes,
             const unsigned char* second_weights, int64 second_bytes) {
    DYNAMIC_SHARED(float, own);
    __shared__ float inverse;
    const int stream = blockIdx.x, thread = threadIdx.x;
    if (stream >= streams_in_all) {
        const int fetching = (stream - streams_in_all) * STAGED_THREADS + thread;
        const int threads = (gridDim.x - streams_in_all) * STAGED_THREADS;
        fetch(first_weights, first_bytes, fetching, threads);
        fetch(second_weights, second_bytes, fetching, threads);
        await_inputs();
        return;
    }
    float* values = streams + static_cast<int64>(stream) * width;
    float* out = normed + static_cast<int64>(stream) * width;
    float* factors = own + width;
    float* added = factors + width;
    stage_floats(factors, weight + static_cast<int64>(stream % count) * width, width);
    await_inputs();
    stage_floats(own, values, width);
    if (y) stage_floats(added, y + static_cast<int64>(stream / count) * width, width);
    copy_async_commit();
    const float strength = y ? injection[stream] : 0.0f;
    copy_async_wait<0>();
    __syncthreads();
    if (y) {
#pragma unroll 4
        for (int at = 4 * thread; at < width; at += 4 * STAGED_THREADS) {
            const float4 more = four_of(added + at);
            float4 v = four_of(own + at);
            v.x = fma32(strength, more.x, v.x), v.y = fma32(strength, more.y, v.y);
            v.z = fma32(strength, more.z, v.z), v.w = fma32(strength, more.w, v.w);
            four_of(own + at) = four_of(values + at) = v;
        }
        __syncthreads();
    }
    norm_staged(own, factors, out, width, eps, &inverse);
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
