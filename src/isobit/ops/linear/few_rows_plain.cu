// A plain layer for up to 64 rows: the chains of 16 outputs over one k-shard are carried by one warp for each of up to
// 16 columns of the operand, and fed by other warps, each with its own chunk of the inputs.
//
// Weights lie as the A operand's registers, uint4 [N / 16, K / 16, 32 lanes]; rows are the B operand, rounded to half
// on their way. With two parts every row is two columns of it: x rounded, and what that leaves rounded.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"
#include "ops/linear/cuda_turns.cuh"

#ifndef PARTS
#define PARTS 1
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef CHAIN_WARPS
#define CHAIN_WARPS 1
#endif
#ifndef CHUNK_TILES
#define CHUNK_TILES 16
#endif

constexpr int SIDE = 16;
constexpr int MOST_FEEDERS = 14;
constexpr int BLOCK_TILES = ROTATION / SIDE;
constexpr int GROUP_TILES = CHUNK_TILES >= 8 ? 4 : 2;  // whose operands are loaded ahead of their steps
constexpr int GROUPS = CHUNK_TILES / GROUP_TILES;
constexpr int CHUNK_QUADS = CHUNK_TILES * SIDE / 4;
constexpr int ROW_QUADS = CHUNK_QUADS > WARP ? CHUNK_QUADS / WARP : 1;  // of a row, that a lane has
constexpr int ROWS_AT_ONCE = CHUNK_QUADS < WARP ? WARP / CHUNK_QUADS : 1;  // that a warp reads side by side
constexpr int READ_AHEAD = 8 / ROW_QUADS;  // of these, on their way
constexpr int CHUNK_THREADS = (1 + CHAIN_WARPS) * WARP;  // that meet at a chunk's barrier

// What a chunk's steps take, in shared memory. operand: uint2 [CHUNK_TILES, places, 4], a place being a row's part.
struct Chunk {
    uint4* weights;
    uint2* operand;
    int places;

    __device__ __forceinline__ Chunk(uint4* shared, int index, int places) : places(places) {
        weights = shared + index * CHUNK_TILES * (WARP + 2 * places);
        operand = reinterpret_cast<uint2*>(weights + CHUNK_TILES * WARP);
    }
};

DEVICE float first_of(unsigned pair) { return float_of_half(static_cast<half_bits>(pair & 0xFFFFu)); }
DEVICE float second_of(unsigned pair) { return float_of_half(static_cast<half_bits>(pair >> 16)); }

// Put four neighbouring inputs of a row where the operand has them: two pairs of each part.
DEVICE void store_quad(const Chunk& chunk, int row, int quad, const float4& v) {
    const int tile = quad / 4, first_pair = quad % 2 * 2, upper = quad % 4 / 2;
    unsigned* at = reinterpret_cast<unsigned*>(chunk.operand + (tile * chunk.places + row * PARTS) * 4 + first_pair);
    const unsigned low = half_pair_of(v.x, v.y), high = half_pair_of(v.z, v.w);
    at[upper] = low;
    at[2 + upper] = high;
    if (PARTS == 1) return;
    at[8 + upper] = half_pair_of(v.x - first_of(low), v.y - second_of(low));
    at[10 + upper] = half_pair_of(v.z - first_of(high), v.w - second_of(high));
}

// Ask for `count` tiles' weights of a chunk, by one warp.
DEVICE void feed_weights(const Chunk& chunk, const uint4* weights, int count, int lane) {
    uint4* place = chunk.weights + lane;
    weights += lane;
    if (count == CHUNK_TILES) {
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++) copy_async_16(place + tile * WARP, weights + tile * WARP);
    } else {
#pragma unroll 1
        for (int tile = 0; tile < count; tile++) copy_async_16(place + tile * WARP, weights + tile * WARP);
    }
    copy_async_commit();
}

// Fill a chunk with the rows' inputs to `count` tiles, by one warp; then its weights are there too.
DEVICE void feed_inputs(const Chunk& chunk, const float* x, int count, int rows, int inputs, int lane) {
    const int own_row = lane / CHUNK_QUADS, own_quad = lane % CHUNK_QUADS;
#pragma unroll 1
    for (int first = 0; first < rows; first += READ_AHEAD * ROWS_AT_ONCE) {
        float4 quads[READ_AHEAD][ROW_QUADS];
#pragma unroll
        for (int i = 0; i < READ_AHEAD; i++) {
            const int row = first + i * ROWS_AT_ONCE + own_row;
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++) {
                const int quad = own_quad + j * WARP;
                quads[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (row < rows && quad < 4 * count)
                    quads[i][j] = *reinterpret_cast<const float4*>(x + static_cast<int64>(row) * inputs + 4 * quad);
            }
        }
#pragma unroll
        for (int i = 0; i < READ_AHEAD; i++) {
            const int row = first + i * ROWS_AT_ONCE + own_row;
            if (row >= rows) break;
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++) store_quad(chunk, row, own_quad + j * WARP, quads[i][j]);
        }
    }
    copy_async_wait<0>();
}

// The chains of 16 outputs with the operand's columns of one warp: registers c of the products.
struct Chains {
    float c[ROW_TILES][4];
    int places[ROW_TILES];  // this lane's, in a tile's operand

    __device__ __forceinline__ Chains(int warp, int lane, int all_places) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            const int place = 8 * (warp * ROW_TILES + tile) + lane / 4;
            places[tile] = smaller(place, all_places - 1) * 4 + lane % 4;
#pragma unroll
            for (int i = 0; i < 4; i++) c[tile][i] = 0.0f;
        }
    }
};

// The operands of one step.
struct Step {
    uint4 weights;
    uint2 inputs[ROW_TILES];

    __device__ __forceinline__ void load(const Chunk& chunk, const Chains& chains, int tile, int lane) {
        weights = chunk.weights[tile * WARP + lane];
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) inputs[i] = chunk.operand[tile * chunk.places * 4 + chains.places[i]];
    }

    __device__ __forceinline__ void carry(Chains& chains) const {
        const unsigned a[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const unsigned b[2] = {inputs[i].x, inputs[i].y};
            mma_16x8x16(chains.c[i], a, b);
        }
    }
};

DEVICE void load_group(Step steps[GROUP_TILES], const Chunk& chunk, const Chains& chains, int group, int lane) {
#pragma unroll
    for (int i = 0; i < GROUP_TILES; i++) steps[i].load(chunk, chains, group * GROUP_TILES + i, lane);
}

// Carry the chains over `count` whole chunks: a group's operands are loaded, and a chunk's awaited, while the group
// before is multiplied.
DEVICE void carry_chunks(Chains& chains, uint4* shared, int places, int count, int lap, int lane) {
    static_assert(GROUPS % 2 == 0, "every chunk begins with the same buffer");
    if (count <= 0) return;
    Step steps[2][GROUP_TILES];
    wait_for_turn(1, lap, CHUNK_THREADS);
    load_group(steps[0], Chunk(shared, 0, places), chains, 0, lane);
#pragma unroll 1
    for (int index = 0; index < count; index++) {
        const Chunk chunk(shared, index, places);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (group + 1 < GROUPS) {
                load_group(steps[(group + 1) % 2], chunk, chains, group + 1, lane);
            } else if (index + 1 < count) {
                wait_for_turn(2 + index, lap, CHUNK_THREADS);
                load_group(steps[0], Chunk(shared, index + 1, places), chains, 0, lane);
            }
#pragma unroll
            for (int i = 0; i < GROUP_TILES; i++) steps[group % 2][i].carry(chains);
        }
    }
}

DEVICE void carry_tiles(Chains& chains, const Chunk& chunk, int count, int lane) {
#pragma unroll 1
    for (int tile = 0; tile < count; tile++) {
        Step step;
        step.load(chunk, chains, tile, lane);
        step.carry(chains);
    }
}

// Write what a lane's chains end as: sums of a shard to values [shards * PARTS, rows, N], or, without these, outputs.
DEVICE void store_chains(const Chains& chains, int warp, int lane, float* values, int columns, int first_row,
                         int own_rows, int rows, const Finish& finish) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
        for (int register_index = 0; register_index < 4; register_index++) {
            const int place = 8 * (warp * ROW_TILES + tile) + 2 * (lane % 4) + register_index % 2;
            const int row = place / PARTS, part = place % PARTS;
            const int output = blockIdx.x * SIDE + lane / 4 + register_index / 2 * 8;
            if (row >= own_rows) continue;
            const float sum = chains.c[tile][register_index];
            if (values) {
                const int64 term = static_cast<int64>(blockIdx.y * PARTS + part) * rows + first_row + row;
                values[term * columns + output] = sum;
            } else if (part == 0 && output < finish.outputs) {
                float total = sum;
                if (PARTS == 2)
                    total = static_cast<float>(
                        static_cast<double>(sum) + static_cast<double>(chains.c[tile][register_index | 1]));
                if (finish.bias) total = total + finish.bias[output];
                finish.y[static_cast<int64>(first_row + row) * finish.outputs + output] = total;
            }
        }
    }
}

// The rows' outputs from their terms' sums, in the block that comes last.
DEVICE void finish_column(const Sums& sums, const Finish& finish, int column, int first_row, int rows) {
    for (int i = threadIdx.x; i < rows * SIDE; i += blockDim.x) {
        const int row = first_row + i / SIDE, output = column * SIDE + i % SIDE;
        if (output >= finish.outputs) continue;
        float total = total_of(sums, row, output);
        if (finish.bias) total = total + finish.bias[output];
        finish.y[static_cast<int64>(row) * finish.outputs + output] = total;
    }
}

// grid (N / 16, shards, ceil(rows / block_rows)), threads 32 * (CHAIN_WARPS + feeders). x: float [rows, 16 * tiles],
// rows at 16 bytes. values: float [shards * PARTS, rows, N], null where one shard's sums become y at once. counters:
// zeros, one for each (grid z, column); null where values are all that is wanted.
extern "C" __global__ void __launch_bounds__((MOST_FEEDERS + CHAIN_WARPS) * WARP, 1)
few_rows_plain(const uint4* __restrict__ weights, const float* x, float* values, int* counters, int tiles, int rows,
               int block_rows, const float* bias, float* y, int outputs) {
    DYNAMIC_SHARED(uint4, shared);
    begin_turns();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, feeders = blockDim.x / WARP - CHAIN_WARPS;
    const int shard = blockIdx.y, shards = gridDim.y, inputs = tiles * SIDE;
    const int first_row = blockIdx.z * block_rows, own_rows = smaller(block_rows, rows - first_row);
    const int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const int first_tile = shard * blocks / shards * BLOCK_TILES;
    const int last_tile = smaller((shard + 1) * blocks / shards * BLOCK_TILES, tiles);
    weights += static_cast<int64>(blockIdx.x) * tiles * WARP;
    x += static_cast<int64>(first_row) * inputs;

    const bool carries = warp < CHAIN_WARPS;
    const int places = own_rows * PARTS, feeder = warp - CHAIN_WARPS;
    int tile = first_tile + feeder * CHUNK_TILES;  // a feeder's
    if (!carries && tile < last_tile)
        feed_weights(Chunk(shared, feeder, places), weights + static_cast<int64>(tile) * WARP,
                     smaller(CHUNK_TILES, last_tile - tile), lane);
    await_inputs();
    Chains chains(warp, lane, places);
    int lap = 1;
    for (int first = first_tile; first < last_tile; first += feeders * CHUNK_TILES, lap++) {
        if (lap > 1) __syncthreads();
        if (carries) {
            const int tiles_left = last_tile - first, whole = smaller(feeders, tiles_left / CHUNK_TILES);
            carry_chunks(chains, shared, places, whole, lap, lane);
            if (whole == feeders || tiles_left == whole * CHUNK_TILES) continue;
            wait_for_turn(1 + whole, lap, CHUNK_THREADS);
            carry_tiles(chains, Chunk(shared, whole, places), tiles_left - whole * CHUNK_TILES, lane);
        } else if (tile < last_tile) {
            const Chunk chunk(shared, feeder, places);
            const int count = smaller(CHUNK_TILES, last_tile - tile);
            if (lap > 1) feed_weights(chunk, weights + static_cast<int64>(tile) * WARP, count, lane);
            feed_inputs(chunk, x + tile * SIDE, count, own_rows, inputs, lane);
            hand_over(1 + feeder, CHUNK_THREADS);
            tile += feeders * CHUNK_TILES;
        }
    }

    const Finish finish = {nullptr, bias, y, outputs};
    const int column = blockIdx.x, columns = gridDim.x;
    if (carries) store_chains(chains, warp, lane, values, columns * SIDE, first_row, own_rows, rows, finish);
    if (!values || !counters || !arrives_last(counters + blockIdx.z * columns + column, 1, shards)) return;
    finish_column({values, shards * PARTS, rows, columns * SIDE}, finish, column, first_row, own_rows);
}
