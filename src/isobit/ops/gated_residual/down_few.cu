// The first half of a gated read of up to 8 rows, in one launch: what is written to the streams, their norms, and the
// chains of down and inject over the normed streams.
//
// Every k-shard is whole streams, and a block norms those of its shard itself, so that it waits for no other. It writes
// no stream: others may still read them; mix_few does. Macros: STREAMS, HIDDEN; ROWS at most; FEEDERS, warps that feed
// a chain; those of plain_chain.cuh.
#include "device.cuh"
#define PARTS 2
#include "ops/linear/plain_chain.cuh"

static_assert(ROWS * PARTS <= 8 * ROW_TILES * CHAIN_WARPS, "the chain warp has a column for every part of a row");
constexpr int WARPS = FEEDERS + CHAIN_WARPS;
constexpr int INPUTS = STREAMS * HIDDEN, TILES = INPUTS / SIDE;

DEVICE const float4& quad_at(const float* at) { return *reinterpret_cast<const float4*>(at); }
DEVICE float4& quad_at(float* at) { return *reinterpret_cast<float4*>(at); }

DEVICE bool is_real(int row, int rows) { return row == 0 || row < rows; }

DEVICE float4 fma_quad(float weight, const float4& a, const float4& b) {
    return make_float4(fma32(weight, a.x, b.x), fma32(weight, a.y, b.y), fma32(weight, a.z, b.z),
                       fma32(weight, a.w, b.w));
}

// What a lane has of a feeder's chunk: quads lane, lane + 32 ... of every row.
struct OwnQuads {
    float4 factors[ROW_QUADS], values[ROWS][ROW_QUADS];
    int first, count;  // the lane's first input, of all; the chunk's inputs

    __device__ __forceinline__ OwnQuads(int first_tile, int tiles, int lane)
        : first(first_tile * SIDE + 4 * lane), count(tiles * SIDE - 4 * lane) {}

    __device__ __forceinline__ bool has(int j) const { return 4 * j * WARP < count; }
    __device__ __forceinline__ int input(int j) const { return first + 4 * j * WARP; }

    // 1 + norm_weight [INPUTS], a constant.
    __device__ __forceinline__ void load_factors(const float* norm_weight) {
#pragma unroll
        for (int j = 0; j < ROW_QUADS; j++)
            if (has(j)) {
                const uint4 bits = load_ahead(reinterpret_cast<const uint4*>(norm_weight + input(j)));
                factors[j] = make_float4(1.0f + float_of(bits.x), 1.0f + float_of(bits.y), 1.0f + float_of(bits.z),
                                         1.0f + float_of(bits.w));
            }
    }

    // Of streams [rows, INPUTS] after `injection` [rows, STREAMS] * y [rows, HIDDEN] is added, where there is a y.
    __device__ __forceinline__ void load_values(const float* streams, const float* injection, const float* y,
                                                int rows) {
        float4 added[ROWS][ROW_QUADS];
        float strengths[ROWS][ROW_QUADS];
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++)
                if (is_real(row, rows) && has(j)) {
                    values[row][j] = quad_at(streams + row * INPUTS + input(j));
                    if (y) added[row][j] = quad_at(y + row * HIDDEN + input(j) % HIDDEN);
                    if (y) strengths[row][j] = injection[row * STREAMS + input(j) / HIDDEN];
                }
        if (!y) return;
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++)
                if (is_real(row, rows) && has(j))
                    values[row][j] = fma_quad(strengths[row][j], added[row][j], values[row][j]);
    }

    // To staged [rows, width], whose first input is `from`.
    __device__ __forceinline__ void stage(float* staged, int width, int from, int rows) const {
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++)
                if (is_real(row, rows) && has(j)) quad_at(staged + row * width + input(j) - from) = values[row][j];
    }

    // Normed, to the chunk's operand. inverses: those of the streams, by row and stream of all.
    __device__ __forceinline__ void feed(const Chunk& chunk, const float (*inverses)[STREAMS], int lane,
                                         int rows) const {
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++)
                if (is_real(row, rows) && has(j)) {
                    const float inverse = inverses[row][input(j) / HIDDEN];
                    const float4 v = values[row][j], factor = factors[j];
                    store_quad(chunk, row, lane + j * WARP,
                               make_float4((v.x * inverse) * factor.x, (v.y * inverse) * factor.y,
                                           (v.z * inverse) * factor.z, (v.w * inverse) * factor.w));
                }
    }
};

// 1 / sqrt(mean of squares + eps) of a stream in shared memory, by a warp: lane j is accumulator j of the lane sum.
DEVICE float inverse_norm(const float* values, int lane, float eps) {
    constexpr int WHOLE = HIDDEN / WARP;
    float squares = 0.0f;
#pragma unroll 40
    for (int i = 0; i < WHOLE; i++) {
        const float value = values[i * WARP + lane];
        squares = fma32(value, value, squares);
    }
    if (WHOLE * WARP + lane < HIDDEN) {
        const float value = values[WHOLE * WARP + lane];
        squares = fma32(value, value, squares);
    }
    return rsqrt32(lane_sum(squares) / static_cast<float>(HIDDEN) + eps);
}

// grid (N / 16, shards), threads 32 * WARPS, whose chunks hold a whole shard. weights: uint4 [N / 16, TILES, 32];
// norm_weight: float [INPUTS]; streams: float [rows, INPUTS], y [rows, HIDDEN], rows at 16 bytes, injection
// [rows, STREAMS]; y: null where nothing is written. values: float [shards * PARTS, rows, N]; inverse: float
// [rows, STREAMS], the streams' 1 / sqrt(mean of squares + eps).
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1)
down_few(const uint4* __restrict__ weights, const float* norm_weight, const float* streams, const float* injection,
         const float* y, float* values, float* inverse, int rows, float eps) {
    DYNAMIC_SHARED(uint4, shared);
    __shared__ float inverses[ROWS][STREAMS];
    begin_turns();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first_tile = shard_tile(blockIdx.y, gridDim.y, TILES);
    const int tiles = shard_tile(blockIdx.y + 1, gridDim.y, TILES) - first_tile, width = tiles * SIDE;
    const Chunks chunks = {shared, FEEDERS, rows * PARTS};
    float* staged = reinterpret_cast<float*>(chunks.operands());
    const bool carries = warp < CHAIN_WARPS;
    const int feeder = warp - CHAIN_WARPS;
    const int own_tile = carries ? tiles : smaller(feeder * CHUNK_TILES, tiles);
    const int own_tiles = smaller(CHUNK_TILES, tiles - own_tile);
    OwnQuads own(first_tile + own_tile, own_tiles, lane);
    if (own_tiles) {
        const uint4* column = weights + static_cast<int64>(blockIdx.x) * TILES * WARP;
        feed_weights(chunks.at(feeder), column + static_cast<int64>(first_tile + own_tile) * WARP, own_tiles, lane);
        own.load_factors(norm_weight);
    }
    await_inputs();
    if (own_tiles) {
        own.load_values(streams, injection, y, rows);
        own.stage(staged, width, first_tile * SIDE, rows);
    }
    __syncthreads();
    const int first_stream = first_tile * SIDE / HIDDEN, own_streams = width / HIDDEN;
    // Warps take the streams of the first, of the second row ... in turn, the chain warp the very first.
    for (int stream = warp; stream < rows * own_streams; stream += WARPS) {
        int row = 0, own_stream = stream;
        for (; own_stream >= own_streams; own_stream -= own_streams) row++;
        const float found = inverse_norm(staged + row * width + own_stream * HIDDEN, lane, eps);
        if (lane) continue;
        inverses[row][first_stream + own_stream] = found;
        if (!blockIdx.x) inverse[row * STREAMS + first_stream + own_stream] = found;
    }
    __syncthreads();
    if (carries) {
        Chains chains(warp, lane, chunks.places);
        carry_left(chains, chunks, tiles, 1, lane);
        store_sums(chains, warp, lane, values, blockIdx.y, 0, rows, rows);
    } else if (own_tiles) {
        own.feed(chunks.at(feeder), inverses, lane, rows);
        copy_async_wait<0>();
        hand_over(1 + feeder, CHUNK_THREADS);
    }
}
