// The first half of a gated read of many rows: streams normed on their way into the layers `down` and `inject`.
//
// Their weights lie together as the A operand's registers, uint4 [columns / 16, inputs / 16, 32]. The normed streams
// are the B operand, as a half and the half of what that leaves: two chains an output and k-shard.
// Macros: WARPGROUPS, 1 for the products of wgmma.cuh; the others give the same bytes. BLOCK_ROWS, 32 or 64;
// WARP_TILES, tiles of 16 outputs of a warp.
#include "device.cuh"
#include "ops/gated_residual/read.cuh"
#if WARPGROUPS
#include "ops/experts/wgmma.cuh"
#endif

constexpr int WIDE = STREAMS * HIDDEN;
constexpr int ALL_STEPS = WIDE / SIDE;
constexpr int BLOCK_STEPS = 128 / SIDE;
constexpr int BLOCKS = (ALL_STEPS + BLOCK_STEPS - 1) / BLOCK_STEPS;

constexpr int ROWS = BLOCK_ROWS;
constexpr int STAGE = 4, STAGE_INPUTS = STAGE * SIDE;      // steps that are staged at a time
constexpr int WEIGHT_STAGES = 3, INPUT_STAGES = 3;         // a product may still read the last stage of inputs but one
constexpr int DOWN_WARPS = 12, TILES = DOWN_WARPS * WARP_TILES;
constexpr int DOWN_THREADS = DOWN_WARPS * WARP;
constexpr int GROUPS = 2 * ROWS / ROW_TILE;                // of rows of the halves, then of what they leave
constexpr int CHAINS = 4 * GROUPS;                         // of a lane in a tile

constexpr int QUADS = STAGE_INPUTS / 4;                    // of a row's inputs; a thread norms one in OWN_ROWS rows
constexpr int ROWS_APART = DOWN_THREADS / QUADS, OWN_ROWS = (ROWS + ROWS_APART - 1) / ROWS_APART;
constexpr int ROW_PIECES = STAGE_INPUTS / 8;               // of 16 bytes; piece p of row r lies at p ^ r % 8

struct DownRoom {
    uint4 inputs[INPUT_STAGES][2 * ROWS * ROW_PIECES];
    uint4 weights[WEIGHT_STAGES][TILES][STAGE][WARP];
    float4 norm_weights[WEIGHT_STAGES][QUADS];             // of the inputs one stage later
    float inverse[ROWS * STREAMS];
};

// The weights from `own_weights` on, this thread's piece of the stage at `step`.
DEVICE void stage_weights(DownRoom& room, const uint4* own_weights, const float* norm_weight, int buffer, int step,
                          int last, int tiles) {
    constexpr int TILES_APART = DOWN_WARPS / STAGE;
    const int first_tile = threadIdx.x / (STAGE * WARP), at = threadIdx.x / WARP % STAGE;
    if (step < last) {
        const uint4* from = own_weights + static_cast<int64>(step) * WARP;
        uint4* to = &room.weights[buffer][0][0][0] + threadIdx.x;
        const int own_tiles = ALL_STEPS % STAGE == 0 || step + at < last ? tiles - first_tile : 0;
#pragma unroll
        for (int i = 0; i < TILES / TILES_APART; i++)
            if (i * TILES_APART < own_tiles)
                copy_async_16(to + i * DOWN_THREADS, from + static_cast<int64>(i) * TILES_APART * ALL_STEPS * WARP);
        const int quad = threadIdx.x, column = (step + STAGE) * SIDE + 4 * quad;
        if (quad < QUADS && column < last * SIDE) copy_async_16(&room.norm_weights[buffer][quad], norm_weight + column);
    }
    copy_async_commit();
}

// A thread's inputs of a stage: quad threadIdx.x % QUADS of rows threadIdx.x / QUADS and every ROWS_APART on.
struct Inputs { float4 rows[OWN_ROWS]; };

DEVICE void load_inputs(Inputs& ahead, const float* own_row, int own_rows, int step, int last) {
    const int quad = threadIdx.x % QUADS;
    if (step + quad / (SIDE / 4) >= last) return;
    const float* at = own_row + step * SIDE;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++)
        if (i * ROWS_APART < own_rows)
            ahead.rows[i] = *reinterpret_cast<const float4*>(at + static_cast<int64>(i) * ROWS_APART * WIDE);
}

DEVICE float normed(float x, float inverse, float factor) { return (x * inverse) * factor; }

// The halves of two values, and of what they leave.
DEVICE uint2 split(float first, float second) {
    const half_bits a = half_of(first), b = half_of(second);
    const half_bits a_left = half_of(first - float_of_half(a)), b_left = half_of(second - float_of_half(b));
    return make_uint2(pack_half2(a, b), pack_half2(a_left, b_left));
}

// A thread's inputs of a stage to shared memory, normed.
DEVICE void stage_inputs(DownRoom& room, const Inputs& ahead, float4 norm_weights, int buffer, int step, int last) {
    const int quad = threadIdx.x % QUADS, first = threadIdx.x / QUADS;
    if (step + quad / (SIDE / 4) >= last) return;
    const float x = 1.0f + norm_weights.x, y = 1.0f + norm_weights.y, z = 1.0f + norm_weights.z;
    const float w = 1.0f + norm_weights.w;
    const float* inverse = room.inverse + first * STREAMS + (step * SIDE + 4 * quad) / HIDDEN;
    const int own_rows = ROWS - first;
    uint4* piece = room.inputs[buffer] + first * ROW_PIECES + (quad / 2 ^ first % 8);
    uint2* place = reinterpret_cast<uint2*>(piece) + quad % 2;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
        if (i * ROWS_APART >= own_rows) continue;
        const float4 values = ahead.rows[i];
        const float scale = inverse[i * ROWS_APART * STREAMS];
        const uint2 low = split(normed(values.x, scale, x), normed(values.y, scale, y));
        const uint2 high = split(normed(values.z, scale, z), normed(values.w, scale, w));
        place[2 * i * ROWS_APART * ROW_PIECES] = make_uint2(low.x, high.x);
        place[2 * (i * ROWS_APART + ROWS) * ROW_PIECES] = make_uint2(low.y, high.y);
    }
}

// Tile i of a warp: those of a warpgroup lie side by side.
DEVICE int tile_of(int warp, int i) { return i * DOWN_WARPS + warp; }

// A warp's weights of one step; `own` must not be read by a product on its way.
DEVICE void load_weights(unsigned (*own)[4], const uint4 (*weights)[STAGE][WARP], int step, int warp, int lane,
                         int tiles) {
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) {
        const int tile = tile_of(warp, i);
        const uint4 a = tile < tiles ? weights[tile][step][lane] : make_uint4(0u, 0u, 0u, 0u);
        own[i][0] = a.x, own[i][1] = a.y, own[i][2] = a.z, own[i][3] = a.w;
    }
}

#if WARPGROUPS
// One step; ends asynchronously, the one before has ended.
DEVICE void multiply_step(float (*chains)[CHAINS], const unsigned (*own)[4], const uint4* inputs, int step, int warp,
                          int lane, int tiles) {
    const uint64 operand = wgmma_descriptor(inputs) + step * (2 * SIDE >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) wgmma<2 * ROWS>(chains[i], own[i], operand);
    wgmma_commit();
}
DEVICE void end_products() { wgmma_wait<0>(); }
DEVICE void publish_inputs() { wgmma_publish(); }
#else
DEVICE void multiply_step(float (*chains)[CHAINS], const unsigned (*own)[4], const uint4* inputs, int step, int warp,
                          int lane, int tiles) {
    const uint4* row = inputs + (lane / 16 * ROW_TILE + lane % 8) * ROW_PIECES + ((2 * step + lane / 8 % 2) ^ lane % 8);
#pragma unroll
    for (int g = 0; g < GROUPS; g += 2) {
        unsigned b[4];
        load_matrix_x4(b, row + g * ROW_TILE * ROW_PIECES);
#pragma unroll
        for (int i = 0; i < WARP_TILES; i++) {
            if (tile_of(warp, i) >= tiles) continue;
            mma_16x8x16(chains[i] + 4 * g, own[i], b);
            mma_16x8x16(chains[i] + 4 * g + 4, own[i], b + 2);
        }
    }
}
DEVICE void end_products() {}
DEVICE void publish_inputs() {}
#endif

// A warp's chains of its tile whose first column is given -> sums.
DEVICE void store_chains(const float* chains, float* sums, int first_column, int first_row, int rows, int width,
                         int group, int pair) {
    const int64 part = static_cast<int64>(rows) * width;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = first_row + g * ROW_TILE % ROWS + 2 * pair + i % 2;
            if (row < rows)
                sums[g / (GROUPS / 2) * part + static_cast<int64>(row) * width + first_column + group + i / 2 * 8] =
                    chains[4 * g + i];
        }
}

// Dynamic shared memory, where warpgroups need it from a multiple of 1024 bytes on.
#if WARPGROUPS
extern __shared__ __align__(1024) uint4 down_room[];
#define DOWN_ROOM(name) DownRoom* name = reinterpret_cast<DownRoom*>(down_room)
#else
#define DOWN_ROOM(name) DYNAMIC_SHARED(DownRoom, name)
#endif

// sums: float [2 * shards, rows, width], of every shard the chain of halves, then of what they leave. grid (row blocks,
// shards, groups of TILES tiles).
extern "C" __global__ void __launch_bounds__(DOWN_THREADS, 1)
down_many(const uint4* __restrict__ weights, const float* __restrict__ streams, const float* __restrict__ inverse,
          const float* __restrict__ norm_weight, float* __restrict__ sums, int rows, int width) {
    DOWN_ROOM(shared);
    DownRoom& room = *shared;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, pair = lane % 4;
    const int shard = blockIdx.y, shards = gridDim.y, first_tile = blockIdx.z * TILES;
    const int tiles = smaller(TILES, width / SIDE - first_tile);
    const int first = shard * BLOCKS / shards * BLOCK_STEPS;
    const int last = smaller((shard + 1) * BLOCKS / shards * BLOCK_STEPS, ALL_STEPS);
    const int first_row = blockIdx.x * ROWS, quad = threadIdx.x % QUADS;
    const int own_tile = first_tile + static_cast<int>(threadIdx.x / (STAGE * WARP));
    weights += (static_cast<int64>(own_tile) * ALL_STEPS + threadIdx.x / WARP % STAGE) * WARP + lane;
    const float* own_row = streams + static_cast<int64>(first_row + threadIdx.x / QUADS) * WIDE + 4 * quad;
    const int own_rows = smaller(ROWS, rows - first_row) - static_cast<int>(threadIdx.x / QUADS);

    float chains[WARP_TILES][CHAINS] = {};
    unsigned own[WARP_TILES][4];
    Inputs ahead = {};
    stage_weights(room, weights, norm_weight, 0, first, last, tiles);
    stage_weights(room, weights, norm_weight, 1, first + STAGE, last, tiles);
    load_inputs(ahead, own_row, own_rows, first, last);
    for (int i = threadIdx.x; i < ROWS * STREAMS; i += DOWN_THREADS)
        room.inverse[i] = first_row + i / STREAMS < rows ? inverse[static_cast<int64>(first_row) * STREAMS + i] : 0.0f;
    __syncthreads();
    float4 norm_weights = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first + quad / (SIDE / 4) < last)
        norm_weights = *reinterpret_cast<const float4*>(norm_weight + first * SIDE + 4 * quad);
    stage_inputs(room, ahead, norm_weights, 0, first, last);
    load_inputs(ahead, own_row, own_rows, first + STAGE, last);
    int buffer = 0;
#pragma unroll 1
    for (int step = first; step < last; step += STAGE) {
        const int next = buffer + 1 == WEIGHT_STAGES ? 0 : buffer + 1;
        copy_async_wait<1>();
        publish_inputs();
        __syncthreads();
        const int after_next = next + 1 == WEIGHT_STAGES ? 0 : next + 1;
        stage_weights(room, weights, norm_weight, after_next, step + 2 * STAGE, last, tiles);
#pragma unroll
        for (int i = 0; i < STAGE; i++) {
            if (ALL_STEPS % STAGE == 0 || step + i < last) {
                if (i) end_products();
                load_weights(own, room.weights[buffer], i, warp, lane, tiles);
                multiply_step(chains, own, room.inputs[buffer], i, warp, lane, tiles);
            }
            if (i == STAGE / 2 - 1) {
                stage_inputs(room, ahead, room.norm_weights[buffer][quad], next, step + STAGE, last);
                load_inputs(ahead, own_row, own_rows, step + 2 * STAGE, last);
            }
        }
        end_products();
        buffer = next;
    }
    float* own_sums = sums + static_cast<int64>(2 * shard) * rows * width;
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) {
        const int tile = tile_of(warp, i);
        if (tile < tiles)
            store_chains(chains[i], own_sums, (first_tile + tile) * SIDE, first_row, rows, width, group, pair);
    }
}
