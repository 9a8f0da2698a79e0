// The products of up to 64 rows: all pairs of a row and an expert in one launch, each expert's weights read once.
#include "ops/experts/formats.cuh"
#include "ops/experts/shared_gate.cuh"

constexpr int MOST_ROWS = 64;
constexpr int WARPS = 4;
constexpr int STEP_ROWS = 8;  // of one multiply-accumulate
constexpr int RING_BYTES = 6144;  // of tiles on their way, for each warp

// A warp's column of tiles, 8 tiles at a time, on its way to shared memory.
template <typename F>
struct TileRing {
    static constexpr int pieces = tile_bytes(F::twice) / 16;  // of a tile
    static constexpr int stage_pieces = pieces * (BLOCK / TILE);
    static constexpr int rounds = (stage_pieces + WARP - 1) / WARP;
    static constexpr int fitting = RING_BYTES / (16 * stage_pieces);
    static constexpr int stages = fitting < 8 ? fitting : 8;
    const unsigned char* next;
    int64 stage_stride;
    int offsets[rounds];
    uint4* ring;

    __device__ __forceinline__ TileRing(const Layer& layer, int tile_column, uint4* own, int lane) : ring(own) {
        const int row_bytes = layer.outputs / TILE * tile_bytes(F::twice);
        stage_stride = static_cast<int64>(row_bytes) * (BLOCK / TILE);
        next = reinterpret_cast<const unsigned char*>(layer.weights) + tile_column * tile_bytes(F::twice);
#pragma unroll
        for (int i = 0; i < rounds; i++) {
            const int piece = WARP * i + lane;
            offsets[i] = piece / pieces * row_bytes + piece % pieces * 16;
        }
    }
    // Begin to copy the next stage to its slot.
    __device__ __forceinline__ void copy(int slot, int lane) {
#pragma unroll
        for (int i = 0; i < rounds; i++) {
            const int piece = WARP * i + lane;
            if (piece < stage_pieces) copy_async_16(ring + slot * stage_pieces + piece, next + offsets[i]);
        }
        next += stage_stride;
    }
    __device__ __forceinline__ const unsigned* tile(int slot, int i) const {
        return reinterpret_cast<const unsigned*>(ring + slot * stage_pieces + i * pieces);
    }
};

// One warp: 16 outputs of up to 8 * GROUPS rows, whole chains, to `sums` of each pair.
template <typename F, int GROUPS>
DEVICE void multiply_column(const Layer& layer, int tile_column, const half_bits* ready, int width,
                            const int* members, int count, uint4* ring, int lane, float* sums, int sums_width) {
    constexpr int HALF_STEPS = BLOCK / 32;  // two steps of 16 inputs at a time
    constexpr int AHEAD = GROUPS == 1 ? HALF_STEPS : 1;
    const int group = lane / 4, quad_lane = lane % 4;
    const int blocks = layer.inputs / BLOCK;
    TileRing<F> tiles(layer, tile_column, ring, lane);
    const LanePlace<F::twice> place(lane);
    const uint4* rows[GROUPS];
    uint4 ahead[AHEAD][GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int member = STEP_ROWS * g + group;
        rows[g] = nullptr;
        if (member < count)
            rows[g] = reinterpret_cast<const uint4*>(ready + static_cast<int64>(members[member]) * width) + quad_lane;
    }
    auto load_rows = [&](uint4 to[GROUPS], int half_step) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            to[g] = rows[g] ? rows[g][4 * half_step] : make_uint4(0u, 0u, 0u, 0u);
    };
    for (int slot = 0; slot < tiles.stages - 1; slot++) {
        if (slot < blocks) tiles.copy(slot, lane);
        copy_async_commit();
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load_rows(ahead[i], i);
    Chains<4 * GROUPS> chains;
    int slot = 0, free_slot = tiles.stages - 1;
    for (int block = 0; block < blocks; block++) {
        copy_async_wait<TileRing<F>::stages - 2>();
        __syncwarp();
        if (block + tiles.stages - 1 < blocks) tiles.copy(free_slot, lane);
        copy_async_commit();
        if (block) chains.close(block, layer.inputs);
#pragma unroll
        for (int i = 0; i < HALF_STEPS; i++) {
            uint4 inputs[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; g++) inputs[g] = ahead[i % AHEAD][g];
            load_rows(ahead[i % AHEAD], smaller(block * HALF_STEPS + i + AHEAD, blocks * HALF_STEPS - 1));
            unsigned weights[2][4];
            decode_fragment<F::codebook, F::twice>(tiles.tile(slot, 2 * i), place, weights[0]);
            decode_fragment<F::codebook, F::twice>(tiles.tile(slot, 2 * i + 1), place, weights[1]);
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                if (GROUPS == 1 || STEP_ROWS * g < count) {
                    const unsigned even[2] = {inputs[g].x, inputs[g].y}, odd[2] = {inputs[g].z, inputs[g].w};
                    mma_16x8x16(chains.sums + 4 * g, weights[0], even);
                    mma_16x8x16(chains.sums + 4 * g, weights[1], odd);
                }
        }
        free_slot = slot;
        slot = slot + 1 == tiles.stages ? 0 : slot + 1;
    }
    const int column = tile_column * TILE + group;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int member = STEP_ROWS * g + 2 * quad_lane + i % 2;
            if (member < count)
                sums[static_cast<int64>(members[member]) * sums_width + column + 8 * (i / 2)] =
                    chains.result(4 * g + i);
        }
}

// One column of a plain layer a thread, rows by turns.
DEVICE void multiply_plain(const Layer& layer, int first_column, const float* inputs, int width, int real_width,
                           int pairs_a_row, const int* members, int count, float* sums, int sums_width) {
    const int column = first_column + threadIdx.x % (WARPS * TILE);
    if (column >= layer.outputs) return;
    for (int member = threadIdx.x / (WARPS * TILE); member < count; member += WARP / TILE) {
        const int pair = members[member];
        const float* row = inputs + static_cast<int64>(pair / pairs_a_row) * width;
        sums[static_cast<int64>(pair) * sums_width + column] = plain_chain(layer, row, real_width, column);
    }
}

// The sums of each tile's rows with 64 outputs of its expert, before any output rotation: sums [pairs, sums_width].
//
// grid (sides * side_blocks, tiles), 128 threads: side s is projection first_projection + s, whose prepared inputs are
// ready + s * ready_side and whose sums begin s * 64 * side_blocks on. plain_inputs [pairs / pairs_a_row, plain_width],
// of which real_width values are no padding, are a plain layer's inputs. If gate_rows is above 0, there is one tile
// less, and the first blocks compute the shared expert's gate of that many rows from plain_inputs.
extern "C" __global__ void __launch_bounds__(WARPS * WARP) multiply_rows(
    const Layer* layers, const RowTile* tiles, const int* members, int first_projection, int side_blocks,
    const half_bits* ready, int64 ready_side, int width, const float* plain_inputs, int plain_width, int real_width,
    int pairs_a_row, float* sums, int sums_width, int gate_rows, const float* gate_weights, int gate_inputs,
    const float* gate_bias, float* gate_logits) {
    __shared__ uint4 rings[WARPS][RING_BYTES / 16];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (gate_rows && blockIdx.y == 0) {
        shared_gate_logits(plain_inputs, real_width, gate_rows, blockIdx.x * GATE_ROWS, gate_weights, gate_inputs,
                           gate_bias, gate_logits);
        return;
    }
    const RowTile tile = tiles[blockIdx.y - (gate_rows ? 1 : 0)];
    if (tile.count == 0) return;
    const int side = blockIdx.x / side_blocks, column_block = blockIdx.x % side_blocks;
    const Layer layer = layer_of(layers, tile.expert, first_projection + side);
    const int tile_column = column_block * WARPS + warp;
    const int* list = members + tile.first;
    const half_bits* inputs = ready + side * ready_side;
    float* outputs = sums + side * side_blocks * WARPS * TILE;
#if PLAIN_LAYERS
    if (layer.format == PLAIN) {
        multiply_plain(layer, column_block * WARPS * TILE, plain_inputs, plain_width, real_width, pairs_a_row, list,
                       tile.count, outputs, sums_width);
        return;
    }
#endif
    if (tile_column * TILE >= layer.outputs) return;
    with_format(layer.format, [&](auto format) {
        using F = decltype(format);
        if (tile.count <= STEP_ROWS)
            multiply_column<F, 1>(layer, tile_column, inputs, width, list, tile.count, rings[warp], lane, outputs,
                                  sums_width);
        else
            multiply_column<F, MOST_ROWS / STEP_ROWS>(layer, tile_column, inputs, width, list, tile.count, rings[warp],
                                                      lane, outputs, sums_width);
    });
}
