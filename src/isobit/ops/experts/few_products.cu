// The products of up to 64 rows: all pairs of a row and an expert in one launch, tiles of up to 8 rows of an expert.
//
// A block has `columns` columns of 16 outputs of one expert. Its warps decode 128 inputs of one at a time. With macro
// TURNS 1 each warp has columns of its own, one after the other; with more, so many warps share a column and take turns
// in carrying its chains, so that k ascends. The warp that is the last to end 16 of 128 outputs goes on with them.
// Macro FUSED: 1 if blocks find their tiles and rotate the inputs of gate and up themselves, else few_rows.cu has.
// MOST_WARPS: of a multiprocessor at a time. STAGES: a warp's chunks on their way.
#include "ops/experts/formats.cuh"
#include "ops/experts/row_tiles.cuh"
#include "ops/experts/shared_gate.cuh"
#include "ops/experts/warp_blocks.cuh"
#include "ops/linear/cuda_turns.cuh"

constexpr int GATE_ROWS = 4;  // that a warp computes the shared expert's gate of at a time
constexpr int TILES = BLOCK / TILE;  // of 128 inputs, and of a block of outputs
constexpr int HALF_STEPS = BLOCK / 32;
constexpr int TERMS_AT_ONCE = 4;  // of a row's, on their way: more take registers from the products

// Columns of this thread block at a time.
DEVICE int warp_columns() { return blockDim.x / WARP / TURNS; }

// A warp's turn with its column. First turns may be longer: every scheduler's warps have as many of them.
DEVICE int turn_of(int warp) { return (warp + warp / TURNS / 2) % TURNS; }

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
    int step, offsets[rounds];
    int to_copy;    // chunks, of all columns
    int in_column;  // of them, before the next column begins
    int chunks;     // of a column
    uint4* stages;
    int stage;  // the oldest chunk's

    // `columns` columns from `column` on, of each every chunk number turn, turn + TURNS, ...
    __device__ __forceinline__ TileStages(const Layer& layer, int column, int columns, int turn, uint4* own, int lane)
        : stages(own), stage(0) {
        const int row_bytes = layer.outputs / TILE * tile_bytes(F::twice), chunk_bytes = TILES * row_bytes;
        step = TURNS * chunk_bytes;
        in_column = chunks = (layer.inputs / BLOCK - turn + TURNS - 1) / TURNS;
        to_copy = columns > 0 ? columns * chunks : 0;
        next = reinterpret_cast<const unsigned char*>(layer.weights) + static_cast<int64>(turn) * chunk_bytes +
               static_cast<int64>(column) * tile_bytes(F::twice);
#pragma unroll
        for (int i = 0; i < rounds; i++) {
            const int piece = WARP * i + lane;
            offsets[i] = piece / pieces * row_bytes + piece % pieces * 16;
        }
#pragma unroll
        for (int i = 0; i < STAGES; i++) copy(lane);
    }
    // Begin to copy the next chunk to where the oldest was.
    __device__ __forceinline__ void copy(int lane) {
        if (to_copy > 0) {
            uint4* target = stages + stage * stage_pieces + lane;
#pragma unroll
            for (int i = 0; i < rounds; i++)
                if (stage_pieces % WARP == 0 || WARP * i + lane < stage_pieces)
                    copy_async_16(target + WARP * i, next + offsets[i]);
            to_copy--;
            next += step;
            if (TURNS == 1 && --in_column == 0) {
                in_column = chunks;
                next += warp_columns() * tile_bytes(F::twice) - static_cast<int64>(chunks) * step;
            }
        }
        copy_async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    // The oldest chunk is there.
    __device__ __forceinline__ void await() const {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
    }
    __device__ __forceinline__ const unsigned* tile(int i) const {
        return reinterpret_cast<const unsigned*>(stages + stage * stage_pieces + i * pieces);
    }
    // The oldest chunk is done with.
    __device__ __forceinline__ void advance(int lane) {
        __syncwarp();
        copy(lane);
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

// Shared memory: chains handed on, every warp's stages, the inputs of a block that rotates them itself, and the gate's.
DEVICE int handed_pieces() { return TURNS > 1 ? warp_columns() * sizeof(Handed) / 16 : 0; }
DEVICE int products_pieces() { return handed_pieces() + blockDim.x / WARP * STAGES * TILES * most_twice(); }
constexpr int ROW_PADDING = 32;  // of halves: neighbouring rows lie in different banks

DEVICE int row_pieces(int width) { return (width + ROW_PADDING) / 8; }

// A warp's next blocks of the rows' inputs, all asked for before the first is rotated.
struct InputBlocks {
    static constexpr int count = 4;
    float values[count][4];
    uint2 scales[count];
};

// Rotate the rows' inputs of a layer into shared memory [count, width + ROW_PADDING], by the block.
DEVICE void rotate_inputs(const Layer& layer, const Rows& rows, half_bits* inputs) {
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, blocks = rows.width / BLOCK;
    const int units = rows.count * blocks;
    const bool whole = rows.values_width % 4 == 0;
    for (int first = threadIdx.x / WARP; first < units; first += InputBlocks::count * warps) {
        InputBlocks own;
#pragma unroll
        for (int i = 0; i < InputBlocks::count; i++) {
            const int unit = first + i * warps, column = unit % blocks * BLOCK + 4 * lane;
            if (unit >= units) break;
            load_inputs(rows.values_of(unit / blocks), column, rows.values_width, whole, own.values[i]);
            own.scales[i] = *reinterpret_cast<const uint2*>(layer.input_scales + column);
        }
#pragma unroll
        for (int i = 0; i < InputBlocks::count; i++) {
            const int unit = first + i * warps;
            if (unit >= units) break;
            half_bits* row = inputs + unit / blocks * (rows.width + ROW_PADDING);
            write_input_by_warp(FourScales(own.scales[i]), unit % blocks, own.values[i], lane, row);
        }
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
        half_bits* inputs = reinterpret_cast<half_bits*>(shared + products_pieces());
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
// A warp's columns from first_column on, so many apart as there are warps, to last_column - 1.
template <typename F, bool ROTATES>
DEVICE void multiply_columns(const Layer& layer, int first_column, int last_column, const Rows& rows, uint4* shared) {
    const int lane = remembered(threadIdx.x % WARP), warp = remembered(threadIdx.x / WARP);
    const int chunks = layer.inputs / BLOCK;
    const int first = first_column + warp;
    const int apart = warp_columns();
    TileStages<F> tiles(layer, first, (last_column - first + apart - 1) / apart, 0,
                        shared + warp * STAGES * TileStages<F>::stage_pieces, lane);
    const LanePlace<F::twice> place(lane);
    await_inputs();
    const uint4* row = lane_inputs<ROTATES>(layer, rows, shared, lane);
    for (int column = first; column < last_column; column += apart) {
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
// The columns from first_column to last_column - 1, each by TURNS warps.
template <typename F, bool ROTATES>
DEVICE void multiply_columns(const Layer& layer, int first_column, int last_column, const Rows& rows, uint4* shared) {
    __shared__ uint64 turns[MOST_WARPS];
    const int lane = remembered(threadIdx.x % WARP), warp = remembered(threadIdx.x / WARP);
    const int chunks = layer.inputs / BLOCK;
    const int own = warp / TURNS, column = first_column + own, turn = turn_of(warp);
    Handed& handed = reinterpret_cast<Handed*>(shared)[own];
    TileStages<F> tiles(layer, column, column < last_column ? 1 : 0, turn,
                        shared + handed_pieces() + warp * STAGES * TileStages<F>::stage_pieces, lane);
    const LanePlace<F::twice> place(lane);
    if (threadIdx.x < MOST_WARPS) begin_passing(turns + threadIdx.x, 0);
    await_inputs();
    const uint4* row = lane_inputs<ROTATES>(layer, rows, shared, lane);
    if (!ROTATES) __syncthreads();
    if (column >= last_column) return;
    uint64* own_turn = turns + own * TURNS + turn;
    uint64* turn_before = turns + own * TURNS + (turn ? turn : TURNS) - 1;
#pragma unroll 1
    for (int chunk = turn; chunk < chunks; chunk += TURNS) {
        tiles.await();
        unsigned weights[TILES][4];
#pragma unroll
        for (int step = 0; step < TILES; step++)
            decode_fragment<F::codebook, F::twice>(tiles.tile(step), place, weights[step]);
        tiles.advance(lane);
        Inputs inputs;
        inputs.load(row, chunk);
        Chains<4> chains;
        if (chunk) {
            wait_for_pass(barrier_at(turn_before), (chunk - 1) / TURNS + 1);
            take_chains(chains, handed, lane);
            chains.resume(chunk, layer.inputs);
        }
#pragma unroll
        for (int step = 0; step < TILES; step++) inputs.multiply(step, weights[step], chains.sums);
        if (chunk + 1 < chunks) {
            put_chains(chains, handed, lane);
            pass(barrier_at(own_turn), lane);
        } else {
            store_sums(chains, rows, column, lane);
        }
    }
}
#endif

// Columns of a plain layer, a thread an output of a row; `real` of a row's values are no padding.
DEVICE void multiply_plain(const Layer& layer, int first_column, int last_column, int real, const Rows& rows) {
    const int first = first_column * TILE, outputs = smaller(last_column * TILE, layer.outputs) - first;
    for (int unit = threadIdx.x; unit < outputs * rows.count; unit += blockDim.x) {
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
        __syncthreads();
        return;
    }
#endif
    if (first_column * TILE >= layer.outputs) return;
    const int last = smaller(last_column, layer.outputs / TILE);
    with_format(layer.format, [&](auto format) {
        multiply_columns<decltype(format), ROTATES>(layer, first_column, last, rows, shared);
    });
}

// A block's tile and its list of pairs.
DEVICE const RowTile& own_tile(const RowTile* tiles, const int* members, const int* ids, int rows, int chosen,
                               int experts, int number, const int*& list) {
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

// Ask early for the scales of `blocks` blocks of 128, which the last thread block to add to them will read.
DEVICE void fetch_scales(const half_bits* scales, int first_block, int blocks) {
    if (scales && threadIdx.x < blocks) fetch_line(scales + (first_block + threadIdx.x) * BLOCK);
    if (scales && threadIdx.x < blocks) fetch_line(scales + (first_block + threadIdx.x) * BLOCK + BLOCK / 2);
}

// Ask early for the scales of all inputs, which are read in turn.
DEVICE void fetch_input_scales(const Layer& layer) {
    constexpr int LINE = 64;  // halves
    for (int at = threadIdx.x * LINE; at < layer.inputs; at += blockDim.x * LINE) fetch_line(layer.input_scales + at);
}

// Ask early for the layers' table and the gate's weights, which the cache does not hold by then.
DEVICE void fetch_constants(const Layer* layers, int experts, const float* gate_weights, int gate_inputs) {
    constexpr int LINE = 128;
    const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
    const int bytes = (experts + 1) * PROJECTIONS * static_cast<int>(sizeof(Layer));
    for (int at = (threadIdx.x * blocks + block) * LINE; at < bytes; at += blockDim.x * blocks * LINE)
        fetch_line(reinterpret_cast<const unsigned char*>(layers) + at);
    if (!gate_weights || block) return;
    for (int at = threadIdx.x * LINE / 4; at < gate_inputs; at += blockDim.x * LINE / 4) fetch_line(gate_weights + at);
}

// The lowest lane of some.
DEVICE int lowest_of(unsigned lanes) { return 31 - leading_zeros(lanes & (0u - lanes)); }

// Columns of a thread block, `first` to `last` - 1, by blocks of 128 outputs.
struct Columns {
    int first, last;

    __device__ __forceinline__ int first_block() const { return first / TILES; }
    __device__ __forceinline__ int blocks() const { return (last + TILES - 1) / TILES - first / TILES; }};

// The columns of a thread block that a warp ends: it has carried all of their chains, or the last 128 inputs.
struct Ended {
    int first, count;

    __device__ __forceinline__ Ended(const Layer& layer, const Columns& own, int warp) {
        const int apart = warp_columns(), chunks = layer.format == PLAIN ? 1 : layer.inputs / BLOCK;
        first = own.first + warp / TURNS;
        const bool ends = turn_of(warp) == (chunks - 1) % TURNS && first < own.last;
        count = ends ? (own.last - first + apart - 1) / apart : 0;
    }
    __device__ __forceinline__ int block(int i) const { return (first + i * warp_columns()) / TILES; }
};

// Where hidden values go, halves or floats [pairs, width], and the sums [pairs, 2, width] that they come from.
struct Hidden {
    const float* sums;
    half_bits* halves;
    float* floats;
    int width;
};

// Go on with the columns of gate or up, which `side` is, that this warp has ended.
DEVICE void finish_gate_up(const Layer* layers, const RowTile& tile, const int* list, int side, Columns own,
                           Hidden hidden, int* counters) {
    if (own.first >= own.last) return;
    const int lane = threadIdx.x % WARP;
    const Ended ended(layer_of(layers, tile.expert, GATE + side), own, threadIdx.x / WARP);
    if (ended.count == 0) return;
    // What the last arrival needs is asked for before it.
    const int inner_width = hidden.width;
    Triple expert(layers, tile.expert, ended.block(0), lane);
    int* tile_counters = counters + (tile.expert * MOST_PARTS + tile.part) * (inner_width / BLOCK);
    unsigned lasts = last_arrivals(lane < ended.count, tile_counters + ended.block(lane), 2 * TILES);
    for (; lasts; lasts &= lasts - 1) {
        const int block = ended.block(lowest_of(lasts));
        if (block != expert.block) expert.load_scales(block, lane);
#pragma unroll 1
        for (int member = 0; member < tile.count; member++) {
            const int64 pair = list[member];
            const float* source = hidden.sums + pair * 2 * inner_width + block * BLOCK;
            write_hidden_by_warp(expert, source, source + inner_width, lane, hidden.halves + pair * inner_width,
                                 hidden.floats + pair * inner_width);
        }
    }
}

// ready [2][pairs, width], the inputs of gate and up -> those of down: halves, or floats if plain [pairs, inner_width].
//
// grid (2 * ceil(inner_width / 16 / columns), gate_rows + tiles), 32 * TURNS threads a column at a time. gate_rows 1:
// the first blocks compute the shared expert's gate; 0: if there are gate weights, the last warp of the last block of
// the first tile's gate columns does, which has no column. sums [pairs, 2, inner_width] is scratch; counters [experts +
// 1, 8, inner_width / 128] are zeros, and are again. x [rows, hidden].
extern "C" __global__ void __launch_bounds__(MOST_WARPS* WARP) multiply_gate_up(
    const Layer* layers, const RowTile* tiles, const int* members, const int* ids, int rows, int chosen, int experts,
    const half_bits* ready, int width, const float* x, int hidden, float* sums, int* counters, half_bits* halves,
    float* floats, int inner_width, int columns, int gate_rows, const float* gate_weights, int gate_inputs,
    const float* gate_bias, float* gate_logits) {
    DYNAMIC_SHARED(uint4, shared);
    fetch_constants(layers, experts, gate_weights, gate_inputs);
    await_inputs();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int number = static_cast<int>(blockIdx.y) - gate_rows;
    const int side_slices = gridDim.x / 2, side = blockIdx.x / side_slices, slice = blockIdx.x % side_slices;
    const int* list = nullptr;
    RowTile tile = {};
    Columns own = {};
    Layer layer = {};
    if (number >= 0) {
        tile = own_tile(tiles, members, ids, rows, chosen, experts, number, list);
        if (tile.count == 0) return;
        layer = layer_of(layers, tile.expert, GATE + side);
        const int stored_columns = whole_blocks(layer.outputs) / TILE;
        own = {slice * columns, smaller((slice + 1) * columns, stored_columns)};
    }
    const bool has_columns = own.first < own.last;
    if (has_columns) {
        const int64 side_pairs = static_cast<int64>(side) * rows * (chosen + 1);
        const Rows tile_rows = {list, tile.count, ready + side_pairs * width, width, sums + side * inner_width,
                                2 * inner_width, x, hidden, chosen + 1};
        if (FUSED && layer.format != PLAIN) fetch_input_scales(layer);
        fetch_scales(layer.output_scales, own.first_block(), own.blocks());
        fetch_scales(layer_of(layers, tile.expert, DOWN).input_scales, own.first_block(), own.blocks());
        multiply<FUSED>(layer, own.first, own.last, tile_rows, shared);
    }
    const bool idle = gate_rows == 0 && number == 0 && blockIdx.x == side_slices - 1;
    if (gate_weights && (number < 0 ? warp == 0 : idle && warp == static_cast<int>(blockDim.x) / WARP - 1)) {
        uint4* after_products = shared + products_pieces() + (FUSED ? rows * row_pieces(width) : 0);
        GateInputs<GATE_ROWS>* staged = reinterpret_cast<GateInputs<GATE_ROWS>*>(after_products);
        const int begin = number < 0 ? blockIdx.x * GATE_ROWS : 0, apart = (number < 0 ? gridDim.x : 1) * GATE_ROWS;
#pragma unroll 1
        for (int first = begin; first < rows; first += apart)
            shared_gate_logits_by_warp(x, hidden, rows, first, gate_weights, gate_inputs, gate_bias, gate_logits,
                                       staged);
    }
    finish_gate_up(layers, tile, list, side, own, {sums, halves, floats, inner_width}, counters);
}

// What a row of y [rows, hidden] is made of: its pairs' sums [pairs, width], which become their weighted outputs;
// choices and weights [rows, chosen]; and the shared expert's gate.
struct Mixture {
    float* sums;
    const int* ids;
    const float* weights;
    const float* gate_logits;
    int chosen, experts, width, hidden;
    float* y;

    __device__ __forceinline__ float weight(int row, int choice) const {
        return choice == chosen ? sigmoid32(gate_logits[row]) : weights[row * chosen + choice];
    }
};

// 128 outputs of a row: its terms added in expert shards, the shared expert last. As ShardedSums, without its branches:
// to leave an empty shard adds 0 to a total that is never -0.
DEVICE void add_terms_by_warp(const Mixture& mixture, int row, int block, int lane) {
    const int chosen = mixture.chosen, *ids = mixture.ids + row * chosen;
    const int shard_size = (mixture.experts + EXPERT_SHARDS - 1) / EXPERT_SHARDS;
    const float* terms = mixture.sums + static_cast<int64>(row) * (chosen + 1) * mixture.width + block * BLOCK;
    double totals[4] = {}, shard_sums[4] = {};
    float shared[4] = {};
#pragma unroll 1
    for (int first = 0; first <= chosen; first += TERMS_AT_ONCE) {
        const int own = smaller(first + lane, chosen - 1), before = larger(own - 1, 0);
        float values[TERMS_AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++)
            load_four(terms + static_cast<int64>(smaller(first + i, chosen)) * mixture.width, lane, values[i]);
        const unsigned begins_shard = ballot(ids[own] / shard_size != ids[before] / shard_size);
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            const bool routed = first + i < chosen, begins = routed && (begins_shard >> i & 1) != 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (begins) {
                    totals[j] = totals[j] + shard_sums[j];
                    shard_sums[j] = 0.0;
                }
                if (routed) shard_sums[j] = shard_sums[j] + values[i][j];
                if (first + i == chosen) shared[j] = values[i][j];
            }
        }
    }
    float outputs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) outputs[j] = static_cast<float>(totals[j] + shard_sums[j] + shared[j]);
    store_outputs(outputs, mixture.y + static_cast<int64>(row) * mixture.hidden, block * BLOCK + 4 * lane,
                  mixture.hidden);
}

// Go on with the columns of down that this warp has ended.
DEVICE void finish_down(const Layer* layers, const RowTile& tile, const int* list, Columns own, Mixture mixture,
                        int* tile_counters, int* row_counters) {
    const int lane = threadIdx.x % WARP, width = mixture.width;
    const Layer& down = layer_of(layers, tile.expert, DOWN);
    const Ended ended(down, own, threadIdx.x / WARP);
    if (ended.count == 0) return;
    // What the last arrival needs is asked for before it.
    const int choices = mixture.chosen + 1, pair = list[smaller(lane, tile.count - 1)], row = pair / choices;
    const int choice = pair % choices;
    const float weight = mixture.weight(row, choice);
    uint2 scales = scales_of(down.output_scales, ended.block(0), lane);
    tile_counters += (tile.expert * MOST_PARTS + tile.part) * (width / BLOCK);
    unsigned lasts = last_arrivals(lane < ended.count, tile_counters + ended.block(lane), TILES);
    for (; lasts; lasts &= lasts - 1) {
        const int block = ended.block(lowest_of(lasts));
        if (block != ended.block(0)) scales = scales_of(down.output_scales, block, lane);
#pragma unroll 1
        for (int member = 0; member < tile.count; member++)
            weight_outputs_by_warp(down, scales, block, shuffle(weight, member), lane,
                                   mixture.sums + static_cast<int64>(shuffle(pair, member)) * width + block * BLOCK);
        unsigned ready = last_arrivals(lane < tile.count, row_counters + row * (width / BLOCK) + block, choices);
        for (; ready; ready &= ready - 1) add_terms_by_warp(mixture, shuffle(row, lowest_of(ready)), block, lane);
    }
}

// Inputs of down -> y [rows, hidden]. grid (ceil(width / 16 / columns), tiles), 32 * TURNS threads a column at a time.
//
// tiles, members and ids are settled. sums [pairs, width] is scratch; tile_counters [experts + 1, 8, width / 128] and
// row_counters [64, width / 128] are zeros, and are again.
extern "C" __global__ void __launch_bounds__(MOST_WARPS* WARP) multiply_down(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* halves, const float* floats,
    int inner_width, float* sums, int* tile_counters, int* row_counters, const int* ids, const float* weights,
    const float* gate_logits, int rows, int chosen, int experts, float* y, int hidden, int width, int columns) {
    DYNAMIC_SHARED(uint4, shared);
    const int* list;
    const RowTile& tile = own_tile(tiles, members, ids, rows, chosen, experts, blockIdx.y, list);
    if (tile.count == 0) {
        await_inputs();
        return;
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first_column = blockIdx.x * columns;
    const Columns own = {first_column, smaller(first_column + columns, width / TILE)};
    const Rows tile_rows = {list, tile.count, halves, inner_width, sums, width, floats, inner_width, 1};
    const Layer layer = layer_of(layers, tile.expert, DOWN);
    fetch_scales(layer.output_scales, own.first_block(), own.blocks());
    multiply<false>(layer, own.first, own.last, tile_rows, shared);
    await_inputs();
    finish_down(layers, tile, list, own, {sums, ids, weights, gate_logits, chosen, experts, width, hidden, y},
                tile_counters, row_counters);
}
