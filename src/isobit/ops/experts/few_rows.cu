// Before the products of up to 64 rows: tiles of rows, and the inputs of gate and up.
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
// grid (blocks of 128 inputs / 4, pairs), one warp, each octet with a block.
extern "C" __global__ void __launch_bounds__(WARP) prepare_rows(
    const float* x, const int* ids, const Layer* layers, half_bits* ready, RowTile* tiles, int* members, int rows,
    int chosen, int experts, int hidden, int width) {
    const int pair = blockIdx.y, lane = threadIdx.x, j = lane % OCTET, blocks = width / BLOCK;
    const int row = pair / (chosen + 1), choice = pair % (chosen + 1);
    if (blockIdx.x == 0) {
        if (choice < chosen) find_rows(ids, rows, chosen, row * chosen + choice, lane, tiles, members);
        else if (lane == 0) members[row] = pair;
        if (pair == 0 && lane == 0) tiles[0] = {experts, 0, rows, 0};
    }
    const bool writes = blockIdx.x * OCTETS + lane / OCTET < blocks;
    const int block = smaller(static_cast<int>(blockIdx.x) * OCTETS + lane / OCTET, blocks - 1);
    const int expert = choice == chosen ? experts : ids[row * chosen + choice];
    const int64 pairs = static_cast<int64>(rows) * (chosen + 1);
#pragma unroll
    for (int projection = GATE; projection <= UP; projection++) {
        const Layer& layer = layer_of(layers, expert, projection);
        if (layer.format == PLAIN) continue;
        float values[OCTET_VALUES];
        load_octet_of_row(x + static_cast<int64>(row) * hidden, block * BLOCK, hidden, j, values);
        write_input(layer, block, values, j, writes, ready + (projection * pairs + pair) * width);
    }
}
