// A trellis layer for up to 64 rows: tiles decoded in registers, one chain an output and k-shard.
//
// Weights are the A operand (16 outputs), rows the B operand (8 at a time). The warps of a column of tiles decode 128
// inputs each, all at once, and take turns in carrying the chain over them, so that k ascends.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"
#include "ops/linear/cuda_turns.cuh"
#include "ops/linear/rotate_octet.cuh"
#include "ops/linear/trellis.cuh"

#ifndef CODEBOOK
#define CODEBOOK 2
#define TWICE_BITS 6
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef FUSED
#define FUSED 1
#endif
#ifndef SHARED_OPERAND
#define SHARED_OPERAND 1
#endif

constexpr int MOST_WARPS = ROW_TILES <= 2 ? 12 : 8;
constexpr int CHUNK_TILES = 8;  // a turn: 128 inputs
constexpr int EARLY = ROW_TILES == 1 ? 4 : 1;  // quarters of inputs loaded before a turn
constexpr bool FROM_SHARED = FUSED || SHARED_OPERAND;
constexpr int WORDS = tile_words(TWICE_BITS);
constexpr int STAGES = TWICE_BITS <= 8 ? 3 : 2;
constexpr int CHUNK_WORDS = CHUNK_TILES * WORDS;
constexpr int PIECES = CHUNK_WORDS / 4;  // of 16 bytes
constexpr int LANE_PIECES = (PIECES + WARP - 1) / WARP;

// The chunks of one warp, staged ahead in a ring. Positions in the trellis are in pieces of 16 bytes.
struct ChunkRing {
    unsigned* stages;
    unsigned position, step;
    int stage;
    unsigned offsets[LANE_PIECES];

    __device__ __forceinline__ ChunkRing(unsigned* stages, int tile_columns, int column, int first, int turns, int lane)
        : stages(stages), step(CHUNK_TILES * TWICE_BITS * tile_columns * turns), stage(0) {
        const unsigned row_pieces = tile_columns * TWICE_BITS;
        position = first * CHUNK_TILES * row_pieces + column * TWICE_BITS;
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            const int piece = i * WARP + lane;
            offsets[i] = piece / TWICE_BITS * row_pieces + piece % TWICE_BITS;
        }
    }

    __device__ __forceinline__ unsigned* words() const { return stages + stage * CHUNK_WORDS; }

    // Stage one chunk more, if there is one, where the current one lies, and go on to the next.
    __device__ __forceinline__ void advance(const uint4* trellis, bool more, int lane) {
        if (more) {
            unsigned* target = words() + 4 * lane;
#pragma unroll
            for (int i = 0; i < LANE_PIECES; i++)
                if (PIECES % WARP == 0 || i * WARP + lane < PIECES)
                    copy_async_16(target + 4 * WARP * i, trellis + (position + offsets[i]));
        }
        copy_async_commit();
        position += step;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// The chains of 16 outputs and 8 rows each: registers c of the products.
struct Chains {
    float c[ROW_TILES][4];
};

// A chunk's inputs of the rows: what the B operand of two tiles takes, `stride` uint4 from one 32 inputs to the next.
struct Operand {
    const uint4* inputs;
    int stride;

    __device__ __forceinline__ uint4 at(int quarter, int place) const { return inputs[quarter * stride + place]; }
};

DEVICE void load_early(uint4 early[EARLY][ROW_TILES], const Operand& operand, const int places[ROW_TILES]) {
#pragma unroll
    for (int quarter = 0; quarter < EARLY; quarter++)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) early[quarter][tile] = operand.at(quarter, places[tile]);
}

// Carry the chains over one chunk; early: the operand's first quarters, already here.
DEVICE void carry(Chains& chains, const unsigned fragments[CHUNK_TILES][4], const uint4 early[EARLY][ROW_TILES],
                  const Operand& operand, const int places[ROW_TILES]) {
#pragma unroll
    for (int quarter = 0; quarter < CHUNK_TILES / 2; quarter++) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            const uint4 pairs = quarter < EARLY ? early[quarter][tile] : operand.at(quarter, places[tile]);
            const unsigned even[2] = {pairs.x, pairs.y}, odd[2] = {pairs.z, pairs.w};
            mma_16x8x16(chains.c[tile], fragments[2 * quarter], even);
            mma_16x8x16(chains.c[tile], fragments[2 * quarter + 1], odd);
        }
    }
}

// Decode the chunk that the ring has next, and stage one chunk more.
DEVICE void decode_chunk(unsigned fragments[CHUNK_TILES][4], ChunkRing& ring, const LanePlace<TWICE_BITS>& place,
                         const uint4* trellis, bool more, int lane) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < CHUNK_TILES; tile++)
        decode_fragment<CODEBOOK, TWICE_BITS>(ring.words() + tile * WORDS, place, fragments[tile]);
    __syncwarp();
    ring.advance(trellis, more, lane);
}

// Ask early for the scales of this block's inputs and outputs.
DEVICE void fetch_scales(const half_bits* input_scales, int first_input, int inputs, const half_bits* output_scales,
                         int first_output, int outputs) {
    constexpr int LINE = 64;  // halves
    const int at = threadIdx.x * LINE;
    if (FUSED && at < inputs) fetch_line(input_scales + first_input + at);
    if (at < outputs) fetch_line(output_scales + first_output + at);
}

// Rotate out the blocks of 128 outputs that this thread block is the last to add to.
DEVICE void finish_blocks(const Sums& sums, const Finish& finish, int* counters, int first, int count, int shards) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    constexpr int block_columns = ROTATION / TILE;
    for (int block = first / block_columns; block * block_columns < first + count; block++) {
        const int begin = larger(first, block * block_columns);
        const int end = smaller(first + count, (block + 1) * block_columns);
        if (!arrives_last(counters + block, end - begin, block_columns * shards)) continue;
        for (int row = warp; row < sums.rows; row += warps) {
            float v[4];
            totals_of(sums, row, block * ROTATION + 4 * lane, v);
            finish_block(finish, row, block, v, lane);
        }
    }
}

// grid (ceil(tile_columns / columns), shards), threads 32 * columns * turns. x: float [rows, inputs], or, where not
// FUSED, what rotate_few made of it, which a block copies first where SHARED_OPERAND. values: float [shards, rows,
// 16 * tile_columns], written and read here. counters: zeros, one a block of 128 outputs.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP, ROW_TILES <= 2 ? 2 : 1)
few_rows(const uint4* __restrict__ trellis, const void* x, const half_bits* input_scales, float* values, int* counters,
         int tile_columns, int input_blocks, int rows, int inputs, int whole, int columns, int turns,
         const half_bits* output_scales, const float* bias, float* y, int outputs) {
    DYNAMIC_SHARED(unsigned, shared);
    begin_turns();
    const int lane = remembered(threadIdx.x % WARP), warp = remembered(threadIdx.x / WARP);
    const int turn = warp % turns, own_column = warp / turns;
    const int first_column = blockIdx.x * columns, column = first_column + own_column;
    const int shard = blockIdx.y, shards = gridDim.y;
    const int first_chunk = shard * input_blocks / shards, last_chunk = (shard + 1) * input_blocks / shards;

    fetch_scales(input_scales, first_chunk * ROTATION, (last_chunk - first_chunk) * ROTATION, output_scales,
                 first_column * TILE, smaller(columns, tile_columns - first_column) * TILE);
    unsigned* stages = shared + warp * STAGES * CHUNK_WORDS;
    ChunkRing ring(stages, tile_columns, column, first_chunk + turn, turns, lane);
    const bool real = column < tile_columns;
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++)
        ring.advance(trellis, real && first_chunk + turn + stage * turns < last_chunk, lane);

    const LanePlace<TWICE_BITS> place(lane);
    unsigned fragments[CHUNK_TILES][4];
    if (real) decode_chunk(fragments, ring, place, trellis, first_chunk + turn + STAGES * turns < last_chunk, lane);

    await_inputs();
    uint4* after_stages = reinterpret_cast<uint4*>(shared + columns * turns * STAGES * CHUNK_WORDS);
    float4* handed = reinterpret_cast<float4*>(after_stages) + own_column * ROW_TILES * WARP + lane;
    uint4* own_inputs = after_stages + columns * ROW_TILES * WARP;
    const uint4* rotated = static_cast<const uint4*>(x);
#if FUSED
    rotate_units(reinterpret_cast<unsigned*>(own_inputs), static_cast<const float*>(x), input_scales, first_chunk, 0,
                 rows * (last_chunk - first_chunk), rows, inputs, whole);
#elif SHARED_OPERAND
#pragma unroll 4
    for (int i = threadIdx.x; i < (last_chunk - first_chunk) * 16 * rows; i += blockDim.x)
        own_inputs[i] = rotated[first_chunk * 16 * rows + i];
#endif
    if (FROM_SHARED) {
        rotated = own_inputs - first_chunk * 16 * rows;
        __syncthreads();
    }
    if (real) {
        int places[ROW_TILES];
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++)
            places[tile] = smaller(8 * tile + lane / 4, rows - 1) * 4 + lane % 4;
        const int barriers = kept((warp + 1) << 8 | (turn == 0 ? warp + turns : warp));
        Operand operand = {rotated + (first_chunk + turn) * 16 * rows, 4 * rows};
        if (turn == turns - 1) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) handed[tile * WARP] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            hand_over(barriers >> 8);
        }
        int round = 1;
        uint4 early[EARLY][ROW_TILES];
        if (!FROM_SHARED) load_early(early, operand, places);
#pragma unroll 1
        for (int chunk = first_chunk + turn; chunk < last_chunk; chunk += turns, round++) {
            // From shared memory they come in time, and decoding has more registers.
            if (FROM_SHARED) load_early(early, operand, places);
            Chains chains;
            wait_for_turn(barriers & 0xFF, round);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                const float4 c = handed[tile * WARP];
                chains.c[tile][0] = c.x, chains.c[tile][1] = c.y, chains.c[tile][2] = c.z, chains.c[tile][3] = c.w;
            }
            carry(chains, fragments, early, operand, places);
            operand.inputs += turns * 16 * rows;
            if (chunk + 1 < last_chunk) {
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; tile++) {
                    const float* c = chains.c[tile];
                    handed[tile * WARP] = make_float4(c[0], c[1], c[2], c[3]);
                }
                hand_over(barriers >> 8);
            } else {
                const int64 shard_values = static_cast<int64>(rows) * tile_columns * TILE;
                store_column(chains.c, values + shard * shard_values, rows, tile_columns * TILE, column * TILE, lane);
            }
            if (chunk + turns >= last_chunk) break;
            if (!FROM_SHARED) load_early(early, operand, places);
            decode_chunk(fragments, ring, place, trellis, chunk + (STAGES + 1) * turns < last_chunk, lane);
        }
    }
    const Sums sums = {values, shards, rows, tile_columns * TILE};
    const Finish finish = {output_scales, bias, y, outputs};
    const int count = smaller(columns, tile_columns - first_column);
    finish_blocks(sums, finish, counters, first_column, count, shards);
}
