// The chains of 16 outputs of a plain layer over one k-shard: warps that carry them, and warps that feed these, each
// with its own chunk of the inputs.
//
// Macros: PARTS, columns of the operand that a row is; ROW_TILES, tiles of 8 columns of a chain warp; CHAIN_WARPS;
// CHUNK_TILES, steps of a chunk.
#pragma once
#include "device.cuh"
#include "ops/linear/cuda_turns.cuh"
#include "ops/linear/rotate.cuh"

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
constexpr int BLOCK_TILES = ROTATION / SIDE;  // of a block of inputs, which no shard divides
constexpr int GROUP_TILES = CHUNK_TILES >= 8 ? 4 : 2;  // whose operands are loaded ahead of their steps
constexpr int GROUPS = CHUNK_TILES / GROUP_TILES;
constexpr int CHUNK_QUADS = CHUNK_TILES * SIDE / 4;
constexpr int ROW_QUADS = CHUNK_QUADS > WARP ? CHUNK_QUADS / WARP : 1;  // of a row, that a lane has
constexpr int CHUNK_THREADS = (1 + CHAIN_WARPS) * WARP;  // that meet at a chunk's barrier

// What a chunk's steps take, in shared memory. operand: uint2 [CHUNK_TILES, places, 4], a place being a row's part.
struct Chunk {
    uint4* weights;
    uint2* operand;
    int places;
};

// A block's chunks in shared memory: the weights of all, then the operands of all.
struct Chunks {
    uint4* shared;
    int count, places;

    __device__ __forceinline__ uint4* operands() const { return shared + count * CHUNK_TILES * WARP; }
    __device__ __forceinline__ Chunk at(int index) const {
        uint2* operand = reinterpret_cast<uint2*>(operands()) + index * CHUNK_TILES * places * 4;
        return {shared + index * CHUNK_TILES * WARP, operand, places};
    }
};

// The first tile of a k-shard of a layer of so many.
DEVICE int shard_tile(int shard, int shards, int tiles) {
    const int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    return smaller(shard * blocks / shards * BLOCK_TILES, tiles);
}

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
DEVICE void carry_chunks(Chains& chains, const Chunks& chunks, int count, int lap, int lane) {
    static_assert(GROUPS % 2 == 0, "every chunk begins with the same buffer");
    if (count <= 0) return;
    Step steps[2][GROUP_TILES];
    wait_for_turn(1, lap, CHUNK_THREADS);
    load_group(steps[0], chunks.at(0), chains, 0, lane);
#pragma unroll 1
    for (int index = 0; index < count; index++) {
        const Chunk chunk = chunks.at(index);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (group + 1 < GROUPS) {
                load_group(steps[(group + 1) % 2], chunk, chains, group + 1, lane);
            } else if (index + 1 < count) {
                wait_for_turn(2 + index, lap, CHUNK_THREADS);
                load_group(steps[0], chunks.at(index + 1), chains, 0, lane);
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

// Carry the chains over the `tiles` tiles that are left, as far as the chunks go.
DEVICE void carry_left(Chains& chains, const Chunks& chunks, int tiles, int lap, int lane) {
    const int whole = smaller(chunks.count, tiles / CHUNK_TILES), rest = tiles - whole * CHUNK_TILES;
    carry_chunks(chains, chunks, whole, lap, lane);
    if (whole == chunks.count || !rest) return;
    wait_for_turn(1 + whole, lap, CHUNK_THREADS);
    carry_tiles(chains, chunks.at(whole), rest, lane);
}

// Call use(row, part, output of 16, tile, register) for each of a lane's chains of the first `rows` rows.
template <typename Use>
DEVICE void for_each_chain(int warp, int lane, int rows, Use use) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
        for (int index = 0; index < 4; index++) {
            const int place = 8 * (warp * ROW_TILES + tile) + 2 * (lane % 4) + index % 2;
            if (place / PARTS < rows) use(place / PARTS, place % PARTS, lane / 4 + index / 2 * 8, tile, index);
        }
    }
}

// Write what a lane's chains end as to values [shards * PARTS, rows, N]: those of a block's rows from first_row on.
DEVICE void store_sums(const Chains& chains, int warp, int lane, float* values, int shard, int first_row, int own_rows,
                       int rows) {
    const int64 columns = gridDim.x * SIDE;
    for_each_chain(warp, lane, own_rows, [&](int row, int part, int output, int tile, int index) {
        const int64 term = static_cast<int64>(shard * PARTS + part) * rows + first_row + row;
        values[term * columns + blockIdx.x * SIDE + output] = chains.c[tile][index];
    });
}
