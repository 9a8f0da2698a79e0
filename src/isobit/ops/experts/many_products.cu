// The products of many rows, tiles decoded inside; the bytes are those of few_products.cu.
//
// Macro ROW_TILE: the most rows of one expert in a block, 64 or 128.
#include "ops/experts/formats.cuh"

constexpr int SIDES = 2;  // blocks of 128 outputs in a thread block: gate and up, or two of down
constexpr int SIDE_WARPS = 4;
constexpr int WARPS = SIDES * SIDE_WARPS, THREADS = WARPS * WARP;
constexpr int WARP_TILES = BLOCK / TILE / SIDE_WARPS;  // of 16 outputs, side by side
constexpr int STEP_ROWS = 8;
constexpr int GROUPS = ROW_TILE / STEP_ROWS;
constexpr int STAGE_INPUTS = 64, STAGE_TILES = STAGE_INPUTS / TILE;
constexpr int ROW_PIECES = STAGE_INPUTS / 8;  // of 16 bytes, in a row of a stage
constexpr int SIDE_PIECES = ROW_TILE * ROW_PIECES;
constexpr int SUMS_STRIDE = BLOCK + 4;  // of floats: a quarter of a warp writes to different banks

// Bytes of a stage's tiles of one side, with the widest format that the layers have.
DEVICE constexpr int most_twice() {
    int most = 0;
    for (int twice = 2; twice <= 16; twice++)
        if ((THREE_INST_WIDTHS | MCG_WIDTHS | MUL1_WIDTHS) >> twice & 1) most = twice;
    return most;
}
constexpr int SIDE_TILE_PIECES = STAGE_TILES * (BLOCK / TILE) * most_twice();

// What a thread copies to shared memory for its side: pieces of 16 bytes of rows, swizzled, and of tiles.
struct Copies {
    static constexpr int side_threads = SIDE_WARPS * WARP;
    static constexpr int row_rounds = SIDE_PIECES / side_threads, rows_a_round = side_threads / ROW_PIECES;
    static constexpr int tile_rounds = (SIDE_TILE_PIECES + side_threads - 1) / side_threads;
    const uint4* rows;
    const unsigned char* tiles;
    int row_offsets[row_rounds];  // in pieces, or -1
    int tile_offsets[tile_rounds + 1];  // in bytes, or -1
    int64 tile_stride;  // from stage to stage
    int thread;

    __device__ __forceinline__ Copies(const Layer& layer, int first_column, const half_bits* ready, int width,
                                      const int* members, int count, int side_thread) {
        thread = side_thread;
        rows = reinterpret_cast<const uint4*>(ready) + thread % ROW_PIECES;
#pragma unroll
        for (int i = 0; i < row_rounds; i++) {
            const int row = thread / ROW_PIECES + rows_a_round * i;
            row_offsets[i] = row < count ? members[row] * (width / 8) : -1;
        }
        const int bytes = tile_bytes(layer.format % 32), row_bytes = layer.outputs / TILE * bytes;
        const int pieces = BLOCK / TILE * bytes / 16;
        tiles = reinterpret_cast<const unsigned char*>(layer.weights) + first_column / TILE * bytes;
        tile_stride = static_cast<int64>(STAGE_TILES) * row_bytes;
#pragma unroll
        for (int i = 0; i < tile_rounds; i++) {
            const int piece = thread + side_threads * i, tile_row = piece / pieces;
            tile_offsets[i] = tile_row < STAGE_TILES ? tile_row * row_bytes + (piece - tile_row * pieces) * 16 : -1;
        }
    }
    __device__ __forceinline__ void copy_rows(int stage, uint4* to) const {
        const uint4* source = rows + stage * ROW_PIECES;
        // Rows a round apart have the same parity, so the same swizzle.
        const int row = thread / ROW_PIECES;
        uint4* target = to + row * ROW_PIECES + (thread % ROW_PIECES ^ (row & 1) << 2);
#pragma unroll
        for (int i = 0; i < row_rounds; i++)
            if (row_offsets[i] >= 0) copy_async_16(target + i * rows_a_round * ROW_PIECES, source + row_offsets[i]);
    }
    __device__ __forceinline__ void copy_tiles(int stage, uint4* to) const {
        const unsigned char* source = tiles + stage * tile_stride;
#pragma unroll
        for (int i = 0; i < tile_rounds; i++)
            if (tile_offsets[i] >= 0) copy_async_16(to + thread + side_threads * i, source + tile_offsets[i]);
    }
};

// One warp: 32 outputs of the tile's rows over one stage's 64 inputs.
template <typename F>
DEVICE void multiply_stage(const uint4* rows, const uint4* tiles, int side_warp, int count, int lane,
                           const LanePlace<F::twice>& place, Chains<4 * GROUPS>& left, Chains<4 * GROUPS>& right) {
    static_assert(WARP_TILES == 2, "a warp has two chains of each row");
    const int group = lane / 4, quad_lane = lane % 4;
    const unsigned* words = reinterpret_cast<const unsigned*>(tiles);
#pragma unroll
    for (int half_step = 0; half_step < STAGE_TILES / 2; half_step++) {
        unsigned weights[2][WARP_TILES][4];
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int i = 0; i < WARP_TILES; i++) {
                const int tile = (2 * half_step + step) * (BLOCK / TILE) + side_warp * WARP_TILES + i;
                decode_fragment<F::codebook, F::twice>(words + tile * tile_words(F::twice), place, weights[step][i]);
            }
        const int piece = (4 * half_step + quad_lane) ^ (group & 1) << 2;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            if (STEP_ROWS * g < count) {
                const uint4 inputs = rows[(STEP_ROWS * g + group) * ROW_PIECES + piece];
                const unsigned even[2] = {inputs.x, inputs.y}, odd[2] = {inputs.z, inputs.w};
                mma_16x8x16(left.sums + 4 * g, weights[0][0], even);
                mma_16x8x16(right.sums + 4 * g, weights[0][1], even);
                mma_16x8x16(left.sums + 4 * g, weights[1][0], odd);
                mma_16x8x16(right.sums + 4 * g, weights[1][1], odd);
            }
    }
}

// A warp's 16 columns of sums to shared memory, [row][column].
DEVICE void keep_sums(const Chains<4 * GROUPS>& chains, int column, int count, int lane, float* sums) {
    const int group = lane / 4, quad_lane = lane % 4;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        if (STEP_ROWS * g < count)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = STEP_ROWS * g + 2 * quad_lane + i % 2;
                sums[row * SUMS_STRIDE + column + group + 8 * (i / 2)] = chains.result(4 * g + i);
            }
}

constexpr int STAGES = 3;
constexpr int STAGE_PIECES = SIDES * (SIDE_PIECES + SIDE_TILE_PIECES);

// A side's sums of the tile's rows with 128 outputs of `layer` from first_column on -> sums [ROW_TILE][SUMS_STRIDE].
//
// `shared` has room for the stages, and for the sums of both sides afterwards. Sides have their own rows, or, if
// one_input, those of side 0. `has_columns`: whether the side has any outputs.
DEVICE void multiply_side(const Layer& layer, int first_column, bool has_columns, bool one_input,
                          const half_bits* ready, int width, const int* members, int count, uint4* shared) {
    const int thread = threadIdx.x % (SIDE_WARPS * WARP), side = threadIdx.x / (SIDE_WARPS * WARP);
    const int lane = threadIdx.x % WARP, side_warp = thread / WARP;
    const bool copies_rows = one_input ? side == 0 : has_columns;
    const int stages = layer.inputs / STAGE_INPUTS;
    const Copies copies(layer, first_column, ready, width, members, count, thread);
    uint4* own_rows = shared + (one_input ? 0 : side) * SIDE_PIECES;
    uint4* own_tiles = shared + SIDES * SIDE_PIECES + side * SIDE_TILE_PIECES;
    auto copy_stage = [&](int stage) {
        const int place = stage % STAGES * STAGE_PIECES;
        if (stage < stages) {
            if (copies_rows) copies.copy_rows(stage, own_rows + place);
            if (has_columns) copies.copy_tiles(stage, own_tiles + place);
        }
        copy_async_commit();
    };
    for (int stage = 0; stage < STAGES - 1; stage++) copy_stage(stage);
    Chains<4 * GROUPS> left, right;
    for (int stage = 0; stage < stages; stage++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        copy_stage(stage + STAGES - 1);
        if (!has_columns) continue;
        if (stage && stage % (BLOCK / STAGE_INPUTS) == 0) {
            left.close(stage / (BLOCK / STAGE_INPUTS), layer.inputs);
            right.close(stage / (BLOCK / STAGE_INPUTS), layer.inputs);
        }
        const int place = stage % STAGES * STAGE_PIECES;
        with_format(layer.format, [&](auto format) {
            using F = decltype(format);
            multiply_stage<F>(own_rows + place, own_tiles + place, side_warp, count, lane, LanePlace<F::twice>(lane),
                              left, right);
        });
    }
    copy_async_wait<0>();
    __syncthreads();
    if (!has_columns) return;
    float* sums = reinterpret_cast<float*>(shared) + side * ROW_TILE * SUMS_STRIDE;
    keep_sums(left, side_warp * WARP_TILES * TILE, count, lane, sums);
    keep_sums(right, side_warp * WARP_TILES * TILE + TILE, count, lane, sums);
}

// The same for a plain layer. inputs [pairs / pairs_a_row, width].
DEVICE void multiply_plain_side(const Layer& layer, int first_column, const float* inputs, int width, int real_width,
                                int pairs_a_row, const int* members, int count, float* sums) {
    const int thread = threadIdx.x % (SIDE_WARPS * WARP), column = first_column + thread;
    if (column >= layer.outputs) return;
    for (int row = 0; row < count; row++) {
        const float* source = inputs + static_cast<int64>(members[row] / pairs_a_row) * width;
        sums[row * SUMS_STRIDE + thread] = plain_chain(layer, source, real_width, column);
    }
}

// Both sides' sums, each trellis or plain, in shared memory. A trellis side and a plain one share the barriers.
DEVICE void multiply_sides(const Layer& layer, const Layer& other_layer, int first_column, bool has_columns,
                           bool one_input, const half_bits* ready, int width, const float* plain_inputs,
                           int plain_width, int real_width, int pairs_a_row, const int* members, int count,
                           uint4* shared) {
    const int side = threadIdx.x / (SIDE_WARPS * WARP);
    float* sums = reinterpret_cast<float*>(shared) + side * ROW_TILE * SUMS_STRIDE;
#if PLAIN_LAYERS
    const bool plain = layer.format == PLAIN;
    if (!plain || other_layer.format != PLAIN)
        multiply_side(plain ? other_layer : layer, first_column, has_columns && !plain, one_input, ready, width,
                      members, count, shared);
    if (plain && has_columns)
        multiply_plain_side(layer, first_column, plain_inputs, plain_width, real_width, pairs_a_row, members, count,
                            sums);
#else
    multiply_side(layer, first_column, has_columns, one_input, ready, width, members, count, shared);
#endif
    __syncthreads();
}

// A thread's row of each THREADS / OCTET rows: neighbouring octets read sums two rows apart, in other banks.
DEVICE int octet_row() {
    const int octet = threadIdx.x / OCTET;
    return octet & ~3 | (octet & 1) << 1 | octet >> 1 & 1;
}

// ready [2][pairs, width] of gate and up -> inputs of down [pairs, inner_width]: halves, or floats if plain.
// grid (blocks of 128 inner values, tiles), 256 threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_gate_up(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* ready, int64 ready_side, int width,
    const float* x, int hidden, int pairs_a_row, half_bits* halves, float* floats, int inner_width) {
    DYNAMIC_SHARED(uint4, shared);
    const RowTile tile = tiles[blockIdx.y];
    const int block = blockIdx.x, side = threadIdx.x / (SIDE_WARPS * WARP);
    if (tile.count == 0 || block * BLOCK >= layer_of(layers, tile.expert, DOWN).inputs) return;
    const int* list = members + tile.first;
    multiply_sides(layer_of(layers, tile.expert, GATE + side), layer_of(layers, tile.expert, UP - side), block * BLOCK,
                   true, false, ready + side * ready_side, width, x, hidden, hidden, pairs_a_row, list, tile.count,
                   shared);
    const float* sums = reinterpret_cast<const float*>(shared);
    for (int first = 0; first < tile.count; first += THREADS / OCTET) {
        const bool writes = first + octet_row() < tile.count;
        const int row = smaller(first + octet_row(), tile.count - 1);
        const float* gate_sums = sums + row * SUMS_STRIDE;
        const int64 place = static_cast<int64>(list[row]) * inner_width;
        write_hidden(layers, tile.expert, block, gate_sums, gate_sums + ROW_TILE * SUMS_STRIDE, threadIdx.x % OCTET,
                     writes, halves + place, floats + place);
    }
}

// Inputs of down [pairs, inner_width] -> weighted outputs, terms [pairs, width]. grid (256 outputs, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_down(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* halves, const float* floats,
    int inner_width, const float* weights, const float* gate_logits, float* terms, int width, int chosen) {
    DYNAMIC_SHARED(uint4, shared);
    const RowTile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const int block = SIDES * blockIdx.x + threadIdx.x / (SIDE_WARPS * WARP);
    const Layer& down = layer_of(layers, tile.expert, DOWN);
    const int* list = members + tile.first;
    multiply_sides(down, down, block * BLOCK, block * BLOCK < width, true, halves, inner_width, floats, inner_width,
                   inner_width, 1, list, tile.count, shared);
    const float* sums = reinterpret_cast<const float*>(shared);
    for (int first = 0; first < tile.count; first += THREADS / OCTET) {
        const bool is_row = first + octet_row() < tile.count;
        const int row = smaller(first + octet_row(), tile.count - 1);
        const int64 pair = list[row];
        const int x_row = pair / (chosen + 1), choice = pair % (chosen + 1);
        const float weight = choice == chosen ? sigmoid32(gate_logits[x_row]) : weights[x_row * chosen + choice];
        for (int side = 0; side < SIDES; side++) {
            const int out_block = SIDES * blockIdx.x + side;
            if (out_block * BLOCK >= width) break;
            write_terms(down, out_block, sums + (side * ROW_TILE + row) * SUMS_STRIDE, weight, threadIdx.x % OCTET,
                        is_row, terms + pair * width + out_block * BLOCK);
        }
    }
}
