// A plain layer for up to 64 rows, of one shard for some more, or several small ones of the same inputs: the chains of
// 16 outputs over one k-shard are carried by one warp for each of up to 16 columns of the operand, and fed by other
// warps, each with its own chunk of the inputs.
//
// Weights lie as the A operand's registers, uint4 [N / 16, K / 16, 32 lanes]; rows are the B operand, rounded to half
// on their way. With two parts every row is two columns of it: x rounded, and what that leaves rounded.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"
#include "ops/linear/plain_chain.cuh"

constexpr int ROWS_AT_ONCE = CHUNK_QUADS < WARP ? WARP / CHUNK_QUADS : 1;  // that a warp reads side by side
constexpr int READ_AHEAD = 8 / ROW_QUADS;  // of these, on their way

// Fill a chunk with the rows' inputs to `count` tiles, by one warp; then its weights are there too.
DEVICE void feed_inputs(const Chunk& chunk, const float* x, int count, int rows, int inputs, int lane) {
    const int own_row = lane / CHUNK_QUADS, own_quad = lane % CHUNK_QUADS;
#pragma unroll 1
    for (int first = 0; first < rows; first += READ_AHEAD * ROWS_AT_ONCE) {
        float4 quads[READ_AHEAD][ROW_QUADS];
#pragma unroll
        for (int i = 0; i < READ_AHEAD; i++) {
            const int row = first + i * ROWS_AT_ONCE + own_row;
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++) {
                const int quad = own_quad + j * WARP;
                quads[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (row < rows && quad < 4 * count)
                    quads[i][j] = *reinterpret_cast<const float4*>(x + static_cast<int64>(row) * inputs + 4 * quad);
            }
        }
#pragma unroll
        for (int i = 0; i < READ_AHEAD; i++) {
            const int row = first + i * ROWS_AT_ONCE + own_row;
            if (row >= rows) break;
#pragma unroll
            for (int j = 0; j < ROW_QUADS; j++) store_quad(chunk, row, own_quad + j * WARP, quads[i][j]);
        }
    }
    copy_async_wait<0>();
}

constexpr int MOST_LAYERS = 4;

// One layer of a launch. weights: uint4 [N / 16, K / 16, 32 lanes]. first_column: of 16 outputs, of the launch's, which
// are its layers' in turn.
struct Layer {
    const uint4* weights;
    const float* bias;
    float* y;
    int64 outputs, first_column;
};

struct Layers {
    Layer at[MOST_LAYERS];
};

DEVICE Layer layer_of_column(const Layers& layers, int column) {
    Layer own = layers.at[0];
#pragma unroll
    for (int i = 1; i < MOST_LAYERS; i++)
        if (column >= static_cast<int>(layers.at[i].first_column)) own = layers.at[i];
    return own;
}

// Write what a lane's chains end as: sums of a shard to values [shards * PARTS, rows, N], or, without these, outputs of
// the layer's column.
DEVICE void store_chains(const Chains& chains, int warp, int lane, float* values, int first_row, int own_rows, int rows,
                         int column, const Finish& finish) {
    if (values) return store_sums(chains, warp, lane, values, blockIdx.y, first_row, own_rows, rows);
    for_each_chain(warp, lane, own_rows, [&](int row, int part, int own_output, int tile, int index) {
        const int output = column * SIDE + own_output;
        if (part || output >= finish.outputs) return;
        float total = chains.c[tile][index];
        if (PARTS == 2)
            total = static_cast<float>(static_cast<double>(total) + static_cast<double>(chains.c[tile][index | 1]));
        if (finish.bias) total = total + finish.bias[output];
        finish.y[static_cast<int64>(first_row + row) * finish.outputs + output] = total;
    });
}

// The rows' outputs from their terms' sums, in the block that comes last.
DEVICE void finish_column(const Sums& sums, const Finish& finish, int column, int first_row, int rows) {
    for (int i = threadIdx.x; i < rows * SIDE; i += blockDim.x) {
        const int row = first_row + i / SIDE, output = column * SIDE + i % SIDE;
        if (output >= finish.outputs) continue;
        float total = total_of(sums, row, output);
        if (finish.bias) total = total + finish.bias[output];
        finish.y[static_cast<int64>(row) * finish.outputs + output] = total;
    }
}

// grid (all layers' N / 16, shards, ceil(rows / block_rows)), threads 32 * (CHAIN_WARPS + feeders). x: float [rows, 16
// * tiles], rows at 16 bytes. values: float [shards * PARTS, rows, N] of a single layer, null where one shard's sums
// become y at once. counters: zeros, one for each (grid z, column); null where values are all that is wanted.
extern "C" __global__ void __launch_bounds__((MOST_FEEDERS + CHAIN_WARPS) * WARP, 1)
few_rows_plain(const __grid_constant__ Layers layers, const float* x, float* values, int* counters, int tiles, int rows,
               int block_rows) {
    DYNAMIC_SHARED(uint4, shared);
    begin_turns();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, feeders = blockDim.x / WARP - CHAIN_WARPS;
    const int shard = blockIdx.y, shards = gridDim.y, inputs = tiles * SIDE;
    const int first_row = blockIdx.z * block_rows, own_rows = smaller(block_rows, rows - first_row);
    const int first_tile = shard_tile(shard, shards, tiles), last_tile = shard_tile(shard + 1, shards, tiles);
    const Layer layer = layer_of_column(layers, blockIdx.x);
    const int column = blockIdx.x - static_cast<int>(layer.first_column), columns = gridDim.x;
    const uint4* weights = layer.weights + static_cast<int64>(column) * tiles * WARP;
    x += static_cast<int64>(first_row) * inputs;

    const bool carries = warp < CHAIN_WARPS;
    const int feeder = warp - CHAIN_WARPS;
    const Chunks chunks = {shared, feeders, own_rows * PARTS};
    int tile = first_tile + feeder * CHUNK_TILES;  // a feeder's
    if (!carries && tile < last_tile)
        feed_weights(chunks.at(feeder), weights + static_cast<int64>(tile) * WARP,
                     smaller(CHUNK_TILES, last_tile - tile), lane);
    await_inputs();
    Chains chains(warp, lane, chunks.places);
    int lap = 1;
    for (int first = first_tile; first < last_tile; first += feeders * CHUNK_TILES, lap++) {
        if (lap > 1) __syncthreads();
        if (carries) {
            carry_left(chains, chunks, last_tile - first, lap, lane);
        } else if (tile < last_tile) {
            const Chunk chunk = chunks.at(feeder);
            const int count = smaller(CHUNK_TILES, last_tile - tile);
            if (lap > 1) feed_weights(chunk, weights + static_cast<int64>(tile) * WARP, count, lane);
            feed_inputs(chunk, x + tile * SIDE, count, own_rows, inputs, lane);
            hand_over(1 + feeder, CHUNK_THREADS);
            tile += feeders * CHUNK_TILES;
        }
    }

    const Finish finish = {nullptr, layer.bias, layer.y, static_cast<int>(layer.outputs)};
    if (carries) store_chains(chains, warp, lane, values, first_row, own_rows, rows, column, finish);
    if (!values || !counters || !arrives_last(counters + blockIdx.z * columns + column, 1, shards)) return;
    finish_column({values, shards * PARTS, rows, columns * SIDE}, finish, column, first_row, own_rows);
}
