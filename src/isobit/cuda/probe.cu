// What the dialect itself computes, for its tests: scalar functions, conversions and warp collectives.
#include "device.cuh"
#include "ops/linear/cuda_turns.cuh"
#include "ops/linear/staged.cuh"

extern "C" __global__ void scalars(const float* x, float* y, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float v = x[i];
    float* out = y + 6 * i;
    out[0] = exp32(v);
    out[1] = sigmoid32(v);
    out[2] = silu32(v);
    out[3] = softplus32(v);
    out[4] = rsqrt32(v);
    out[5] = float_of_half(half_of(v));
}

extern "C" __global__ void doubles(const double* x, double* y, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    y[2 * i] = exp64(x[i]);
    y[2 * i + 1] = log64(x[i]);
}

extern "C" __global__ void sums(const float* x, float* y) {
    y[blockIdx.x * WARP + threadIdx.x] = lane_sum(x[blockIdx.x * WARP + threadIdx.x]);
}

// c [16, 8] = a [16, 16] b [8, 16]^T through matrix loads from shared memory.
extern "C" __global__ void product(const uint4* a, const uint4* b, float* c) {
    __shared__ uint4 left[32], right[16];
    const int lane = threadIdx.x;
    left[lane] = a[lane];
    if (lane < 16) right[lane] = b[lane];
    __syncthreads();
    const half_bits* a_rows = reinterpret_cast<const half_bits*>(left);
    const half_bits* b_rows = reinterpret_cast<const half_bits*>(right);
    unsigned fa[4], fb[4];
    load_matrix_x4(fa, a_rows + (lane % 16) * 16 + (lane / 16) * 8);
    load_matrix_x4(fb, b_rows + (lane % 8) * 16 + (lane / 8 % 2) * 8);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_16x8x16(sums, fa, fb);
    const int group = lane / 4, pair = lane % 4;
    c[group * 8 + 2 * pair] = sums[0];
    c[group * 8 + 2 * pair + 1] = sums[1];
    c[(group + 8) * 8 + 2 * pair] = sums[2];
    c[(group + 8) * 8 + 2 * pair + 1] = sums[3];
}

// y [32] = constant [32] + x [32]; the constant is read before the inputs are awaited.
extern "C" __global__ void awaits(const float* constant, const float* x, float* y) {
    const float held = constant[threadIdx.x];
    await_inputs();
    y[threadIdx.x] = held + x[threadIdx.x];
}

extern "C" __global__ void reads_too_soon(const float* constant, const float* x, float* y) {
    const float held = x[threadIdx.x];
    await_inputs();
    y[threadIdx.x] = held + constant[threadIdx.x];
}

extern "C" __global__ void writes_too_soon(const float* constant, const float* x, float* y) {
    y[threadIdx.x] = constant[threadIdx.x];
    await_inputs();
}

extern "C" __global__ void never_awaits(const float* constant, const float* x, float* y) {
    if (blockIdx.x == 0) await_inputs();
    y[threadIdx.x] = constant[threadIdx.x];
}

extern "C" __global__ void early_exit(float* y) {
    if (threadIdx.x == 3) return;
    y[threadIdx.x] = lane_sum(1.0f);
}

extern "C" __global__ void lost_barrier(float* y) {
    if (threadIdx.x < 32) __syncthreads();
    else y[threadIdx.x] = lane_sum(1.0f);
    if (threadIdx.x < 32) __syncthreads();
    else shuffle(1.0f, 0);
    if (threadIdx.x == 0) __syncwarp();
}

// The first warp waits for a second pass before there was a first.
extern "C" __global__ void waits_out_of_turn(float* y) {
    __shared__ uint64 barrier[1];
    const int lane = threadIdx.x % WARP;
    if (threadIdx.x < WARP) begin_passing(barrier, lane);
    __syncthreads();
    if (threadIdx.x < WARP) wait_for_pass(barrier_at(barrier), 2);
    __syncthreads();
    if (threadIdx.x < WARP) return;
    pass(barrier_at(barrier), lane);
    pass(barrier_at(barrier), lane);
}

// y [blocks]: what the second warp reads where the first one writes, and neither waits for the other.
extern "C" __global__ void races(float* y) {
    DYNAMIC_SHARED(float, shared);
    if (threadIdx.x == 0) shared[0] = 1.0f;
    if (threadIdx.x == WARP) y[blockIdx.x] = shared[0];
}

// y [64]: shared memory by offsets, of which half is not the launch's.
extern "C" __global__ void reads_past_the_end(float* y) {
    DYNAMIC_SHARED(float, shared);
    y[threadIdx.x] = float_of(word_at<0>(offset_of(shared + threadIdx.x)));
}
