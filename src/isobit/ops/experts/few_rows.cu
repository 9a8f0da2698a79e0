// Before the products of up to 64 rows: tiles of up to 8 rows of an expert, and the inputs of gate and up.
//
// The shared expert's tiles are the first; after them one stands at each routed pair with which a tile of its expert
// begins, and is empty elsewhere. So launches depend on the number of rows alone.
#include "ops/experts/layers.cuh"

// Fill tile `shared_tiles` + routed, of routed pair number `routed` = row * chosen + choice, by one warp.
DEVICE void find_rows(const int* ids, int rows, int chosen, int routed, int shared_tiles, int lane, RowTile* tiles,
                      int* members) {
    const int expert = ids[routed], first = (shared_tiles + routed) * TILE_ROWS;
    int before = 0, count = 0;
    for (int begin = 0; begin < rows * chosen; begin += WARP) {
        const int other = begin + lane;
        const bool same = other < rows * chosen && ids[other] == expert;
        const unsigned earlier = ballot(same && other < routed), others = ballot(same && other >= routed);
        const int place = count + popcount(others & ((1u << lane) - 1));
        if (same && other >= routed && place < TILE_ROWS)
            members[first + place] = other / chosen * (chosen + 1) + other % chosen;
        before += popcount(earlier);
        count += popcount(others);
    }
    const bool begins = before % TILE_ROWS == 0;
    if (lane == 0)
        tiles[shared_tiles + routed] = {expert, first, begins ? smaller(count, TILE_ROWS) : 0, before / TILE_ROWS};
}

// x [rows, hidden] -> each pair's inputs of gate and up: ready [2][pairs, width]; and the tiles.
// grid (blocks of 128 inputs / 4, pairs), one warp, each octet with a block.
extern "C" __global__ void __launch_bounds__(WARP) prepare_rows(
    const float* x, const int* ids, const Layer* layers, half_bits* ready, RowTile* tiles, int* members, int rows,
    int chosen, int experts, int hidden, int width) {
    const int pair = blockIdx.y, lane = threadIdx.x, j = lane % OCTET, blocks = width / BLOCK;
    const int row = pair / (chosen + 1), choice = pair % (chosen + 1);
    if (blockIdx.x == 0 && choice < chosen)
        find_rows(ids, rows, chosen, row * chosen + choice, (rows + TILE_ROWS - 1) / TILE_ROWS, lane, tiles, members);
    if (blockIdx.x == 0 && choice == chosen && lane == 0) {
        members[row] = pair;
        if (row % TILE_ROWS == 0)
            tiles[row / TILE_ROWS] = {experts, row, smaller(rows - row, TILE_ROWS), row / TILE_ROWS};
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
