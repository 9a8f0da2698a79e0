// A plain layer for up to 64 rows: one warp carries the chains of 16 outputs over one k-shard.
//
// Weights lie as the A operand's registers, uint4 [N / 16, K / 16, 32 lanes]; rows are the B operand, rounded to half
// on their way. With two parts every row is two columns of it: x rounded, and what that leaves rounded.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int SIDE = 16;
constexpr int GROUP_TILES = 4;
constexpr int GROUP_INPUTS = GROUP_TILES * SIDE;
constexpr int BLOCK_TILES = ROTATION / SIDE;
constexpr int BLOCK_ROWS = 8 * ROW_TILES / PARTS;
constexpr int ROW_FLOATS = GROUP_INPUTS + 8;  // padded: rows then begin in other banks
constexpr int WEIGHT_PIECES = GROUP_TILES * WARP;
constexpr int ROW_PIECES = GROUP_INPUTS / 4;

struct Stage {
    uint4 weights[GROUP_TILES][WARP];
    alignas(16) float inputs[BLOCK_ROWS][ROW_FLOATS];
};

// Stage tiles first to first + 3, of those before `last`, and the rows' inputs to them.
DEVICE void stage_group(
    Stage& stage, const uint4* weights, const float* x, int first, int last, int rows, int inputs, int lane) {
    if (first >= last) return;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++)
        if (first + tile < last)
            copy_async_16(&stage.weights[tile][lane], weights + static_cast<int64>(first + tile) * WARP + lane);
    const int pieces = smaller(last - first, GROUP_TILES) * (SIDE / 4);
    for (int i = lane; i < rows * ROW_PIECES; i += WARP) {
        const int row = i / ROW_PIECES, piece = i % ROW_PIECES;
        const float* from = x + static_cast<int64>(row) * inputs + first * SIDE + 4 * piece;
        if (piece < pieces) copy_async_16(&stage.inputs[row][4 * piece], from);
    }
}

// Two neighbouring inputs as halves; of part 1 what rounding them leaves.
DEVICE unsigned rounded_pair(const float* at, bool second_part) {
    const float2 pair = *reinterpret_cast<const float2*>(at);
    half_bits low = half_of(pair.x), high = half_of(pair.y);
    if (PARTS == 2 && second_part) {
        low = half_of(pair.x - float_of_half(low));
        high = half_of(pair.y - float_of_half(high));
    }
    return pack_half2(low, high);
}

// The row's outputs from its terms' sums, in the block that comes last.
DEVICE void finish_column(const Sums& sums, const Finish& finish, int column, int first_row, int rows, int lane) {
    for (int i = lane; i < rows * SIDE; i += WARP) {
        const int row = first_row + i / SIDE, output = column * SIDE + i % SIDE;
        if (output >= finish.outputs) continue;
        float total = total_of(sums, row, output);
        if (finish.bias) total = total + finish.bias[output];
        finish.y[static_cast<int64>(row) * finish.outputs + output] = total;
    }
}

// grid (N / 16, shards, ceil(rows / BLOCK_ROWS)), 32 threads. x: float [rows, 16 * tiles], rows at 16 bytes. values:
// float [shards * PARTS, rows, N], for more shards than one. counters: zeros, one for each (grid z, column).
extern "C" __global__ void __launch_bounds__(WARP)
few_rows_plain(const uint4* __restrict__ weights, const float* x, float* values, int* counters, int tiles, int rows,
               const float* bias, float* y, int outputs) {
    DYNAMIC_SHARED(Stage, stages);
    const int lane = threadIdx.x, group = lane / 4, pair = lane % 4;
    const int column = blockIdx.x, columns = gridDim.x, shard = blockIdx.y, shards = gridDim.y;
    const int first_row = blockIdx.z * BLOCK_ROWS, own_rows = smaller(BLOCK_ROWS, rows - first_row);
    const int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES, inputs = tiles * SIDE;
    const int first_tile = shard * blocks / shards * BLOCK_TILES;
    const int last_tile = smaller((shard + 1) * blocks / shards * BLOCK_TILES, tiles);
    weights += static_cast<int64>(column) * tiles * WARP;
    x += static_cast<int64>(first_row) * inputs;

    int staged = first_tile;
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        stage_group(stages[stage], weights, x, staged, last_tile, own_rows, inputs, lane);
        copy_async_commit();
        staged += GROUP_TILES;
    }
    float c[ROW_TILES][4] = {};
    int stage = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < last_tile; tile += GROUP_TILES) {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
        Stage& own = stages[stage];
#pragma unroll
        for (int i = 0; i < GROUP_TILES; i++) {
            if (tile + i >= last_tile) break;
            const uint4 four = own.weights[i][lane];
            const unsigned a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; row_tile++) {
                const int row = smaller((8 * row_tile + group) / PARTS, own_rows - 1);
                const float* at = &own.inputs[row][i * SIDE + 2 * pair];
                const unsigned b[2] = {rounded_pair(at, group % 2), rounded_pair(at + 8, group % 2)};
                mma_16x8x16(c[row_tile], a, b);
            }
        }
        __syncwarp();
        stage_group(own, weights, x, staged, last_tile, own_rows, inputs, lane);
        copy_async_commit();
        staged += GROUP_TILES;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    const Finish finish = {nullptr, bias, y, outputs};
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; row_tile++) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int output = column * SIDE + group + 8 * upper;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int place = 8 * row_tile + 2 * pair + i, row = place / PARTS, part = place % PARTS;
                if (row >= own_rows) continue;
                const float sum = c[row_tile][2 * upper + i];
                if (shards > 1) {
                    const int64 term = static_cast<int64>(shard * PARTS + part) * rows + first_row + row;
                    values[term * (columns * SIDE) + output] = sum;
                } else if (part == 0 && output < outputs) {
                    float total = sum;
                    if (PARTS == 2)
                        total = static_cast<float>(
                            static_cast<double>(sum) + static_cast<double>(c[row_tile][2 * upper + 1]));
                    if (bias) total = total + bias[output];
                    y[static_cast<int64>(first_row + row) * outputs + output] = total;
                }
            }
        }
    }
    if (shards == 1 || !arrives_last(counters + blockIdx.z * columns + column, 1, shards)) return;
    finish_column({values, shards * PARTS, rows, columns * SIDE}, finish, column, first_row, own_rows, lane);
}
