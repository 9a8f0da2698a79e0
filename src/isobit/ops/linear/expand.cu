// Stored weights -> half [N, K], k contiguous, for the many-row products.
#include "device.cuh"
#include "ops/linear/trellis.cuh"

#ifndef CODEBOOK
#define CODEBOOK 2
#define TWICE_BITS 6
#endif

constexpr int EXPAND_WARPS = 8;
constexpr int BLOCK_TILES = 8;  // a warp's tiles: 128 inputs of 16 outputs

// The words of 8 tiles, one below the other, from global to shared memory by one warp.
template <int BYTES>
DEVICE void stage_tiles(unsigned* shared, const unsigned char* tiles, int64 row_bytes, int lane) {
    constexpr int pieces = BYTES / 16;
#pragma unroll
    for (int i = 0; i < BLOCK_TILES * pieces; i += WARP) {
        const int piece = i + lane;
        if (piece < BLOCK_TILES * pieces)
            copy_async_16(shared + 4 * piece, tiles + piece / pieces * row_bytes + piece % pieces * 16);
    }
}

constexpr int ROW_PIECES = BLOCK_TILES * TILE / 8;  // of 16 bytes
using StagedRow = uint4[ROW_PIECES + 1];            // padded: neighbouring rows then begin in other banks

// The fragments of 8 neighbouring tiles as 16 rows of 128 inputs.
DEVICE void store_fragments(StagedRow rows[TILE], const unsigned fragments[BLOCK_TILES][4], int lane) {
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        unsigned* row = reinterpret_cast<unsigned*>(rows[lane / 4 + 8 * upper]) + lane % 4;
#pragma unroll
        for (int tile = 0; tile < BLOCK_TILES; tile++) {
            row[tile * 8] = fragments[tile][upper];
            row[tile * 8 + 4] = fragments[tile][2 + upper];
        }
    }
}

// grid (ceil(N / 128), K / 128), 256 threads: each warp 16 outputs by 128 inputs.
extern "C" __global__ void expand_trellis(
    const unsigned char* trellis, half_bits* weights, int tile_columns, int inputs) {
    constexpr int words = tile_words(TWICE_BITS);
    __shared__ StagedRow staged_rows[EXPAND_WARPS][TILE];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column = blockIdx.x * EXPAND_WARPS + warp;
    if (column >= tile_columns) return;
    const int64 row_bytes = static_cast<int64>(tile_columns) * tile_bytes(TWICE_BITS);
    const int64 first_tile = static_cast<int64>(blockIdx.y) * BLOCK_TILES;
    // The words make room for the rows when they are decoded.
    unsigned* own = reinterpret_cast<unsigned*>(staged_rows[warp]);
    static_assert(4 * BLOCK_TILES * words <= sizeof(StagedRow) * TILE, "the words must fit");
    stage_tiles<tile_bytes(TWICE_BITS)>(
        own, trellis + first_tile * row_bytes + static_cast<int64>(column) * tile_bytes(TWICE_BITS), row_bytes, lane);
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
    const LanePlace<TWICE_BITS> place(lane);
    unsigned fragments[BLOCK_TILES][4];
#pragma unroll
    for (int tile = 0; tile < BLOCK_TILES; tile++)
        decode_fragment<CODEBOOK, TWICE_BITS>(own + tile * words, place, fragments[tile]);
    __syncwarp();
    store_fragments(staged_rows[warp], fragments, lane);
    __syncwarp();
    half_bits* first = weights + static_cast<int64>(column) * TILE * inputs + first_tile * TILE;
#pragma unroll
    for (int i = 0; i < TILE * ROW_PIECES; i += WARP) {
        const int row = (i + lane) / ROW_PIECES, piece = (i + lane) % ROW_PIECES;
        reinterpret_cast<uint4*>(first + static_cast<int64>(row) * inputs)[piece] = staged_rows[warp][row][piece];
    }
}

// Weights as the A operand's registers, uint4 [N / 16, K / 16, 32 lanes] -> half [N, K]. grid (ceil(K / 128), N / 16),
// 256 threads: each warp a tile.
extern "C" __global__ void expand_fragments(const uint4* fragments, half_bits* weights, int tiles) {
    const int lane = threadIdx.x % WARP, tile = blockIdx.x * BLOCK_TILES + threadIdx.x / WARP, column = blockIdx.y;
    if (tile >= tiles) return;
    const uint4 four = load_streaming(fragments + (static_cast<int64>(column) * tiles + tile) * WARP + lane);
    const int64 inputs = static_cast<int64>(tiles) * TILE;
    half_bits* row = weights + (column * TILE + lane / 4) * inputs + tile * TILE + lane % 4 * 2;
    *reinterpret_cast<unsigned*>(row) = four.x;
    *reinterpret_cast<unsigned*>(row + 8) = four.z;
    row += 8 * inputs;
    *reinterpret_cast<unsigned*>(row) = four.y;
    *reinterpret_cast<unsigned*>(row + 8) = four.w;
}
