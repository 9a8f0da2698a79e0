// Trellis layers of one input for up to 64 rows: tiles decoded in registers, one chain an output and k-shard.
//
// Weights are the A operand (16 outputs), rows the B operand (8 at a time). The warps of a column of tiles decode 128
// inputs each, or 256, all at once, and take turns in carrying the chain over them, so that k ascends.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"
#include "ops/linear/cuda_passed.cuh"
#include "ops/linear/cuda_turns.cuh"
#include "ops/linear/rotate_half_warp.cuh"
#include "ops/linear/rotate_octet.cuh"
#include "ops/linear/staged.cuh"
#include "ops/linear/trellis.cuh"

#ifndef CODEBOOK
#define CODEBOOK 2
#define TWICE_BITS 6
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef ONE_ROW
#define ONE_ROW 0
#endif
#ifndef FUSED
#define FUSED 1
#endif
#ifndef SHARED_OPERAND
#define SHARED_OPERAND 1
#endif
#ifndef TURN_BLOCKS
#define TURN_BLOCKS 1
#endif

constexpr int MOST_WARPS = TURN_BLOCKS > 1 || ROW_TILES > 2 ? 12 : 24;
constexpr int MOST_LAYERS = 4;
constexpr int LONG_SHARDS = 4;
constexpr int BLOCK_COLUMNS = ROTATION / TILE;
constexpr int MOST_MET = (MOST_WARPS + BLOCK_COLUMNS - 2) / BLOCK_COLUMNS + 1;  // blocks of outputs that columns meet
constexpr int CHUNK_TILES = TURN_BLOCKS * ROTATION / TILE;  // a turn's
constexpr int STEPS = CHUNK_TILES / 2;  // of 32 inputs
constexpr int EARLY = ROW_TILES == 2 ? 1 : ROW_TILES == 8 ? 2 : STEPS;  // steps whose inputs are loaded before a turn
constexpr bool STAGED_LATE = ROW_TILES <= 2;  // once the chains are handed over: few rows' are what others wait for
constexpr bool AWAITED_EARLY = TURN_BLOCKS > 1;  // the inputs, halfway through the first chunk's decoding
constexpr int SIDE_BY_SIDE = ROW_TILES <= 2 ? 1 : ROW_TILES;  // tiles of rows whose products do not wait for each other
constexpr int FINISHED_ROWS = ROW_TILES <= 2 ? 1 : 4;  // that a warp rotates out together
constexpr bool FROM_SHARED = FUSED || SHARED_OPERAND;
constexpr bool PAST_THE_LAST = !FROM_SHARED && ROW_TILES > 2;  // whole tiles of rows are read, whatever lies there
constexpr int STAGES = TWICE_BITS <= 8 && ROW_TILES != 2 ? 3 : 2;
constexpr int CHUNK_WORDS = CHUNK_TILES * tile_words(TWICE_BITS), CHUNK_BYTES = 4 * CHUNK_WORDS;
constexpr int PIECES = CHUNK_WORDS / 4;  // of 16 bytes
constexpr int LANE_PIECES = (PIECES + WARP - 1) / WARP;
constexpr int FIRST_PIECES = (LANE_PIECES + 1) / 2;  // of a lane: half of a chunk or more

// The chunks of one warp, staged ahead in a ring, and how a lane finds its words there. Positions in the trellis are in
// pieces of 16 bytes.
struct ChunkRing {
    LanePlace<TWICE_BITS> place;
    LaneWords<TWICE_BITS> words;
    unsigned target, position, step, stage;
    unsigned offsets[LANE_PIECES];

    // `first`: the chunk that is staged next; so many of the warp's are before it.
    __device__ __forceinline__ ChunkRing(const unsigned* stages, int tile_columns, int column, int first, int before,
                                         int turns, int lane)
        : place(lane), words(stages, place), target(offset_of(stages + 4 * lane)),
          step(CHUNK_TILES * TWICE_BITS * tile_columns * turns), stage(before % STAGES * CHUNK_BYTES) {
        const unsigned row_pieces = tile_columns * TWICE_BITS;
        position = first * CHUNK_TILES * row_pieces + column * TWICE_BITS;
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            const int piece = i * WARP + lane;
            offsets[i] = piece / TWICE_BITS * row_pieces + piece % TWICE_BITS;
        }
    }

    // Before a long loop, by a whole warp: have in registers what would be computed again.
    __device__ __forceinline__ void remember() {
        place.remember();
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) offsets[i] = remembered(static_cast<int>(offsets[i]));
    }

    // Stage a lane's pieces FIRST to END - 1 of one chunk more, if there is one, where the current one lies.
    template <int FIRST, int END>
    __device__ __forceinline__ void stage_pieces(const uint4* trellis, bool more, int lane) const {
        if (STAGED_LATE || more) {
#pragma unroll
            for (int i = FIRST; i < END; i++)
                stage_piece_if(more && (PIECES % WARP == 0 || i * WARP + lane < PIECES), target + stage + 16 * WARP * i,
                               trellis + (position + offsets[i]));
        }
        copy_async_commit();
    }
    // Each piece of a lane by itself, so that it can be awaited alone.
    template <int FIRST = 0>
    __device__ __forceinline__ void stage_apart(const uint4* trellis, bool more, int lane) const {
        stage_pieces<FIRST, FIRST + 1>(trellis, more, lane);
        if constexpr (FIRST + 1 < LANE_PIECES) stage_apart<FIRST + 1>(trellis, more, lane);
    }
    __device__ __forceinline__ void go_on() {
        position += step;
        stage = stage == (STAGES - 1) * CHUNK_BYTES ? 0 : stage + CHUNK_BYTES;
    }
    // Stage one chunk more, and go on to the next.
    __device__ __forceinline__ void advance(const uint4* trellis, bool more, int lane) {
        stage_pieces<0, LANE_PIECES>(trellis, more, lane);
        go_on();
    }

    template <int NUMBER = 0, int END = CHUNK_TILES>
    __device__ __forceinline__ void decode_from(unsigned fragments[CHUNK_TILES][4], unsigned from) const {
        decode_window<CODEBOOK>(words.template window<NUMBER>(from, place.shift), fragments[NUMBER]);
        if constexpr (NUMBER + 1 < END) decode_from<NUMBER + 1, END>(fragments, from);
    }

    // Decode what each of the first chunk's pieces FIRST to END - 1 completes, as they come.
    template <int FIRST, int END>
    __device__ __forceinline__ void decode_apart(unsigned fragments[CHUNK_TILES][4], bool real) const {
        if constexpr (FIRST < END) {
            constexpr int number = FIRST * WARP / TWICE_BITS;
            constexpr int end = FIRST + 1 == LANE_PIECES ? CHUNK_TILES : (FIRST + 1) * WARP / TWICE_BITS;
            copy_async_wait<LANE_PIECES - 1 - FIRST>();
            __syncwarp();
            if constexpr (number < end)
                if (real) decode_from<number, end>(fragments, 0);
            decode_apart<FIRST + 1, END>(fragments, real);
        }
    }

    // Decode the current chunk; where not STAGED_LATE advance over it, too.
    __device__ __forceinline__ void decode(unsigned fragments[CHUNK_TILES][4], const uint4* trellis, bool more,
                                           int lane) {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
        decode_from(fragments, stage);
        if (!STAGED_LATE || EVERY_LANE_ARRIVES) __syncwarp();
        if (!STAGED_LATE) advance(trellis, more, lane);
    }
};

// A chunk's inputs of the rows: what the B operand of two tiles takes, `stride` bytes from one 32 inputs to the next.
struct Operand {
    const unsigned char* inputs;  // where they are not in shared memory
    unsigned stride;
    unsigned places[ROW_TILES];

    __device__ __forceinline__ uint4 at(int step, int tile) const {
        const unsigned place = places[PAST_THE_LAST ? 0 : tile] + step * stride;
        if constexpr (FROM_SHARED) return four_at<0>(place);
        return reinterpret_cast<const uint4*>(inputs + place)[PAST_THE_LAST ? WARP * tile : 0];
    }
    __device__ __forceinline__ void skip(unsigned bytes) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) places[tile] += bytes;
    }
};

DEVICE void load_early(uint4 early[EARLY][ROW_TILES], const Operand& operand) {
#pragma unroll
    for (int step = 0; step < EARLY; step++)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) early[step][tile] = operand.at(step, tile);
}

// Carry the chains over one chunk; early: the operand's first steps, already here.
DEVICE void carry(float chains[ROW_TILES][4], const unsigned fragments[CHUNK_TILES][4],
                  const uint4 early[EARLY][ROW_TILES], const Operand& operand) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int first = 0; first < ROW_TILES; first += SIDE_BY_SIDE) {
            uint4 pairs[SIDE_BY_SIDE];
#pragma unroll
            for (int i = 0; i < SIDE_BY_SIDE; i++)
                pairs[i] = step < EARLY ? early[step][first + i] : operand.at(step, first + i);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < SIDE_BY_SIDE; i++) {
                    const unsigned inputs[2] = {half ? pairs[i].z : pairs[i].x, half ? pairs[i].w : pairs[i].y};
                    mma_16x8x16(chains[first + i], fragments[2 * step + half], inputs);
                }
        }
    }
}

// Ask early for the scales of this block's inputs and outputs.
DEVICE void fetch_scales(const half_bits* input_scales, int first_input, int inputs, const half_bits* output_scales,
                         int first_output, int outputs, int thread) {
    constexpr int LINE = 64;  // halves
    const int at = thread * LINE;
    if (FUSED && at < inputs) fetch_line(input_scales + first_input + at);
    if (at < outputs) fetch_line(output_scales + first_output + at);
}

// One layer of a launch. x: float [rows, inputs], or, where not FUSED, what rotate_few made of it, with room behind it
// for the rows that whole tiles have more. values: float [shards, rows, 16 * columns], written and read here, with
// counters: zeros, one a block of 128 outputs. No values: only of one shard; sums go from block to block by way of
// passed: zeros [rows or more, 16 * columns], of which blocks of whole 128 outputs use none. first_block: of the
// launch's, which are its layers' in turn.
struct Layer {
    const uint4* trellis;
    const half_bits* input_scales;
    const half_bits* output_scales;
    const float* bias;
    const void* x;
    float* values;
    int* counters;
    uint64* passed;
    float* y;
    int64 columns, outputs, first_block;
};

struct Layers {
    Layer at[MOST_LAYERS];
};

DEVICE int layer_of_block(const Layers& layers, int block) {
    int own = 0;
#pragma unroll
    for (int i = 1; i < MOST_LAYERS; i++)
        if (block >= static_cast<int>(layers.at[i].first_block)) own = i;
    return own;
}

DEVICE int first_chunk_of(int shard, int shards, int chunks) {
    return shards == 1 ? shard * chunks : shard * chunks / LONG_SHARDS;
}

// Rotate out the blocks of 128 outputs that this thread block is the last to add to.
DEVICE void finish_blocks(const Sums& sums, const Finish& finish, int* counters, int first, int count, int shards,
                          int warp, int warps, int lane) {
    __shared__ bool last[MOST_MET];
    const int first_block = first / BLOCK_COLUMNS, met = (first + count - 1) / BLOCK_COLUMNS - first_block + 1;
    __syncthreads();
    if (warp == 0 && lane < met) {
        const int block = first_block + lane;
        const int begin = larger(first, block * BLOCK_COLUMNS);
        const int end = smaller(first + count, (block + 1) * BLOCK_COLUMNS);
        last[lane] = completes(counters + block, end - begin, BLOCK_COLUMNS * shards);
    }
    __syncthreads();
    const int groups = (sums.rows + FINISHED_ROWS - 1) / FINISHED_ROWS;
    for (int unit = warp; unit < met * groups; unit += warps) {
        const int own = unit / groups, group = unit - own * groups;
        if (last[own]) finish_rows<FINISHED_ROWS>(sums, finish, FINISHED_ROWS * group, first_block + own, lane);
    }
}

// A row of a block of 128 outputs that a warp rotates out, from where its lanes find their sums on.
struct OwnRow {
    int block, row, column;  // of tiles, from the thread block's first; before it: of others
    float scale[4], v[4];

    // The scales, and the sums of columns before the thread block's own, from those who pass them: blocks that begin no
    // later.
    __device__ __forceinline__ OwnRow(const Finish& finish, uint64* passed, int unit, int first, int rows, int outputs,
                                      int lane) {
        const int own = rows == 1 ? unit : unit / rows;
        row = unit - own * rows, block = first / BLOCK_COLUMNS + own;
        const int output = block * ROTATION + 4 * lane;
        column = output / TILE - first;
        load_halves(finish.scales + output, scale);
        if (column < 0) take_sums(passed + static_cast<int64>(row) * outputs + output, v);
    }

    // The others as this block's warps hand them over.
    __device__ __forceinline__ void finish(const Finish& finish, const float* chains, int lane) {
        if (column >= 0) {
            // Outputs 4 * lane on, of a column the 16 / 4 of four lanes: the C operand's register 2 * (output / 8) +
            // row % 2 of lane 4 * (output % 8) + row % 8 / 2.
            const float* at = chains + ((column * ROW_TILES + row / 8) * WARP + lane % 2 * 16 + row % 8 / 2) * 4;
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = at[16 * i + lane % 4 / 2 * 2 + row % 2];
        }
        __syncwarp();
        finish_scaled(finish, row, block, v, scale, lane);
    }
};

// Rotate out the blocks of 128 outputs whose last column this thread block has. order: of this warp among those that
// are done, since the first ones need not wait for the block's own sums before they take others'.
DEVICE void finish_own_blocks(const float* chains, uint64* passed, const Finish& finish, int first, int count, int rows,
                              int outputs, int order, int warps, int lane) {
    const int units = ((first + count) / BLOCK_COLUMNS - first / BLOCK_COLUMNS) * rows;
    if (order >= units) {
        __syncthreads();
        return;
    }
    OwnRow own(finish, passed, order, first, rows, outputs, lane);
    __syncthreads();
    own.finish(finish, chains, lane);
#pragma unroll 1
    for (int unit = order + warps; unit < units; unit += warps)
        OwnRow(finish, passed, unit, first, rows, outputs, lane).finish(finish, chains, lane);
}

// A warp's turn with its column. A scheduler has every fourth warp: these are to have different turns, so that some of
// them decode while others carry.
DEVICE int turn_of(int number, int column, int turns) {
    const int mask = turns - 1;
    return turns & mask ? number : (number + (turns == 2 ? column / 2 : column)) & mask;
}

// grid (blocks of all layers, shards), threads (32, turns, columns). The layers have so many blocks of 128 inputs, of
// which every shard has a chunk for each turn. The rotated inputs of layers that are not FUSED are copied first where
// SHARED_OPERAND. ONE_ROW: there is only one. TURN_BLOCKS: 2 only of ONE_ROW that is FUSED, and of no more blocks than
// two for each warp; every shard then has an even number of them.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP)
few_rows(const __grid_constant__ Layers layers, int input_blocks, int all_rows, int inputs, int whole) {
    DYNAMIC_SHARED(unsigned, shared);
    __shared__ uint64 barriers[MOST_WARPS];
    const int rows = ONE_ROW ? 1 : all_rows;
    const int lane = remembered(threadIdx.x), own_column = threadIdx.z, turns = blockDim.y, columns = blockDim.z;
    const int turn = turn_of(threadIdx.y, own_column, turns);
    const int warp = own_column * turns + turn, warps = columns * turns;
    const int thread = warp * WARP + lane;
    const Layer& layer = layers.at[layer_of_block(layers, blockIdx.x)];
    const uint4* trellis = layer.trellis;
    const int tile_columns = layer.columns;
    const int first_column = (blockIdx.x - static_cast<int>(layer.first_block)) * columns;
    const int column = first_column + own_column, count = smaller(columns, tile_columns - first_column);
    const int shard = blockIdx.y, shards = gridDim.y;
    const int chunks = input_blocks / TURN_BLOCKS;
    const int first_chunk = first_chunk_of(shard, shards, chunks);
    const int last_chunk = first_chunk_of(shard + 1, shards, chunks);
    const int own_block = first_chunk * TURN_BLOCKS, own_blocks = (last_chunk - first_chunk) * TURN_BLOCKS;

    const unsigned* stages = shared + warp * STAGES * CHUNK_WORDS;
    float4* handed = reinterpret_cast<float4*>(shared + warps * STAGES * CHUNK_WORDS);
    uint4* own_inputs = reinterpret_cast<uint4*>(handed + columns * ROW_TILES * WARP);
    const int own_first = first_chunk + turn;
    const bool real = column < tile_columns;
    const uint4* rotated = static_cast<const uint4*>(layer.x) + own_block * 16 * rows;
#if FUSED
    const int units = rows * own_blocks;
    const float* x = static_cast<const float*>(layer.x);
    unsigned* pairs = reinterpret_cast<unsigned*>(own_inputs);
#endif
    unsigned fragments[CHUNK_TILES][4];
    {
        ChunkRing ring(stages, tile_columns, column, own_first, 0, turns, lane);
        if (AWAITED_EARLY) {
            ring.stage_apart(trellis, real, lane);
            ring.go_on();
        } else {
            ring.advance(trellis, real, lane);
        }
        begin_passing(barriers + warp, lane);
        fetch_scales(layer.input_scales, own_block * ROTATION, own_blocks * ROTATION, layer.output_scales,
                     first_column * TILE, count * TILE, thread);
#if FUSED
        const half_warp::Unit unit(pairs, x, layer.input_scales, own_block, units, rows, inputs, whole, warp, lane);
        const bool by_warp = AWAITED_EARLY || units <= half_warp::UNITS * warps;
        const bool has_unit = by_warp && half_warp::UNITS * warp < units;
        float v[2 * half_warp::PAIRS];
        if (AWAITED_EARLY) {
            ring.decode_apart<0, FIRST_PIECES>(fragments, real);
            await_inputs_alone();
            if (has_unit) unit.load(v);
            ring.decode_apart<FIRST_PIECES, LANE_PIECES>(fragments, real);
        }
#endif
        // All blocks begin at once: none's later chunks are to come before another's first.
        copy_async_wait<0>();
        __syncwarp();
#pragma unroll
        for (int stage = 1; stage < STAGES; stage++)
            ring.advance(trellis, real && own_first + stage * turns < last_chunk, lane);
        if (!AWAITED_EARLY && real) ring.decode_from(fragments, 0);
        if (!STAGED_LATE) {
            __syncwarp();
            ring.advance(trellis, real && own_first + STAGES * turns < last_chunk, lane);
        }
        if (!AWAITED_EARLY) await_inputs_alone();
#if FUSED
        if (has_unit) {
            if (!AWAITED_EARLY) unit.load(v);
            unit.rotate(v);
        } else if (!by_warp) {
            rotate_units(pairs, x, layer.input_scales, own_block, 0, units, rows, inputs, whole, thread, warps * WARP);
        }
#elif SHARED_OPERAND
#pragma unroll 8
        for (int i = thread; i < own_blocks * 16 * rows; i += warps * WARP) own_inputs[i] = rotated[i];
#endif
    }
    // The chains begin at zero.
    if (turn == 0) {
        const float zeros[4] = {};
        const unsigned own_handed = offset_of(handed + own_column * ROW_TILES * WARP + lane);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) store_four(own_handed + 16 * WARP * tile, zeros);
    }
    __syncthreads();
    let_next_begin();
    const bool passes = layer.values == nullptr;
    if (real) {
        // Made anew: the rotation has no registers for it.
        const int own_lane = remembered(threadIdx.x);
        constexpr int staged = STAGES + !STAGED_LATE;
        ChunkRing ring(stages, tile_columns, column, own_first + staged * turns, staged, turns, own_lane);
        ring.remember();
        Operand operand = {reinterpret_cast<const unsigned char*>(rotated), 64u * rows};
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            const int place = smaller(8 * tile + own_lane / 4, rows - 1) * 4 + own_lane % 4 + turn * STEPS * 4 * rows;
            operand.places[tile] = FROM_SHARED ? offset_of(own_inputs + place) : 16 * place;
        }
        const unsigned own_handed = offset_of(handed + own_column * ROW_TILES * WARP + own_lane);
        const PassedBarrier own_barrier = passed_barrier(barriers + warp);
        const PassedBarrier next_barrier = passed_barrier(barriers + (turn + 1 == turns ? warp - turn : warp + 1));
        uint4 early[EARLY][ROW_TILES];
        if (!FROM_SHARED) load_early(early, operand);
        float chains[ROW_TILES][4];
        int round = turn == 0 ? 0 : 1, chunk = own_first;
#pragma unroll 1
        for (;; chunk += turns, round++) {
            // From shared memory they come in time, and decoding has more registers.
            if (FROM_SHARED) load_early(early, operand);
            // No one is awaited before the column's first turn.
            wait_for_pass(own_barrier, round);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                const uint4 c = four_at<0>(own_handed + 16 * WARP * tile);
                chains[tile][0] = float_of(c.x), chains[tile][1] = float_of(c.y);
                chains[tile][2] = float_of(c.z), chains[tile][3] = float_of(c.w);
            }
            carry(chains, fragments, early, operand);
            operand.skip(turns * STEPS * operand.stride);
            if (chunk + 1 == last_chunk) break;
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) store_four(own_handed + 16 * WARP * tile, chains[tile]);
            pass(next_barrier, own_lane);
            if (chunk + turns >= last_chunk) break;
            if (!FROM_SHARED) load_early(early, operand);
            if (STAGED_LATE) ring.advance(trellis, chunk + STAGES * turns < last_chunk, own_lane);
            ring.decode(fragments, trellis, chunk + (STAGES + 1) * turns < last_chunk, own_lane);
        }
        if (chunk + 1 == last_chunk) {
            const int width = tile_columns * TILE;
            if (!passes) {
                store_column(chains, layer.values + static_cast<int64>(shard) * rows * width, rows, width,
                             column * TILE, own_lane);
            } else if (column / BLOCK_COLUMNS >= (first_column + count) / BLOCK_COLUMNS) {
                pass_column(chains, layer.passed, rows, width, column * TILE, own_lane);
            } else {
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; tile++) store_four(own_handed + 16 * WARP * tile, chains[tile]);
            }
        }
    }
    const Finish finish = {layer.output_scales, layer.bias, layer.y, static_cast<int>(layer.outputs)};
    if (passes) {
        const int turns_since_last = (turn + turns - (last_chunk - first_chunk) % turns) % turns;
        finish_own_blocks(reinterpret_cast<const float*>(handed), layer.passed, finish, first_column, count, rows,
                          tile_columns * TILE, turns_since_last * columns + own_column, warps, lane);
        return;
    }
    const Sums sums = {layer.values, shards, rows, tile_columns * TILE};
    finish_blocks(sums, finish, layer.counters, first_column, count, shards, warp, warps, lane);
}
