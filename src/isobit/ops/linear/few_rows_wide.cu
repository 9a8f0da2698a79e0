// A trellis layer of many outputs for up to 64 rows: every warp carries the chains of whole columns of tiles.
//
// Weights are the A operand (16 outputs), rows the B operand (8 at a time). A warp has WARP_COLUMNS neighbouring
// columns at a time and goes from column to column, its weights staged ahead across them; no warp waits for another.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"
#include "ops/linear/trellis.cuh"

#ifndef CODEBOOK
#define CODEBOOK 2
#define TWICE_BITS 6
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef WARP_COLUMNS
#define WARP_COLUMNS 1
#endif

constexpr int BLOCK_WARPS = ROW_TILES <= 2 ? 8 : 4;
constexpr int BLOCKS = ROW_TILES == 4 ? 4 : 3;  // of a multiprocessor
constexpr int CHUNK_TILES = WARP_COLUMNS == 1 ? 8 : 4;  // one below the other, 16 inputs each
constexpr int STAGES = 3;
constexpr int FINISHED_ROWS = ROW_TILES == 1 ? 1 : 4;  // that a warp rotates out together
constexpr int WORDS = tile_words(TWICE_BITS);
constexpr int ROW_PIECES = WARP_COLUMNS * TWICE_BITS;  // of 16 bytes, of a warp's tiles beside each other
constexpr int PIECES = CHUNK_TILES * ROW_PIECES;
constexpr int LANE_PIECES = (PIECES + WARP - 1) / WARP;
constexpr int CHUNK_WORDS = CHUNK_TILES * WARP_COLUMNS * WORDS;

// The chunks of a warp's columns, one after another, staged ahead in a ring. Positions are in pieces.
struct ColumnRing {
    unsigned* stages;
    unsigned position, column_step;
    int column, chunk, chunks, columns, stride, stage;
    unsigned offsets[LANE_PIECES];

    __device__ __forceinline__ ColumnRing(unsigned* stages, int tile_columns, int chunks, int column, int stride,
                                          int lane)
        : stages(stages), column(column), chunk(0), chunks(chunks), columns(tile_columns), stride(stride), stage(0) {
        position = column * TWICE_BITS;
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            const int piece = i * WARP + lane;
            offsets[i] = piece / ROW_PIECES * (tile_columns * TWICE_BITS) + piece % ROW_PIECES;
        }
    }

    __device__ __forceinline__ unsigned* words() const { return stages + stage * CHUNK_WORDS; }

    // Stage one chunk more where the current one lies, and go on to the next.
    __device__ __forceinline__ void advance(const uint4* trellis, int lane) {
        if (column < columns) {
            unsigned* target = words() + 4 * lane;
#pragma unroll
            for (int i = 0; i < LANE_PIECES; i++) {
                const int piece = i * WARP + lane;
                if (PIECES % WARP == 0 || piece < PIECES)
                    copy_async_16(target + 4 * WARP * i, trellis + (position + offsets[i]));
            }
            position += CHUNK_TILES * TWICE_BITS * columns;
            if (++chunk == chunks) {
                chunk = 0;
                column += stride;
                position = column * TWICE_BITS;
            }
        }
        copy_async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Count a warp's columns of a block of 128 outputs; rotate the block out where they complete it.
DEVICE void finish_columns(const Sums& sums, const Finish& finish, int* counters, int column, int lane) {
    constexpr int block_columns = ROTATION / TILE;
    const int block = column / block_columns;
    __syncwarp();
    int last = 0;
    if (lane == 0) last = completes(counters + block, WARP_COLUMNS, block_columns);
    if (!shuffle(last, 0)) return;
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < sums.rows; row += FINISHED_ROWS) finish_rows<FINISHED_ROWS>(sums, finish, row, block, lane);
}

// Any grid, 32 * BLOCK_WARPS threads. Layers of one k-shard, tile_columns a multiple of 8. operand: rotate_few
// made it of the rows. values: float [rows, 16 * tile_columns], used here. counters: zeros, one a block of outputs.
extern "C" __global__ void __launch_bounds__(BLOCK_WARPS * WARP, BLOCKS)
few_rows_wide(const uint4* __restrict__ trellis, const uint4* operand, float* values, int* counters, int tile_columns,
              int input_blocks, int rows, const half_bits* output_scales, const float* bias, float* y, int outputs) {
    DYNAMIC_SHARED(unsigned, shared);
    const int lane = remembered(threadIdx.x % WARP), warp = threadIdx.x / WARP;
    const int chunks = input_blocks * (ROTATION / TILE / CHUNK_TILES);
    // Blocks before warps, so that every multiprocessor has its share of the last columns.
    const int first_column = (warp * gridDim.x + blockIdx.x) * WARP_COLUMNS;
    const int stride = gridDim.x * BLOCK_WARPS * WARP_COLUMNS;
    ColumnRing ring(shared + warp * STAGES * CHUNK_WORDS, tile_columns, chunks, first_column, stride, lane);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) ring.advance(trellis, lane);
    await_inputs();

    const LanePlace<TWICE_BITS> place(lane);
    int places[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
        places[tile] = smaller(8 * tile + lane / 4, rows - 1) * 4 + lane % 4;
    const Sums sums = {values, 1, rows, tile_columns * TILE};
    const Finish finish = {output_scales, bias, y, outputs};
#pragma unroll 1
    for (int column = first_column; column < tile_columns; column += stride) {
        float chains[WARP_COLUMNS][ROW_TILES][4] = {};
        const uint4* inputs = operand;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            uint4 pairs[CHUNK_TILES / 2][ROW_TILES];
            if (ROW_TILES == 1) {
#pragma unroll
                for (int half = 0; half < CHUNK_TILES / 2; half++)
#pragma unroll
                    for (int tile = 0; tile < ROW_TILES; tile++)
                        pairs[half][tile] = inputs[half * 4 * rows + places[tile]];
            }
            copy_async_wait<STAGES - 1>();
            __syncwarp();
#pragma unroll
            for (int half = 0; half < CHUNK_TILES / 2; half++) {
                unsigned fragments[WARP_COLUMNS][2][4];
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int own = 0; own < WARP_COLUMNS; own++)
                        decode_fragment<CODEBOOK, TWICE_BITS>(
                            ring.words() + ((2 * half + i) * WARP_COLUMNS + own) * WORDS, place, fragments[own][i]);
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; tile++) {
                    const uint4 four = ROW_TILES == 1 ? pairs[half][tile] : inputs[half * 4 * rows + places[tile]];
                    const unsigned even[2] = {four.x, four.y}, odd[2] = {four.z, four.w};
#pragma unroll
                    for (int own = 0; own < WARP_COLUMNS; own++) {
                        mma_16x8x16(chains[own][tile], fragments[own][0], even);
                        mma_16x8x16(chains[own][tile], fragments[own][1], odd);
                    }
                }
            }
            __syncwarp();
            ring.advance(trellis, lane);
            inputs += CHUNK_TILES / 2 * 4 * rows;
        }
#pragma unroll
        for (int own = 0; own < WARP_COLUMNS; own++)
            store_column(chains[own], values, rows, tile_columns * TILE, (column + own) * TILE, lane);
        finish_columns(sums, finish, counters, column, lane);
    }
}
