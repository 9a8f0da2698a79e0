// The tiles of up to 64 rows: up to 8 rows of one expert each.
//
// The shared expert's tiles are the first; after them one stands at each routed pair, number row * chosen + choice,
// with which a tile of its expert begins, and is empty elsewhere. So their number depends on the number of rows alone.
#pragma once
#include "ops/experts/layers.cuh"

DEVICE int shared_tiles(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

// Tile `number` and its list of pairs, by one warp; `first` stays 0.
DEVICE void find_tile(const int* ids, int rows, int chosen, int experts, int number, int lane, RowTile& tile,
                      int* list) {
    const int routed = number - shared_tiles(rows);
    if (routed < 0) {
        const int row = number * TILE_ROWS + lane;
        if (lane < TILE_ROWS && row < rows) list[lane] = row * (chosen + 1) + chosen;
        if (lane == 0) tile = {experts, 0, smaller(rows - number * TILE_ROWS, TILE_ROWS), number};
        return;
    }
    const int expert = ids[routed];
    int before = 0, count = 0;
    for (int begin = 0; begin < rows * chosen; begin += WARP) {
        const int other = begin + lane;
        const bool same = other < rows * chosen && ids[other] == expert;
        const unsigned earlier = ballot(same && other < routed), others = ballot(same && other >= routed);
        const int place = count + popcount(others & ((1u << lane) - 1));
        if (same && other >= routed && place < TILE_ROWS) list[place] = other / chosen * (chosen + 1) + other % chosen;
        before += popcount(earlier);
        count += popcount(others);
    }
    const bool begins = before % TILE_ROWS == 0;
    if (lane == 0) tile = {expert, 0, begins ? smaller(count, TILE_ROWS) : 0, before / TILE_ROWS};
}
