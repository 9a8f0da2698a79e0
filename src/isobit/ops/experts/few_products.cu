// The products of up to 64 rows: all pairs of a row and an expert in one launch, each expert's weights read once.
//
// A block has 16 outputs of one expert. Its warps decode 128 inputs of them each, all at once, and take turns in
// carrying the chains over them, so that k ascends. The block that is the last to add to 128 outputs goes on with them.
// Macro ROW_GROUPS: 1 if there are at most 8 rows, else 8.
#include "ops/experts/formats.cuh"
#include "ops/experts/shared_gate.cuh"
#include "ops/linear/cuda_turns.cuh"

constexpr int TURNS = 4;
constexpr int THREADS = TURNS * WARP;
constexpr int GROUP_ROWS = 8;  // of one multiply-accumulate
constexpr int GATE_ROWS = ROW_GROUPS == 1 ? 8 : 32;
constexpr int STAGES = 3;
constexpr int TILES = BLOCK / TILE;  // of a turn, and of a block of outputs
constexpr int HALF_STEPS = BLOCK / 32;
constexpr int BLOCKS_A_PROCESSOR = ROW_GROUPS == 1 ? 7 : 4;

// What warps hand to each other: the chains of a block's 16 outputs, for each group of rows, a lane's side by side.
struct Handed {
    float4 sums[ROW_GROUPS][WARP];
#if LONG_LAYERS
    double2 totals[ROW_GROUPS][2][WARP];
#endif
};

template <int GROUPS>
DEVICE void put_chains(const Chains<4 * GROUPS>& chains, Handed& handed, int lane) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float* c = chains.sums + 4 * g;
        handed.sums[g][lane] = make_float4(c[0], c[1], c[2], c[3]);
#if LONG_LAYERS
        const double* t = chains.totals + 4 * g;
        handed.totals[g][0][lane].x = t[0], handed.totals[g][0][lane].y = t[1];
        handed.totals[g][1][lane].x = t[2], handed.totals[g][1][lane].y = t[3];
#endif
    }
}

template <int GROUPS>
DEVICE void take_chains(Chains<4 * GROUPS>& chains, const Handed& handed, int lane) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float4 sums = handed.sums[g][lane];
        float* c = chains.sums + 4 * g;
        c[0] = sums.x, c[1] = sums.y, c[2] = sums.z, c[3] = sums.w;
#if LONG_LAYERS
        const double2 low = handed.totals[g][0][lane], high = handed.totals[g][1][lane];
        double* t = chains.totals + 4 * g;
        t[0] = low.x, t[1] = low.y, t[2] = high.x, t[3] = high.y;
#endif
    }
}

// A warp's turns of a column of tiles, 8 tiles each, on their way to shared memory.
template <typename F>
struct TileStages {
    static constexpr int pieces = tile_bytes(F::twice) / 16;  // of a tile
    static constexpr int stage_pieces = pieces * TILES;
    static constexpr int rounds = (stage_pieces + WARP - 1) / WARP;
    const unsigned char* next;
    int64 turn_stride;
    int offsets[rounds];
    uint4* stages;

    __device__ __forceinline__ TileStages(const Layer& layer, int tile_column, int turn, uint4* own, int lane)
        : stages(own) {
        const int row_bytes = layer.outputs / TILE * tile_bytes(F::twice);
        turn_stride = static_cast<int64>(row_bytes) * (TILES * TURNS);
        next = reinterpret_cast<const unsigned char*>(layer.weights) + static_cast<int64>(turn) * TILES * row_bytes +
               tile_column * tile_bytes(F::twice);
#pragma unroll
        for (int i = 0; i < rounds; i++) {
            const int piece = WARP * i + lane;
            offsets[i] = piece / pieces * row_bytes + piece % pieces * 16;
        }
    }
    // Begin to copy the next turn's tiles.
    __device__ __forceinline__ void copy(int stage, int lane) {
#pragma unroll
        for (int i = 0; i < rounds; i++) {
            const int piece = WARP * i + lane;
            if (stage_pieces % WARP == 0 || piece < stage_pieces)
                copy_async_16(stages + stage * stage_pieces + piece, next + offsets[i]);
        }
        next += turn_stride;
    }
    __device__ __forceinline__ const unsigned* tile(int stage, int i) const {
        return reinterpret_cast<const unsigned*>(stages + stage * stage_pieces + i * pieces);
    }
};

// The rows of one tile and where their inputs and sums are: ready [pairs, width], sums [pairs, sums_width].
struct Rows {
    const int* members;
    int count;
    const half_bits* ready;
    int width;
    float* sums;
    int sums_width;
};

// 16 outputs of up to 8 * GROUPS rows, by the block's warps in turn.
template <typename F, int GROUPS>
DEVICE void multiply_column(const Layer& layer, int tile_column, const Rows& rows, uint4* shared) {
    const int lane = threadIdx.x % WARP, turn = threadIdx.x / WARP;
    const int group = lane / 4, quad_lane = lane % 4;
    const int chunks = layer.inputs / BLOCK;
    Handed& handed = *reinterpret_cast<Handed*>(shared);
    uint4* own = shared + sizeof(Handed) / 16 + turn * STAGES * TileStages<F>::stage_pieces;
    TileStages<F> tiles(layer, tile_column, turn, own, lane);
    const LanePlace<F::twice> place(lane);
    int staged = turn;
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++, staged += TURNS) {
        if (staged < chunks) tiles.copy(stage, lane);
        copy_async_commit();
    }
    const uint4* inputs = reinterpret_cast<const uint4*>(rows.ready);
    int places[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int member = smaller(GROUP_ROWS * g + group, rows.count - 1);
        places[g] = rows.members[member] * (rows.width / 8) + quad_lane;
    }
    int stage = 0, round = 0;
#pragma unroll 1
    for (int chunk = turn; chunk < chunks; chunk += TURNS, round++) {
        uint4 early[HALF_STEPS];
        if (GROUPS == 1)
#pragma unroll
            for (int i = 0; i < HALF_STEPS; i++) early[i] = inputs[places[0] + (chunk * HALF_STEPS + i) * 4];
        copy_async_wait<STAGES - 1>();
        __syncwarp();
        unsigned weights[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++)
            decode_fragment<F::codebook, F::twice>(tiles.tile(stage, i), place, weights[i]);
        __syncwarp();
        if (staged < chunks) tiles.copy(stage, lane);
        copy_async_commit();
        staged += TURNS;
        stage = stage + 1 == STAGES ? 0 : stage + 1;

        Chains<4 * GROUPS> chains;
        if (chunk) {
            wait_for_turn(turn == 0 ? TURNS : turn, turn == 0 ? round : round + 1);
            take_chains<GROUPS>(chains, handed, lane);
            chains.resume(chunk, layer.inputs);
        }
#pragma unroll
        for (int i = 0; i < HALF_STEPS; i++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (GROUPS == 1 || GROUP_ROWS * g < rows.count) {
                    const uint4 pairs =
                        GROUPS == 1 ? early[i] : inputs[places[g] + (chunk * HALF_STEPS + i) * 4];
                    const unsigned even[2] = {pairs.x, pairs.y}, odd[2] = {pairs.z, pairs.w};
                    mma_16x8x16(chains.sums + 4 * g, weights[2 * i], even);
                    mma_16x8x16(chains.sums + 4 * g, weights[2 * i + 1], odd);
                }
        if (chunk + 1 < chunks) {
            put_chains<GROUPS>(chains, handed, lane);
            hand_over(turn + 1);
            continue;
        }
        const int column = tile_column * TILE + group;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int member = GROUP_ROWS * g + 2 * quad_lane + i % 2;
                if (member < rows.count)
                    rows.sums[static_cast<int64>(rows.members[member]) * rows.sums_width + column + 8 * (i / 2)] =
                        chains.result(4 * g + i);
            }
    }
}

// What plain layers read: inputs [pairs / pairs_a_row, width], of which `real` values are no padding.
struct PlainInputs {
    const float* values;
    int width, real, pairs_a_row;
};

// 16 outputs of a plain layer, rows by turns.
DEVICE void multiply_plain(const Layer& layer, int tile_column, const PlainInputs& inputs, const Rows& rows) {
    const int column = tile_column * TILE + threadIdx.x % TILE;
    if (column >= layer.outputs) return;
    for (int member = threadIdx.x / TILE; member < rows.count; member += THREADS / TILE) {
        const int pair = rows.members[member];
        const float* row = inputs.values + static_cast<int64>(pair / inputs.pairs_a_row) * inputs.width;
        rows.sums[static_cast<int64>(pair) * rows.sums_width + column] = plain_chain(layer, row, inputs.real, column);
    }
}

// The sums of 16 outputs of the rows.
DEVICE void multiply(const Layer& layer, int tile_column, const PlainInputs& plain, const Rows& rows, uint4* shared) {
#if PLAIN_LAYERS
    if (layer.format == PLAIN) {
        multiply_plain(layer, tile_column, plain, rows);
        return;
    }
#endif
    if (tile_column * TILE >= layer.outputs) return;
    begin_turns();
    with_format(layer.format, [&](auto format) {
        using F = decltype(format);
        if (ROW_GROUPS == 1 || rows.count <= GROUP_ROWS) multiply_column<F, 1>(layer, tile_column, rows, shared);
        else multiply_column<F, ROW_GROUPS>(layer, tile_column, rows, shared);
    });
}

// ready [2][pairs, width], the inputs of gate and up -> those of down: halves, or floats if plain [pairs, inner_width].
//
// grid (2 * inner_width / 16, tiles and one more if there are gate weights), 128 threads: the first blocks then compute
// the shared expert's gate. sums [pairs, 2, inner_width] is scratch; counters [experts + 1, inner_width / 128] are
// zeros, and are again. x [rows, hidden] is read by plain layers.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_PROCESSOR) multiply_gate_up(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* ready, int pairs, int width,
    const float* x, int hidden, int pairs_a_row, float* sums, int* counters, half_bits* halves, float* floats,
    int inner_width, const float* gate_weights, int gate_inputs, const float* gate_bias, float* gate_logits) {
    DYNAMIC_SHARED(uint4, shared);
    if (gate_weights && blockIdx.y == 0) {
        shared_gate_logits(x, hidden, pairs / pairs_a_row, blockIdx.x * GATE_ROWS, gate_weights, gate_inputs, gate_bias,
                           gate_logits, *reinterpret_cast<GateInputs<GATE_ROWS>*>(shared));
        return;
    }
    const RowTile tile = tiles[blockIdx.y - (gate_weights ? 1 : 0)];
    if (tile.count == 0) return;
    const int tile_columns = inner_width / TILE, side = blockIdx.x / tile_columns;
    const int tile_column = blockIdx.x % tile_columns, block = tile_column / TILES;
    if (block * BLOCK >= whole_blocks(layer_of(layers, tile.expert, GATE).outputs)) return;
    const int* list = members + tile.first;
    const int64 side_pairs = static_cast<int64>(side) * pairs;
    const Rows rows = {list, tile.count, ready + side_pairs * width, width, sums + side * inner_width, 2 * inner_width};
    const Layer layer = layer_of(layers, tile.expert, GATE + side);
    multiply(layer, tile_column, {x, hidden, hidden, pairs_a_row}, rows, shared);
    const int blocks = inner_width / BLOCK;
    if (!arrives_last(counters + tile.expert * blocks + block, 2 * TILES)) return;
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

// Inputs of down -> y [rows, hidden]. grid (width / 16, tiles), 128 threads.
//
// sums [pairs, width] is scratch; counters [64, width / 128] are zeros, and are again. (chosen + 1) * 128 floats of
// shared memory, or what the products need.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_PROCESSOR) multiply_down(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* halves, const float* floats,
    int inner_width, float* sums, int* counters, const int* ids, const float* weights, const float* gate_logits,
    int chosen, int experts, float* y, int hidden, int width) {
    DYNAMIC_SHARED(uint4, shared);
    __shared__ int complete[GROUP_ROWS * ROW_GROUPS];
    const RowTile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const int tile_column = blockIdx.x, block = tile_column / TILES;
    const int* list = members + tile.first;
    const Rows rows = {list, tile.count, halves, inner_width, sums, width};
    const Layer layer = layer_of(layers, tile.expert, DOWN);
    multiply(layer, tile_column, {floats, inner_width, inner_width, 1}, rows, shared);
    __syncthreads();
    if (threadIdx.x < tile.count) {
        const int row = list[threadIdx.x] / (chosen + 1);
        complete[threadIdx.x] = is_last(counters + row * (width / BLOCK) + block, TILES * (chosen + 1)) ? row : -1;
    }
    __syncthreads();
    for (int member = 0; member < tile.count; member++)
        if (complete[member] >= 0)
            add_pairs(layers, sums, ids, weights, gate_logits, complete[member], chosen, experts, block, width,
                      reinterpret_cast<float*>(shared), y, hidden);
}
