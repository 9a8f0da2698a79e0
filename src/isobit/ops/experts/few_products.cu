// The products of up to 64 rows: all pairs of a row and an expert in one launch, tiles of up to 8 rows of an expert.
//
// A block has `columns` columns of 16 outputs of one expert. Its warps decode 128 inputs of one at a time. With macro
// TURNS 1 each warp has columns of its own, one after the other; with TURNS 2 or 4 so many warps share a column and
// take turns in carrying its chains, so that k ascends. The block that is the last to add to 128 outputs goes on with
// them.
// Macro FUSED: 1 if blocks find their tiles and rotate the inputs of gate and up themselves, else few_rows.cu has.
#include "ops/experts/formats.cuh"
#include "ops/experts/row_tiles.cuh"
#include "ops/experts/shared_gate.cuh"
#include "ops/linear/cuda_turns.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int WARP_COLUMNS = WARPS / TURNS;  // at a time
constexpr int GATE_ROWS = TILE_ROWS;
constexpr int STAGES = TURNS == 1 ? 2 : 3;
constexpr int TILES = BLOCK / TILE;  // of 128 inputs, and of a block of outputs
constexpr int HALF_STEPS = BLOCK / 32;
constexpr int MOST_BLOCKS = 4;  // of 128 outputs in a thread block
constexpr int BLOCKS_A_PROCESSOR = TURNS == 1 ? 8 : 7;

// What warps hand to each other: the chains of a column's 16 outputs, a lane's side by side.
struct Handed {
    float4 sums[WARP];
#if LONG_LAYERS
    double2 totals[2][WARP];
#endif
};

DEVICE void put_chains(const Chains<4>& chains, Handed& handed, int lane) {
    const float* c = chains.sums;
    handed.sums[lane] = make_float4(c[0], c[1], c[2], c[3]);
#if LONG_LAYERS
    const double* t = chains.totals;
    handed.totals[0][lane].x = t[0], handed.totals[0][lane].y = t[1];
    handed.totals[1][lane].x = t[2], handed.totals[1][lane].y = t[3];
#endif
}

DEVICE void take_chains(Chains<4>& chains, const Handed& handed, int lane) {
    const float4 sums = handed.sums[lane];
    float* c = chains.sums;
    c[0] = sums.x, c[1] = sums.y, c[2] = sums.z, c[3] = sums.w;
#if LONG_LAYERS
    const double2 low = handed.totals[0][lane], high = handed.totals[1][lane];
    double* t = chains.totals;
    t[0] = low.x, t[1] = low.y, t[2] = high.x, t[3] = high.y;
#endif
}

// A warp's chunks of 8 tiles below each other, column after column, on their way to shared memory.
template <typename F>
struct TileStages {
    static constexpr int pieces = tile_bytes(F::twice) / 16;  // of a tile
    static constexpr int stage_pieces = pieces * TILES;
    static constexpr int rounds = (stage_pieces + WARP - 1) / WARP;
    const unsigned char* next;
    int64 step, to_next_column;
    int chunk, chunks, columns;  // the next chunk to copy, of how many, in how many columns
    int offsets[rounds];
    uint4* stages;
    int copied, used;  // stages

    __device__ __forceinline__ TileStages(const Layer& layer, int column, int columns, int turn, uint4* own, int lane)
        : chunk(turn), chunks(layer.inputs / BLOCK), columns(columns), stages(own), copied(0), used(0) {
        const int row_bytes = layer.outputs / TILE * tile_bytes(F::twice);
        const int64 chunk_bytes = static_cast<int64>(TILES) * row_bytes;
        step = TURNS * chunk_bytes;
        to_next_column = WARP_COLUMNS * tile_bytes(F::twice) - chunks * chunk_bytes;
        next = reinterpret_cast<const unsigned char*>(layer.weights) + turn * chunk_bytes +
               column * tile_bytes(F::twice);
#pragma unroll
        for (int i = 0; i < rounds; i++) {
            const int piece = WARP * i + lane;
            offsets[i] = piece / pieces * row_bytes + piece % pieces * 16;
        }
#pragma unroll
        for (int i = 0; i < STAGES; i++) copy(lane);
    }
    // Begin to copy the next chunk.
    __device__ __forceinline__ void copy(int lane) {
        if (columns > 0 && chunk < chunks) {
#pragma unroll
            for (int i = 0; i < rounds; i++) {
                const int piece = WARP * i + lane;
                if (stage_pieces % WARP == 0 || piece < stage_pieces)
                    copy_async_16(stages + copied * stage_pieces + piece, next + offsets[i]);
            }
            next += step;
            chunk += TURNS;
            if (TURNS == 1 && chunk == chunks) {
                chunk = 0;
                columns--;
                next += to_next_column;
            }
        }
        copy_async_commit();
        copied = copied + 1 == STAGES ? 0 : copied + 1;
    }
    // The oldest chunk is there.
    __device__ __forceinline__ void await() const {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
    }
    __device__ __forceinline__ const unsigned* tile(int i) const {
        return reinterpret_cast<const unsigned*>(stages + used * stage_pieces + i * pieces);
    }
    // The oldest chunk is done with.
    __device__ __forceinline__ void advance(int lane) {
        __syncwarp();
        copy(lane);
        used = used + 1 == STAGES ? 0 : used + 1;
    }
};

// The rows of one tile and where their inputs and sums are: ready [pairs, width], sums [pairs, sums_width]. values:
// where plain layers, and blocks that rotate themselves, find them, [pairs / pairs_a_row, values_width].
struct Rows {
    const int* members;
    int count;
    const half_bits* ready;
    int width;
    float* sums;
    int sums_width;
    const float* values;
    int values_width, pairs_a_row;

    __device__ __forceinline__ const float* values_of(int member) const {
        return values + static_cast<int64>(members[member] / pairs_a_row) * values_width;
    }
};

// Shared memory: chains handed on, every warp's stages, and the inputs of a block that rotates them itself.
constexpr int HANDED_PIECES = TURNS > 1 ? WARP_COLUMNS * sizeof(Handed) / 16 : 0;
constexpr int STAGES_PIECES = WARPS * STAGES * TILES * most_twice();
constexpr int ROW_PADDING = 32;  // of halves: neighbouring rows lie in different banks

// Rotate the rows' inputs of a layer into shared memory [count, width + ROW_PADDING], by the block.
DEVICE void rotate_inputs(const Layer& layer, const Rows& rows, half_bits* inputs) {
    const int blocks = rows.width / BLOCK, units = rows.count * blocks;
    for (int first = 0; first < units; first += THREADS / OCTET) {
        const bool writes = first + threadIdx.x / OCTET < units;
        const int unit = smaller(first + static_cast<int>(threadIdx.x) / OCTET, units - 1);
        const int member = unit / blocks, block = unit % blocks, j = threadIdx.x % OCTET;
        float values[OCTET_VALUES];
        load_octet_of_row(rows.values_of(member), block * BLOCK, rows.values_width, j, values);
        write_input(layer, block, values, j, writes, inputs + member * (rows.width + ROW_PADDING));
    }
    __syncthreads();
}

// A lane's inputs of 128: its row's, as the B operands of 8 steps.
struct Inputs {
    uint4 halves[HALF_STEPS];

    __device__ __forceinline__ void load(const uint4* row, int chunk) {
#pragma unroll
        for (int i = 0; i < HALF_STEPS; i++) halves[i] = row[(chunk * HALF_STEPS + i) * 4];
    }
    __device__ __forceinline__ void multiply(int step, const unsigned weights[4], float sums[4]) const {
        const uint4& four = halves[step / 2];
        const unsigned even[2] = {four.x, four.y}, odd[2] = {four.z, four.w};
        mma_16x8x16(sums, weights, step % 2 ? odd : even);
    }
};

// Where a lane's inputs are, once they are ready. Barriers all the block.
template <bool ROTATES>
DEVICE const uint4* lane_inputs(const Layer& layer, const Rows& rows, uint4* shared, int lane) {
    const int member = smaller(lane / 4, rows.count - 1);
    const half_bits* row;
    if (ROTATES) {
        half_bits* inputs = reinterpret_cast<half_bits*>(shared + HANDED_PIECES + STAGES_PIECES);
        rotate_inputs(layer, rows, inputs);
        row = inputs + member * (rows.width + ROW_PADDING);
    } else {
        row = rows.ready + static_cast<int64>(rows.members[member]) * rows.width;
    }
    return reinterpret_cast<const uint4*>(row) + lane % 4;
}

DEVICE void store_sums(const Chains<4>& chains, const Rows& rows, int tile_column, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int member = 2 * (lane % 4) + i;
        if (member >= rows.count) continue;
        const int64 first = static_cast<int64>(rows.members[member]) * rows.sums_width;
        float* place = rows.sums + first + tile_column * TILE + lane / 4;
        place[0] = chains.result(i);
        place[8] = chains.result(2 + i);
    }
}

#if TURNS == 1
// A warp's columns from first_column on, WARP_COLUMNS apart, to last_column - 1.
template <typename F, bool ROTATES>
DEVICE void multiply_columns(const Layer& layer, int first_column, int last_column, const Rows& rows, uint4* shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, chunks = layer.inputs / BLOCK;
    const int first = first_column + warp;
    TileStages<F> tiles(layer, first, (last_column - first + WARP_COLUMNS - 1) / WARP_COLUMNS, 0,
                        shared + warp * STAGES * TileStages<F>::stage_pieces, lane);
    const LanePlace<F::twice> place(lane);
    await_inputs();
    const uint4* row = lane_inputs<ROTATES>(layer, rows, shared, lane);
    for (int column = first; column < last_column; column += WARP_COLUMNS) {
        Chains<4> chains;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            Inputs inputs;
            inputs.load(row, chunk);
            if (chunk) chains.close(chunk, layer.inputs);
            tiles.await();
#pragma unroll
            for (int step = 0; step < TILES; step++) {
                unsigned weights[4];
                decode_fragment<F::codebook, F::twice>(tiles.tile(step), place, weights);
                inputs.multiply(step, weights, chains.sums);
            }
            tiles.advance(lane);
        }
        store_sums(chains, rows, column, lane);
    }
}
#else
// WARP_COLUMNS columns from first_column on, each by TURNS warps.
template <typename F, bool ROTATES>
DEVICE void multiply_columns(const Layer& layer, int first_column, int last_column, const Rows& rows, uint4* shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, chunks = layer.inputs / BLOCK;
    const int turn = warp % TURNS, own = warp / TURNS, column = first_column + own;
    Handed& handed = reinterpret_cast<Handed*>(shared)[own];
    TileStages<F> tiles(layer, column, column < last_column ? 1 : 0, turn,
                        shared + HANDED_PIECES + warp * STAGES * TileStages<F>::stage_pieces, lane);
    const LanePlace<F::twice> place(lane);
    await_inputs();
    const uint4* row = lane_inputs<ROTATES>(layer, rows, shared, lane);
    if (column >= last_column) return;
    const int own_turn = warp + 1, awaited = turn == 0 ? warp + TURNS : warp;
    int round = turn == 0 ? 0 : 1;
#pragma unroll 1
    for (int chunk = turn; chunk < chunks; chunk += TURNS, round++) {
        Inputs inputs;
        inputs.load(row, chunk);
        tiles.await();
        unsigned weights[TILES][4];
#pragma unroll
        for (int step = 0; step < TILES; step++)
            decode_fragment<F::codebook, F::twice>(tiles.tile(step), place, weights[step]);
        tiles.advance(lane);
        Chains<4> chains;
        if (chunk) {
            wait_for_turn(awaited, round);
            take_chains(chains, handed, lane);
            chains.resume(chunk, layer.inputs);
        }
#pragma unroll
        for (int step = 0; step < TILES; step++) inputs.multiply(step, weights[step], chains.sums);
        if (chunk + 1 < chunks) {
            put_chains(chains, handed, lane);
            hand_over(own_turn);
        } else {
            store_sums(chains, rows, column, lane);
        }
    }
}
#endif

// Columns of a plain layer, a thread an output of a row; `real` of a row's values are no padding.
DEVICE void multiply_plain(const Layer& layer, int first_column, int last_column, int real, const Rows& rows) {
    const int first = first_column * TILE, outputs = smaller(last_column * TILE, layer.outputs) - first;
    for (int unit = threadIdx.x; unit < outputs * rows.count; unit += THREADS) {
        const int column = first + unit % outputs, member = unit / outputs;
        const int64 place = static_cast<int64>(rows.members[member]) * rows.sums_width + column;
        rows.sums[place] = plain_chain(layer, rows.values_of(member), real, column);
    }
}

// The sums of the rows with columns first_column to last_column - 1, as far as the layer has them.
template <bool ROTATES>
DEVICE void multiply(const Layer& layer, int first_column, int last_column, const Rows& rows, uint4* shared) {
#if PLAIN_LAYERS
    if (layer.format == PLAIN) {
        await_inputs();
        multiply_plain(layer, first_column, last_column, rows.values_width, rows);
        return;
    }
#endif
    if (first_column * TILE >= layer.outputs) return;
    begin_turns();
    const int last = smaller(last_column, layer.outputs / TILE);
    with_format(layer.format, [&](auto format) {
        multiply_columns<decltype(format), ROTATES>(layer, first_column, last, rows, shared);
    });
}

// A block's tile and its list of pairs.
DEVICE RowTile own_tile(const RowTile* tiles, const int* members, const int* ids, int rows, int chosen, int experts,
                        int number, const int*& list) {
#if FUSED
    __shared__ RowTile tile;
    __shared__ int own_members[TILE_ROWS];
    if (threadIdx.x < WARP) find_tile(ids, rows, chosen, experts, number, threadIdx.x, tile, own_members);
    __syncthreads();
    list = own_members;
    return tile;
#else
    list = members + number * TILE_ROWS;
    return tiles[number];
#endif
}

// Ask early for what the last block of 128 outputs will read.
DEVICE void fetch_scales(const half_bits* scales, int tile_column) {
    if (scales && threadIdx.x == 0) fetch_line(scales + tile_column * TILE);
}

// Ask early for the scales of all inputs, which are read in turn.
DEVICE void fetch_input_scales(const Layer& layer) {
    constexpr int LINE = 64;  // halves
    for (int at = threadIdx.x * LINE; at < layer.inputs; at += THREADS * LINE) fetch_line(layer.input_scales + at);
}

// Ask early for the layers' table and the gate's weights, which the cache does not hold by then.
DEVICE void fetch_constants(const Layer* layers, int experts, const float* gate_weights, int gate_inputs) {
    constexpr int LINE = 128;
    const int block = blockIdx.y * gridDim.x + blockIdx.x, at = block * LINE, gate_at = threadIdx.x * LINE / 4;
    const int bytes = (experts + 1) * PROJECTIONS * static_cast<int>(sizeof(Layer));
    if (threadIdx.x == 0 && at < bytes) fetch_line(reinterpret_cast<const unsigned char*>(layers) + at);
    if (gate_weights && block == 0 && gate_at < gate_inputs) fetch_line(gate_weights + gate_at);
}

// How often thread blocks of `columns` columns arrive at a block of 128 outputs.
DEVICE int arrivals(int columns) { return columns < TILES ? TILES / columns : 1; }

// ready [2][pairs, width], the inputs of gate and up -> those of down: halves, or floats if plain [pairs, inner_width].
//
// grid (2 * inner_width / 16 / columns, tiles and one more if there are gate weights), 128 threads: the first blocks
// then compute the shared expert's gate. columns: 4 / TURNS, or 8 without turns. sums [pairs, 2, inner_width] is
// scratch; counters [experts + 1, 8, inner_width / 128] are zeros, and are again. x [rows, hidden].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_PROCESSOR) multiply_gate_up(
    const Layer* layers, const RowTile* tiles, const int* members, const int* ids, int rows, int chosen, int experts,
    const half_bits* ready, int width, const float* x, int hidden, float* sums, int* counters, half_bits* halves,
    float* floats, int inner_width, int columns, const float* gate_weights, int gate_inputs, const float* gate_bias,
    float* gate_logits) {
    DYNAMIC_SHARED(uint4, shared);
    fetch_constants(layers, experts, gate_weights, gate_inputs);
    await_inputs();
    if (gate_weights && blockIdx.y == 0) {
        for (int first = blockIdx.x * GATE_ROWS; first < rows; first += gridDim.x * GATE_ROWS)
            shared_gate_logits(x, hidden, rows, first, gate_weights, gate_inputs, gate_bias, gate_logits,
                               *reinterpret_cast<GateInputs<GATE_ROWS>*>(shared));
        return;
    }
    const int* list;
    const RowTile tile =
        own_tile(tiles, members, ids, rows, chosen, experts, blockIdx.y - (gate_weights ? 1 : 0), list);
    if (tile.count == 0) return;
    const int side_blocks = inner_width / TILE / columns, side = blockIdx.x / side_blocks;
    const int tile_column = blockIdx.x % side_blocks * columns, block = tile_column / TILES;
    if (block * BLOCK >= whole_blocks(layer_of(layers, tile.expert, GATE).outputs)) return;
    const int64 side_pairs = static_cast<int64>(side) * rows * (chosen + 1);
    const Rows tile_rows = {list, tile.count, ready + side_pairs * width, width, sums + side * inner_width,
                            2 * inner_width, x, hidden, chosen + 1};
    const Layer layer = layer_of(layers, tile.expert, GATE + side);
    if (FUSED && layer.format != PLAIN) fetch_input_scales(layer);
    fetch_scales(layer.output_scales, tile_column);
    fetch_scales(layer_of(layers, tile.expert, DOWN).input_scales, tile_column);
    multiply<FUSED>(layer, tile_column, tile_column + columns, tile_rows, shared);
    int* counter = counters + (tile.expert * MOST_PARTS + tile.part) * (inner_width / BLOCK) + block;
    if (!arrives_last(counter, 2 * arrivals(columns))) return;
    for (int first = 0; first < tile.count; first += THREADS / OCTET) {
        const int member = first + threadIdx.x / OCTET;
        const int64 pair = list[smaller(member, tile.count - 1)];
        const float* source = sums + pair * 2 * inner_width + block * BLOCK;
        write_hidden(layers, tile.expert, block, source, source + inner_width, threadIdx.x % OCTET, member < tile.count,
                     halves + pair * inner_width, floats + pair * inner_width);
    }
}

// 128 outputs of a row from its pairs' sums of down: weighted, added in expert shards, the shared expert last.
DEVICE void add_pairs(const Layer* layers, const float* sums, const int* ids, const float* weights,
                      const float* gate_logits, int row, int chosen, int experts, int block, int width, float* terms,
                      float* y, int hidden) {
    for (int first = 0; first <= chosen; first += THREADS / OCTET) {
        const bool writes = first + threadIdx.x / OCTET <= chosen;
        const int choice = smaller(first + static_cast<int>(threadIdx.x) / OCTET, chosen);
        const int64 pair = static_cast<int64>(row) * (chosen + 1) + choice;
        const int expert = choice == chosen ? experts : ids[row * chosen + choice];
        const float weight = choice == chosen ? sigmoid32(gate_logits[row]) : weights[row * chosen + choice];
        write_terms(layer_of(layers, expert, DOWN), block, sums + pair * width + block * BLOCK, weight,
                    threadIdx.x % OCTET, writes, terms + choice * BLOCK);
    }
    __syncthreads();
    const int column = block * BLOCK + threadIdx.x;
    if (column < hidden) {
        ShardedSum sum(experts);
        for (int choice = 0; choice < chosen; choice++)
            sum.add(ids[row * chosen + choice], terms[choice * BLOCK + threadIdx.x]);
        y[static_cast<int64>(row) * hidden + column] = sum.with_shared(terms[chosen * BLOCK + threadIdx.x]);
    }
    __syncthreads();
}

// Inputs of down -> y [rows, hidden]. grid (ceil(width / 16 / columns), tiles), 128 threads.
//
// tiles, members and ids are settled. columns: 4 / TURNS, or 8, 16 or 32 without turns.
// sums [pairs, width] is scratch; counters [64, width / 128] are zeros, and are again. (chosen + 1) * 128 floats of
// shared memory, or what the products need.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_PROCESSOR) multiply_down(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* halves, const float* floats,
    int inner_width, float* sums, int* counters, const int* ids, const float* weights, const float* gate_logits,
    int rows, int chosen, int experts, float* y, int hidden, int width, int columns) {
    DYNAMIC_SHARED(uint4, shared);
    __shared__ int complete[TILE_ROWS * MOST_BLOCKS];
    const int* list;
    const RowTile tile = own_tile(tiles, members, ids, rows, chosen, experts, blockIdx.y, list);
    if (tile.count == 0) {
        await_inputs();
        return;
    }
    const int tile_column = blockIdx.x * columns, first_block = tile_column / TILES;
    const Rows tile_rows = {list, tile.count, halves, inner_width, sums, width, floats, inner_width, 1};
    const Layer layer = layer_of(layers, tile.expert, DOWN);
    for (int i = 0; i < columns; i += TILES)
        fetch_scales(layer.output_scales, smaller(tile_column + i, width / TILE - 1));
    multiply<false>(layer, tile_column, tile_column + columns, tile_rows, shared);
    await_inputs();
    __syncthreads();
    const int blocks = smaller((columns + TILES - 1) / TILES, width / BLOCK - first_block);
    if (threadIdx.x < blocks * tile.count) {
        const int row = list[threadIdx.x / blocks] / (chosen + 1), block = first_block + threadIdx.x % blocks;
        int* counter = counters + row * (width / BLOCK) + block;
        complete[threadIdx.x] = is_last(counter, arrivals(columns) * (chosen + 1)) ? row : -1;
    }
    __syncthreads();
    for (int i = 0; i < blocks * tile.count; i++)
        if (complete[i] >= 0)
            add_pairs(layers, sums, ids, weights, gate_logits, complete[i], chosen, experts, first_block + i % blocks,
                      width, reinterpret_cast<float*>(shared), y, hidden);
}
