// The first half of a gated read of many rows: streams normed on their way into the layers `down` and `inject`.
//
// Their weights lie together as the A operand's registers, uint4 [columns / 16, inputs / 16, 32]. The normed streams
// are the B operand, as a half and the half of what that leaves: two chains an output and k-shard.
#include "device.cuh"
#include "ops/gated_residual/read.cuh"

constexpr int WIDE = STREAMS * HIDDEN;
constexpr int ALL_STEPS = WIDE / SIDE;
constexpr int BLOCK_STEPS = 128 / SIDE;
constexpr int BLOCKS = (ALL_STEPS + BLOCK_STEPS - 1) / BLOCK_STEPS;

constexpr int ROW_TILES = 8, ROWS = ROW_TILES * ROW_TILE;  // of a block
constexpr int STAGE = 4;                                   // steps that are staged at a time
constexpr int WEIGHT_STAGES = 3;
constexpr int WARPS = 8, COLUMN_WARPS = 4, WARP_TILES = 5, GROUP_TILES = 4;
constexpr int TILES = COLUMN_WARPS * WARP_TILES + 1;       // the last is shared out by row tiles
constexpr int DOWN_THREADS = WARPS * WARP;
constexpr int CHAINS = WARP_TILES * GROUP_TILES * 2;

struct DownRoom {
    uint4 weights[WEIGHT_STAGES][TILES][STAGE][WARP];
    uint4 inputs[2][ROW_TILES][STAGE][WARP];  // the pairs of the half, then of what it leaves
};

DEVICE void stage_weights(DownRoom& room, const uint4* weights, int buffer, int step, int last, int tiles) {
    if (step < last)
        for (int i = threadIdx.x; i < TILES * STAGE * WARP; i += DOWN_THREADS) {
            const int tile = i / (STAGE * WARP), at = i / WARP % STAGE, lane = i % WARP;
            if (tile < tiles && step + at < last)
                copy_async_16(&room.weights[buffer][tile][at][lane],
                              weights + (static_cast<int64>(tile) * ALL_STEPS + step + at) * WARP + lane);
        }
    copy_async_commit();
}

// A lane's inputs of its row in one step: columns 2t, 2t + 1, 2t + 8, 2t + 9.
struct Inputs { float2 low, high; };

DEVICE Inputs load_inputs(const float* row, int step, int pair, bool real) {
    if (!real) return {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
    const float2* at = reinterpret_cast<const float2*>(row + step * SIDE) + pair;
    return {at[0], at[4]};
}

DEVICE float normed(float x, float inverse, float weight) { return (x * inverse) * (1.0f + weight); }

DEVICE uint4 split_inputs(const Inputs& x, float inverse, const float* norm_weight, int step, int pair) {
    const Inputs weights = load_inputs(norm_weight, step, pair, true);
    const float values[4] = {normed(x.low.x, inverse, weights.low.x), normed(x.low.y, inverse, weights.low.y),
                             normed(x.high.x, inverse, weights.high.x), normed(x.high.y, inverse, weights.high.y)};
    half_bits rounded[4], left[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        rounded[i] = half_of(values[i]);
        left[i] = half_of(values[i] - float_of_half(rounded[i]));
    }
    return make_uint4(pack_half2(rounded[0], rounded[1]), pack_half2(rounded[2], rounded[3]),
                      pack_half2(left[0], left[1]), pack_half2(left[2], left[3]));
}

// A stage's steps: a warp's tiles of columns by its tiles of rows.
DEVICE void multiply_stage(float (*chains)[4], const uint4 (*weights)[STAGE][WARP], const uint4 (*inputs)[STAGE][WARP],
                           int steps, int lane) {
#pragma unroll
    for (int step = 0; step < STAGE; step++) {
        if (step >= steps) break;
        uint4 b[GROUP_TILES];
#pragma unroll
        for (int tile = 0; tile < GROUP_TILES; tile++) b[tile] = inputs[tile][step][lane];
#pragma unroll
        for (int out = 0; out < WARP_TILES; out++) {
            const uint4 a = weights[out][step][lane];
#pragma unroll
            for (int tile = 0; tile < GROUP_TILES; tile++) {
                multiply(chains[(out * GROUP_TILES + tile) * 2], a, b[tile].x, b[tile].y);
                multiply(chains[(out * GROUP_TILES + tile) * 2 + 1], a, b[tile].z, b[tile].w);
            }
        }
    }
}

// The same for the last tile of columns and one of rows.
DEVICE void multiply_last(float (*chains)[4], const uint4 (*weights)[WARP], const uint4 (*inputs)[WARP], int steps,
                          int lane) {
#pragma unroll
    for (int step = 0; step < STAGE; step++) {
        if (step >= steps) break;
        const uint4 a = weights[step][lane], b = inputs[step][lane];
        multiply(chains[0], a, b.x, b.y);
        multiply(chains[1], a, b.z, b.w);
    }
}

template <int OUT, int IN>
DEVICE void store_chains(const float (*chains)[4], float* sums, int first_column, int last_column, int first_row,
                         int rows, int width, int group, int pair) {
    const int64 part = static_cast<int64>(rows) * width;
#pragma unroll
    for (int out = 0; out < OUT; out++)
#pragma unroll
        for (int tile = 0; tile < IN; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = first_column + out * SIDE + group + i / 2 * 8;
                const int row = first_row + tile * ROW_TILE + 2 * pair + i % 2;
                if (column >= last_column || row >= rows) continue;
                float* at = sums + static_cast<int64>(row) * width + column;
                at[0] = chains[(out * IN + tile) * 2][i];
                at[part] = chains[(out * IN + tile) * 2 + 1][i];
            }
}

// sums: float [2 * shards, rows, width], of every shard the chain of halves, then of what they leave. grid (row blocks,
// shards, groups of TILES tiles).
extern "C" __global__ void __launch_bounds__(DOWN_THREADS, 1)
down_many(const uint4* __restrict__ weights, const float* __restrict__ streams, const float* __restrict__ inverse,
          const float* __restrict__ norm_weight, float* __restrict__ sums, int rows, int width) {
    DYNAMIC_SHARED(DownRoom, shared);
    DownRoom& room = *shared;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, pair = lane % 4;
    const int shard = blockIdx.y, shards = gridDim.y, first_tile = blockIdx.z * TILES;
    const int tiles = smaller(TILES, width / SIDE - first_tile);
    const int first = shard * BLOCKS / shards * BLOCK_STEPS;
    const int last = smaller((shard + 1) * BLOCKS / shards * BLOCK_STEPS, ALL_STEPS);
    weights += static_cast<int64>(first_tile) * ALL_STEPS * WARP;
    const int row = blockIdx.x * ROWS + warp * ROW_TILE + group;
    const bool real = row < rows;
    const float* own_row = streams + static_cast<int64>(real ? row : 0) * WIDE;
    const float* own_inverse = inverse + static_cast<int64>(real ? row : 0) * STREAMS;
    const int own_tile = warp % COLUMN_WARPS * WARP_TILES, own_rows = warp / COLUMN_WARPS * GROUP_TILES;

    const int first_row = blockIdx.x * ROWS;
    const bool works = own_tile < tiles && first_row + own_rows * ROW_TILE < rows;
    const bool works_last = tiles == TILES && first_row + warp * ROW_TILE < rows;

    float chains[CHAINS][4] = {}, last_chains[2][4] = {};
    Inputs ahead[STAGE];
    stage_weights(room, weights, 0, first, last, tiles);
    stage_weights(room, weights, 1, first + STAGE, last, tiles);
#pragma unroll
    for (int i = 0; i < STAGE; i++) ahead[i] = load_inputs(own_row, first + i, pair, real && first + i < last);
    int buffer = 0, parity = 0;
#pragma unroll 1
    for (int step = first; step < last; step += STAGE) {
#pragma unroll
        for (int i = 0; i < STAGE; i++)
            if (step + i < last) {
                const float scale = own_inverse[(step + i) * SIDE / HIDDEN];
                room.inputs[parity][warp][i][lane] = split_inputs(ahead[i], scale, norm_weight, step + i, pair);
            }
        copy_async_wait<1>();
        __syncthreads();
        stage_weights(room, weights, (buffer + 2) % WEIGHT_STAGES, step + 2 * STAGE, last, tiles);
#pragma unroll
        for (int i = 0; i < STAGE; i++) {
            const int next = step + STAGE + i;
            ahead[i] = load_inputs(own_row, next, pair, real && next < last);
        }
        const int steps = smaller(STAGE, last - step);
        if (works) multiply_stage(chains, &room.weights[buffer][own_tile], &room.inputs[parity][own_rows], steps, lane);
        if (works_last) multiply_last(last_chains, room.weights[buffer][TILES - 1], room.inputs[parity][warp], steps, lane);
        buffer = buffer + 1 == WEIGHT_STAGES ? 0 : buffer + 1;
        parity ^= 1;
    }
    float* own_sums = sums + static_cast<int64>(2 * shard) * rows * width;
    store_chains<WARP_TILES, GROUP_TILES>(chains, own_sums, (first_tile + own_tile) * SIDE, width,
                                          first_row + own_rows * ROW_TILE, rows, width, group, pair);
    store_chains<1, 1>(last_chains, own_sums, (first_tile + TILES - 1) * SIDE, width, first_row + warp * ROW_TILE, rows,
                       width, group, pair);
}
