// The steps around the products of up to 64 rows: tiles of rows, inputs, hidden values, the sum.
//
// Tile 0 is the shared expert with every row; tile 1 + p stands at routed pair p, where an expert is first chosen, and
// is empty elsewhere. So launches depend on the number of rows alone.
#include "ops/experts/layers.cuh"

constexpr int MOST_ROWS = 64;

// Fill the tile of routed pair number `routed` = row * chosen + choice, by one warp.
DEVICE void find_rows(const int* ids, int rows, int chosen, int routed, int lane, RowTile* tiles, int* members) {
    const int expert = ids[routed];
    int* list = members + (1 + routed) * MOST_ROWS;
    int count = 0;
    bool first = true;
    for (int begin = 0; begin < rows * chosen; begin += WARP) {
        const int other = begin + lane;
        const bool same = other < rows * chosen && ids[other] == expert;
        const unsigned lanes = ballot(same);
        first = first && ballot(same && other < routed) == 0;
        if (same && other >= routed)
            list[count + popcount(lanes & ((1u << lane) - 1))] = other / chosen * (chosen + 1) + other % chosen;
        if (first) count += popcount(lanes);
        else break;
    }
    if (lane == 0) tiles[1 + routed] = {expert, (1 + routed) * MOST_ROWS, first ? count : 0, 0};
}

// x [rows, hidden] -> each pair's inputs of gate and up: ready [2][pairs, width]; and the tiles.
// grid (blocks of 128 inputs, pairs), one warp.
extern "C" __global__ void __launch_bounds__(WARP) prepare_rows(
    const float* x, const int* ids, const Layer* layers, half_bits* ready, RowTile* tiles, int* members, int rows,
    int chosen, int experts, int hidden, int width) {
    const int block = blockIdx.x, pair = blockIdx.y, lane = threadIdx.x;
    const int row = pair / (chosen + 1), choice = pair % (chosen + 1);
    if (block == 0) {
        if (choice < chosen) find_rows(ids, rows, chosen, row * chosen + choice, lane, tiles, members);
        else if (lane == 0) members[row] = pair;
        if (pair == 0 && lane == 0) tiles[0] = {experts, 0, rows, 0};
    }
    const int expert = choice == chosen ? experts : ids[row * chosen + choice];
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = block * BLOCK + 4 * lane + i;
        values[i] = k < hidden ? x[static_cast<int64>(row) * hidden + k] : 0.0f;
    }
    const int64 pairs = static_cast<int64>(rows) * (chosen + 1);
#pragma unroll
    for (int projection = GATE; projection <= UP; projection++) {
        const Layer& layer = layer_of(layers, expert, projection);
        if (layer.format != PLAIN) write_input(layer, block, values, lane, ready + (projection * pairs + pair) * width);
    }
}

// sums [pairs, 2, width] of gate and up -> each pair's inputs of down: halves, or floats if plain, [pairs, width].
// grid (blocks of 128, pairs), one warp.
extern "C" __global__ void __launch_bounds__(WARP) activate_rows(
    const float* sums, const int* ids, const Layer* layers, half_bits* halves, float* floats, int chosen, int experts,
    int width) {
    const int block = blockIdx.x, pair = blockIdx.y, lane = threadIdx.x;
    const int expert = expert_of_pair(ids, pair, chosen, experts);
    if (block * BLOCK >= layer_of(layers, expert, DOWN).inputs) return;
    const float* source = sums + static_cast<int64>(pair) * 2 * width + block * BLOCK + 4 * lane;
    const float4 gate = load4(source), up = load4(source + width);
    float gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
    write_hidden(layers, expert, block, gates, ups, lane, halves + static_cast<int64>(pair) * width,
                 floats + static_cast<int64>(pair) * width);
}

// sums [pairs, width] of down -> y [rows, hidden]: outputs weighted, added in expert shards, the shared expert last.
// grid (blocks of 128 outputs, rows), 128 threads; (chosen + 1) * 128 floats of shared memory.
extern "C" __global__ void __launch_bounds__(BLOCK) add_rows(
    const float* sums, const int* ids, const float* weights, const float* gate_logits, const Layer* layers, float* y,
    int chosen, int experts, int hidden, int width) {
    DYNAMIC_SHARED(float, terms);
    const int block = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % WARP;
    for (int choice = threadIdx.x / WARP; choice <= chosen; choice += BLOCK / WARP) {
        const int64 pair = static_cast<int64>(row) * (chosen + 1) + choice;
        const int expert = choice == chosen ? experts : ids[row * chosen + choice];
        const float weight = choice == chosen ? sigmoid32(gate_logits[row]) : weights[row * chosen + choice];
        const float4 sum = load4(sums + pair * width + block * BLOCK + 4 * lane);
        float values[4] = {sum.x, sum.y, sum.z, sum.w};
        finish_outputs(layer_of(layers, expert, DOWN), block, values, lane);
        *reinterpret_cast<float4*>(terms + choice * BLOCK + 4 * lane) =
            make_float4(weight * values[0], weight * values[1], weight * values[2], weight * values[3]);
    }
    __syncthreads();
    const int column = block * BLOCK + threadIdx.x;
    if (column >= hidden) return;
    ShardedSum sum(experts);
    for (int choice = 0; choice < chosen; choice++)
        sum.add(ids[row * chosen + choice], terms[choice * BLOCK + threadIdx.x]);
    y[static_cast<int64>(row) * hidden + column] = sum.with_shared(terms[chosen * BLOCK + threadIdx.x]);
}
