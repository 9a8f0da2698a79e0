// The steps of a gated read between linear layers that keep their own arithmetic.
#include "device.cuh"

// low [count] = silu(low / streams), in place.
extern "C" __global__ void activate(float* __restrict__ low, int64 count, float streams) {
    const int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) low[at] = silu32(low[at] / streams);
}

// mixed [rows, hidden] from normed and up [rows, streams, hidden]; injection [rows, streams] from `written`, if given.
extern "C" __global__ void mix(const float* __restrict__ normed, const float* __restrict__ up,
                               const float* __restrict__ written, float* __restrict__ mixed,
                               float* __restrict__ injection, int streams, int hidden) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int64 row = blockIdx.y;
    const float count = static_cast<float>(streams);
    if (written && column < streams) {
        const int64 at = row * streams + column;
        injection[at] = 2.0f * sigmoid32(written[at] / count);
    }
    if (column >= hidden) return;
    float total = 0.0f;
    for (int stream = 0; stream < streams; stream++) {
        const int64 at = (row * streams + stream) * hidden + column;
        const float value = sigmoid32(up[at]) * normed[at];
        total = stream ? total + value : value;
    }
    mixed[row * hidden + column] = total / count;
}
