// The products of many rows, tiles decoded inside; the bytes are those of few_products.cu.
//
// Macros: ROW_TILE, the most rows of one expert in a block, 64, 128 or, of warpgroups, 160; WARPGROUPS, 1 for the
// products of wgmma.cuh; COPIES_ONCE, 1 in a checking build. A *side* is the warps with 128 outputs of one layer.
#define NATURAL_ORDER 1
#include "ops/experts/formats.cuh"
#if WARPGROUPS
#include "ops/experts/wgmma.cuh"
#endif

#ifndef COPIES_ONCE
#define COPIES_ONCE 0
#endif

constexpr int BLOCK_TILES = BLOCK / TILE;  // side by side
constexpr int WARP_TILES = WARPGROUPS ? 1 : 2;  // a warp's, SIDE_WARPS apart
constexpr int SIDE_WARPS = BLOCK_TILES / WARP_TILES, SIDE_THREADS = SIDE_WARPS * WARP;
constexpr int GROUP_ROWS = 8;
constexpr int STAGE_INPUTS = 64, STAGE_STEPS = STAGE_INPUTS / TILE;
constexpr int ROW_PIECES = STAGE_INPUTS / 8;  // of 16 bytes, in a row of a stage
constexpr int SIDE_PIECES = ROW_TILE * ROW_PIECES;
constexpr int SUMS_STRIDE = BLOCK + 4;  // of floats: a quarter of a warp writes to different banks
constexpr int AHEAD = 2;  // stages on their way
constexpr int STAGES = AHEAD + 1 + WARPGROUPS;  // a product may still read the last but one

constexpr int SIDE_TILE_PIECES = STAGE_STEPS * BLOCK_TILES * most_twice();  // with the widest format that layers have

// The rows of a tile: halves [side_rows of every side, width], fewer than 4 GiB of them, where side_rows is 0 if all
// sides have the same; and, if a layer is plain, values [pairs / pairs_a_row, plain_width] of which `real` are no
// padding.
struct Rows {
    const int* members;
    int count;
    const half_bits* ready;
    int side_rows, width;
    const float* values;
    int plain_width, real, pairs_a_row;
};

// What a thread copies of each stage to shared memory: pieces of 16 bytes of its side's ROWS rows, swizzled, and of its
// side's tiles. Threads without a piece of their own copy another's, sooner than they would branch; in a checking build
// they copy none, since racecheck reports whatever is written twice.
template <typename F, int ROWS>
struct Copies {
    static constexpr int row_rounds = ROWS * ROW_PIECES / SIDE_THREADS, rows_a_round = SIDE_THREADS / ROW_PIECES;
    static constexpr int tile_pieces = STAGE_STEPS * BLOCK_TILES * tile_bytes(F::twice) / 16;
    static constexpr int tile_rounds = (tile_pieces + SIDE_THREADS - 1) / SIDE_THREADS;
    static_assert(ROWS % rows_a_round == 0 && rows_a_round % 8 == 0, "rounds of rows have one swizzle");
    const unsigned char* next_rows;  // the same for all threads
    const unsigned char* next_tiles;
    unsigned row_offsets[row_rounds], tile_offsets[tile_rounds];  // in bytes
    int64 tile_stride;  // from stage to stage
    int row_place, tile_places[tile_rounds];

    __device__ __forceinline__ Copies(const Layer& layer, int first_column, const Rows& rows) {
        const int side_thread = threadIdx.x % SIDE_THREADS, side = threadIdx.x / SIDE_THREADS;
        const int first = side_thread / ROW_PIECES, piece = side_thread % ROW_PIECES;
        next_rows = reinterpret_cast<const unsigned char*>(rows.ready);
        row_place = first * ROW_PIECES + (piece ^ first % 8);
#pragma unroll
        for (int i = 0; i < row_rounds; i++) {
            const int pair = rows.members[smaller(first + i * rows_a_round, rows.count - 1)];
            row_offsets[i] = (side * rows.side_rows + pair) * (2u * rows.width) + 16u * piece;
        }
        constexpr int bytes = tile_bytes(F::twice), row_pieces = BLOCK_TILES * bytes / 16;
        const int row_bytes = layer.outputs / TILE * bytes;
        next_tiles = reinterpret_cast<const unsigned char*>(layer.weights) + first_column / TILE * bytes;
        tile_stride = static_cast<int64>(STAGE_STEPS) * row_bytes;
#pragma unroll
        for (int i = 0; i < tile_rounds; i++) {
            tile_places[i] = smaller(side_thread + SIDE_THREADS * i, tile_pieces - 1);
            tile_offsets[i] = tile_places[i] / row_pieces * row_bytes + tile_places[i] % row_pieces * 16;
        }
    }
    // Begin to copy the next stage.
    __device__ __forceinline__ void copy(uint4* rows, uint4* tiles) {
#pragma unroll
        for (int i = 0; i < row_rounds; i++)
            copy_async_16(rows + row_place + i * SIDE_THREADS, next_rows + row_offsets[i]);
#pragma unroll
        for (int i = 0; i < tile_rounds; i++)
            if (!COPIES_ONCE || threadIdx.x % SIDE_THREADS + SIDE_THREADS * i < tile_pieces)
                copy_async_16(tiles + tile_places[i], next_tiles + tile_offsets[i]);
        next_rows += 2 * STAGE_INPUTS;
        next_tiles += tile_stride;
    }
};

// A warp's sums of each of its tiles with up to ROWS rows.
template <int ROWS>
struct WarpSums {
    Chains<4 * ROWS / GROUP_ROWS> tiles[WARP_TILES];
};

// The words of a warp's tile of a step.
template <typename F>
DEVICE const unsigned* stage_tile(const uint4* tiles, int step, int warp_tile, int side_warp) {
    const int tile = step * BLOCK_TILES + warp_tile * SIDE_WARPS + side_warp;
    return reinterpret_cast<const unsigned*>(tiles) + tile * tile_words(F::twice);
}

#if WARPGROUPS
// What a lane reads of a tile: no product may come between loads for the compiler to put them beside each other.
template <typename F>
struct TileWords {
    unsigned first, second, third;

    __device__ __forceinline__ void load(const unsigned* tile, const LanePlace<F::twice>& place) {
        first = tile[place.first], second = tile[place.second];
        third = Window<F::twice>::by_ends ? 0u : tile[place.third];
    }
    __device__ __forceinline__ Window<F::twice> window(const LanePlace<F::twice>& place) const {
        return Window<F::twice>(first, second, third, place.shift);
    }
};

// One stage's 64 inputs. The last step is still on its way afterwards.
template <typename F, int ROWS>
DEVICE void multiply_stage(const uint4* rows, const uint4* tiles, int side_warp, int count,
                           const LanePlace<F::twice>& place, WarpSums<ROWS>& sums) {
    const uint64 operand = wgmma_descriptor(rows);
    unsigned weights[2][4];
    TileWords<F> words[STAGE_STEPS];
#pragma unroll
    for (int step = 0; step < STAGE_STEPS; step++) words[step].load(stage_tile<F>(tiles, step, 0, side_warp), place);
#pragma unroll
    for (int step = 0; step < STAGE_STEPS; step++) {
        unsigned* own = weights[step % 2];
        decode_window<F::codebook>(words[step].window(place), own);
        wgmma_fence();
        wgmma<ROWS>(sums.tiles[0].sums, own, operand + step * (2 * TILE >> 4));
        wgmma_commit();
        wgmma_wait<1>();
    }
}

DEVICE void end_products() { wgmma_wait<0>(); }
DEVICE void publish_copies() { wgmma_publish(); }
// Between stages the sides of a block need not wait for each other.
DEVICE void synchronise_side(int side) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + side), "n"(SIDE_THREADS) : "memory");
}
#else
// One stage's 64 inputs.
template <typename F, int ROWS>
DEVICE void multiply_stage(const uint4* rows, const uint4* tiles, int side_warp, int count,
                           const LanePlace<F::twice>& place, WarpSums<ROWS>& sums) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int first = 0; first < STAGE_STEPS; first += 2) {
        unsigned weights[2][WARP_TILES][4];
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int i = 0; i < WARP_TILES; i++)
                decode_fragment<F::codebook, F::twice>(stage_tile<F>(tiles, first + step, i, side_warp), place,
                                                       weights[step][i]);
        const uint4* row = rows + lane % 8 * ROW_PIECES + ((2 * first + lane / 8) ^ lane % 8);
#pragma unroll
        for (int g = 0; g < ROWS / GROUP_ROWS; g++)
            if (GROUP_ROWS * g < count) {
                unsigned inputs[4];
                load_matrix_x4(inputs, row + g * GROUP_ROWS * ROW_PIECES);
#pragma unroll
                for (int step = 0; step < 2; step++)
#pragma unroll
                    for (int i = 0; i < WARP_TILES; i++)
                        mma_16x8x16(sums.tiles[i].sums + 4 * g, weights[step][i], inputs + 2 * step);
            }
    }
}

DEVICE void end_products() {}
DEVICE void publish_copies() {}
DEVICE void synchronise_side(int) { __syncthreads(); }
#endif

// A warp's 16 columns of sums to shared memory, [row][column].
template <int GROUPS>
DEVICE void keep_sums(const Chains<4 * GROUPS>& chains, int column, int count, float* sums) {
    const int group = threadIdx.x % WARP / 4, quad_lane = threadIdx.x % 4;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        if (GROUP_ROWS * g < count)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = GROUP_ROWS * g + 2 * quad_lane + i % 2;
                sums[row * SUMS_STRIDE + column + group + 8 * (i / 2)] = chains.result(4 * g + i);
            }
}

// The sums of the rows with a side's 128 outputs of `layer` from first_column on -> float [ROW_TILE][SUMS_STRIDE].
//
// `shared` has room for the stages of all SIDES, and for their sums afterwards. A side that computes nothing here
// (`multiplies` false) keeps the barriers.
template <typename F, int ROWS, int SIDES>
DEVICE void multiply_columns(const Layer& layer, int first_column, bool multiplies, const Rows& rows, uint4* shared) {
    const int side = threadIdx.x / SIDE_THREADS, side_warp = threadIdx.x % SIDE_THREADS / WARP;
    const int stages = layer.inputs / STAGE_INPUTS;
    uint4* stage_rows = shared + side * SIDE_PIECES;
    uint4* stage_tiles = shared + STAGES * SIDES * SIDE_PIECES + side * SIDE_TILE_PIECES;
    Copies<F, ROWS> copies(layer, first_column, rows);
    int slot = 0, copy_slot = 0;
    auto copy_stage = [&](int stage) {
        if (stage < stages)
            copies.copy(stage_rows + copy_slot * SIDES * SIDE_PIECES,
                        stage_tiles + copy_slot * SIDES * SIDE_TILE_PIECES);
        copy_async_commit();
        copy_slot = copy_slot + 1 == STAGES ? 0 : copy_slot + 1;
    };
    for (int stage = 0; stage < AHEAD; stage++) copy_stage(stage);
    const LanePlace<F::twice> place(threadIdx.x % WARP);
    WarpSums<ROWS> warp_sums;
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        copy_async_wait<AHEAD - 1>();
        publish_copies();
        synchronise_side(side);
        copy_stage(stage + AHEAD);
        if (multiplies) {
#if LONG_LAYERS
            if (stage && stage % (BLOCK / STAGE_INPUTS) == 0) {
                end_products();
                for (int i = 0; i < WARP_TILES; i++)
                    warp_sums.tiles[i].close(stage / (BLOCK / STAGE_INPUTS), layer.inputs);
            }
#endif
            multiply_stage<F, ROWS>(stage_rows + slot * SIDES * SIDE_PIECES,
                                    stage_tiles + slot * SIDES * SIDE_TILE_PIECES, side_warp, rows.count, place,
                                    warp_sums);
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    end_products();
    __syncthreads();
    if (!multiplies) return;
    float* sums = reinterpret_cast<float*>(shared) + side * ROW_TILE * SUMS_STRIDE;
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++)
        keep_sums<ROWS / GROUP_ROWS>(warp_sums.tiles[i], (i * SIDE_WARPS + side_warp) * TILE, rows.count, sums);
}

// With code for the layer's format and for about the tile's number of rows.
template <int SIDES>
DEVICE void multiply_trellis(const Layer& layer, int first_column, bool multiplies, const Rows& rows, uint4* shared) {
    with_format(layer.format, [&](auto format) {
        using F = decltype(format);
        if (rows.count <= 32) multiply_columns<F, 32, SIDES>(layer, first_column, multiplies, rows, shared);
#if WARPGROUPS
        else if (rows.count <= 64) multiply_columns<F, 64, SIDES>(layer, first_column, multiplies, rows, shared);
        else if (rows.count <= 96) multiply_columns<F, 96, SIDES>(layer, first_column, multiplies, rows, shared);
        else if (rows.count <= 128) multiply_columns<F, 128, SIDES>(layer, first_column, multiplies, rows, shared);
#endif
        else multiply_columns<F, ROW_TILE, SIDES>(layer, first_column, multiplies, rows, shared);
    });
}

// The same for a plain layer.
DEVICE void multiply_plain(const Layer& layer, int first_column, const Rows& rows, float* sums) {
    const int thread = threadIdx.x % SIDE_THREADS, own = thread % BLOCK, column = first_column + own;
    if (column >= layer.outputs) return;
    for (int row = thread / BLOCK; row < rows.count; row += SIDE_THREADS / BLOCK) {
        const float* values = rows.values + static_cast<int64>(rows.members[row] / rows.pairs_a_row) * rows.plain_width;
        sums[row * SUMS_STRIDE + own] = plain_chain(layer, values, rows.real, column);
    }
}

// All sides' sums, each trellis or plain, in shared memory. A trellis side and a plain one keep the same barriers.
template <int SIDES>
DEVICE void multiply_sides(const Layer& layer, const Layer& other_layer, int first_column, const Rows& rows,
                           uint4* shared) {
#if PLAIN_LAYERS
    const bool plain = layer.format == PLAIN;
    if (!plain || other_layer.format != PLAIN)
        multiply_trellis<SIDES>(plain ? other_layer : layer, first_column, !plain, rows, shared);
    if (plain)
        multiply_plain(layer, first_column, rows,
                       reinterpret_cast<float*>(shared) + threadIdx.x / SIDE_THREADS * ROW_TILE * SUMS_STRIDE);
#else
    multiply_trellis<SIDES>(layer, first_column, true, rows, shared);
#endif
    __syncthreads();
}

// Dynamic shared memory, where warpgroups need it from a multiple of 1024 bytes on.
#if WARPGROUPS
extern __shared__ __align__(1024) uint4 stages_and_sums[];
#define STAGES_AND_SUMS(name) uint4* name = stages_and_sums
#else
#define STAGES_AND_SUMS(name) DYNAMIC_SHARED(uint4, name)
#endif

// An octet's row of its warp's four: neighbouring octets read sums two rows apart, in other banks.
DEVICE int octet_row() {
    const int octet = threadIdx.x / OCTET;
    return (octet & 1) << 1 | octet >> 1 & 1;
}

DEVICE bool is_trellis(const Layer& layer) { return !PLAIN_LAYERS || layer.format != PLAIN; }

// A layer's block of 128 outputs, as an octet's lane finishes it.
struct OutputBlock {
    OctetScales scales;
    const float* bias;
    bool rotates;
    int first_column, real_outputs;

    __device__ __forceinline__ OutputBlock(const Layer& layer, int block, int j)
        : scales(layer.output_scales, block, j), bias(layer.bias), rotates(is_trellis(layer)),
          first_column(block * BLOCK), real_outputs(layer.real_outputs) {}

    // The outputs from their sums, in place; zeros past the layer's real outputs.
    __device__ __forceinline__ void finish(float (&v)[OCTET_VALUES], int j) const {
        if (rotates) {
            octet::rotate<NATURAL_ORDER>(v, j);
            scales.apply(v);
        }
        if (!bias && first_column + BLOCK <= real_outputs) return;
#pragma unroll
        for (int i = 0; i < OCTET_VALUES; i++) {
            const int column = first_column + octet_place(j) + octet_offset(i / 2) + i % 2;
            const bool real = column < real_outputs;
            if (real && bias) v[i] = v[i] + bias[column];
            if (!real) v[i] = 0.0f;
        }
    }
};

// ready [2][pairs, width] of gate and up -> inputs of down [pairs, inner_width]: halves, or floats if plain.
// grid (blocks of 128 inner values, tiles), two sides. x [rows, hidden] is read by plain layers.
extern "C" __global__ void __launch_bounds__(2 * SIDE_THREADS, 1) multiply_gate_up(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* ready, int pairs, int width,
    const float* x, int hidden, int pairs_a_row, half_bits* halves, float* floats, int inner_width) {
    STAGES_AND_SUMS(shared);
    __shared__ int pair_of[ROW_TILE];
    const RowTile tile = tiles[blockIdx.y];
    const int block = blockIdx.x, side = threadIdx.x / SIDE_THREADS, j = threadIdx.x % OCTET;
    const Layer &gate = layer_of(layers, tile.expert, GATE), &up = layer_of(layers, tile.expert, UP);
    if (tile.count == 0 || block * BLOCK >= whole_blocks(gate.outputs)) return;
    const int* list = members + tile.first;
    if (threadIdx.x < tile.count) pair_of[threadIdx.x] = list[threadIdx.x];
    const Rows rows = {list, tile.count, ready, pairs, width, x, hidden, hidden, pairs_a_row};
    multiply_sides<2>(side ? up : gate, side ? gate : up, block * BLOCK, rows, shared);
    const float* sums = reinterpret_cast<const float*>(shared);
    const Layer& down = layer_of(layers, tile.expert, DOWN);
    const bool rounds = is_trellis(down);
    const OutputBlock gates(gate, block, j), ups(up, block, j);
    const OctetScales scales(down.input_scales, block, j);
    for (int first = threadIdx.x / WARP * OCTETS; first < tile.count; first += 2 * SIDE_THREADS / OCTET) {
        const int own = first + octet_row(), row = smaller(own, tile.count - 1);
        float hidden_values[OCTET_VALUES], up_values[OCTET_VALUES];
        load_octet(sums + row * SUMS_STRIDE, j, hidden_values);
        load_octet(sums + (ROW_TILE + row) * SUMS_STRIDE, j, up_values);
        gates.finish(hidden_values, j);
        ups.finish(up_values, j);
#pragma unroll
        for (int i = 0; i < OCTET_VALUES; i++) hidden_values[i] = silu32(hidden_values[i]) * up_values[i];
        const int64 place = static_cast<int64>(pair_of[row]) * inner_width;
        if (rounds) write_input(scales, block, hidden_values, j, own < tile.count, halves + place);
        else if (own < tile.count) store_octet(hidden_values, j, floats + place + block * BLOCK);
    }
}

// Inputs of down [pairs, inner_width] -> weighted outputs, terms [pairs, width]. grid (blocks of 128 outputs, tiles),
// one side, so that a processor has two blocks, of up to 7 bits: one multiplies while the other begins or ends.
extern "C" __global__ void __launch_bounds__(SIDE_THREADS, 2) multiply_down(
    const Layer* layers, const RowTile* tiles, const int* members, const half_bits* halves, const float* floats,
    int inner_width, const float* weights, const float* gate_logits, float* terms, int width, int chosen) {
    STAGES_AND_SUMS(shared);
    __shared__ int pair_of[ROW_TILE];
    __shared__ float weight_of[ROW_TILE];
    const RowTile tile = tiles[blockIdx.y];
    if (tile.count == 0) return;
    const int block = blockIdx.x, j = threadIdx.x % OCTET;
    const Layer& down = layer_of(layers, tile.expert, DOWN);
    const int* list = members + tile.first;
    for (int row = threadIdx.x; row < tile.count; row += SIDE_THREADS) {
        const int pair = list[row], x_row = pair / (chosen + 1), choice = pair % (chosen + 1);
        pair_of[row] = pair;
        weight_of[row] = choice == chosen ? sigmoid32(gate_logits[x_row]) : weights[x_row * chosen + choice];
    }
    const Rows rows = {list, tile.count, halves, 0, inner_width, floats, inner_width, inner_width, 1};
    multiply_sides<1>(down, down, block * BLOCK, rows, shared);
    const float* sums = reinterpret_cast<const float*>(shared);
    const OutputBlock outputs(down, block, j);
    for (int first = threadIdx.x / WARP * OCTETS; first < tile.count; first += SIDE_THREADS / OCTET) {
        const int own = first + octet_row(), row = smaller(own, tile.count - 1);
        float v[OCTET_VALUES];
        load_octet(sums + row * SUMS_STRIDE, j, v);
        outputs.finish(v, j);
#pragma unroll
        for (int i = 0; i < OCTET_VALUES; i++) v[i] = weight_of[row] * v[i];
        if (own < tile.count) store_octet(v, j, terms + static_cast<int64>(pair_of[row]) * width + block * BLOCK);
    }
}
