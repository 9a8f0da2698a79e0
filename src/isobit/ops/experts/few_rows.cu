// Before the products of more rows than these rotate themselves: their tiles, and the inputs of gate and up.
#include "ops/experts/row_tiles.cuh"

// x [rows, hidden] -> each pair's inputs of gate and up: ready [2][pairs, width]; and the tiles.
// grid (blocks of 128 inputs / 4, pairs), one warp, each octet with a block.
extern "C" __global__ void __launch_bounds__(WARP) prepare_rows(
    const float* x, const int* ids, const Layer* layers, half_bits* ready, RowTile* tiles, int* members, int rows,
    int chosen, int experts, int hidden, int width) {
    await_inputs();
    const int pair = blockIdx.y, lane = threadIdx.x, j = lane % OCTET, blocks = width / BLOCK;
    const int row = pair / (chosen + 1), choice = pair % (chosen + 1);
    if (blockIdx.x == 0 && pair < shared_tiles(rows) + rows * chosen)
        find_tile(ids, rows, chosen, experts, pair, lane, tiles[pair], members + pair * TILE_ROWS);
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
        write_input(OctetScales(layer.input_scales, block, j), block, values, j, writes,
                    ready + (projection * pairs + pair) * width);
    }
}
