// What the kernels of the experts share: the layers of all experts, tiles of rows, a layer's inputs and outputs.
//
// A *pair* is a row with one of its experts: pair row * (chosen + 1) + choice, the shared expert being the last choice.
// Macros of the products: THREE_INST_WIDTHS, MCG_WIDTHS, MUL1_WIDTHS: bit 2 b is set where a layer has b bits of that
// codebook; PLAIN_LAYERS, LONG_LAYERS: 1 where a layer is plain, or has inputs enough for k-shards.
#pragma once
#include "device.cuh"
#include "ops/linear/rotate.cuh"

#ifndef LONG_LAYERS
#define LONG_LAYERS 1
#endif

constexpr int BLOCK = ROTATION;
constexpr int EXPERT_SHARDS = 4;
constexpr int LONG_INPUTS = 4096, K_SHARDS = 4;
constexpr int GATE = 0, UP = 1, DOWN = 2, PROJECTIONS = 3;
constexpr int PLAIN = -1;

struct Layer {
    const unsigned* weights;  // tiles, or of a plain layer float32 [inputs, outputs]
    const half_bits* input_scales;
    const half_bits* output_scales;
    const float* bias;  // or null
    int format;  // PLAIN or format_number
    int inputs, outputs;  // as stored
    int real_outputs;
};

// Rows of one expert that are computed together: `count` entries of the list of pairs from `first` on.
struct alignas(16) RowTile { int expert, first, count, unused; };

DEVICE const Layer& layer_of(const Layer* layers, int expert, int projection) {
    return layers[expert * PROJECTIONS + projection];
}

DEVICE int expert_of_pair(const int* ids, int pair, int chosen, int experts) {
    const int row = pair / (chosen + 1), choice = pair % (chosen + 1);
    return choice == chosen ? experts : ids[row * chosen + choice];
}

// The first 128-block of k-shard `shard`, of `blocks` blocks.
DEVICE int shard_begin(int shard, int blocks) { return shard * blocks / K_SHARDS; }

// N chains over k: `close` between 128-blocks, where a k-shard may end; `result` after the last.
template <int N>
struct Chains {
    float sums[N];
#if LONG_LAYERS
    double totals[N];
    bool sharded;
#endif

    __device__ __forceinline__ Chains() {
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = 0.0f;
#if LONG_LAYERS
        sharded = false;
#endif
    }

    __device__ __forceinline__ void close(int next_block, int inputs) {
#if LONG_LAYERS
        const int blocks = (inputs + BLOCK - 1) / BLOCK;
        bool begins = false;
        for (int shard = 1; shard < K_SHARDS; shard++) begins |= next_block == shard_begin(shard, blocks);
        if (inputs < LONG_INPUTS || !begins) return;
#pragma unroll
        for (int i = 0; i < N; i++) {
            totals[i] = sharded ? totals[i] + sums[i] : static_cast<double>(sums[i]);
            sums[i] = 0.0f;
        }
        sharded = true;
#endif
    }

    __device__ __forceinline__ float result(int i) const {
#if LONG_LAYERS
        if (sharded) return static_cast<float>(totals[i] + sums[i]);
#endif
        return sums[i];
    }
};

// A row's chain with column `column` of a plain layer, over the row's first `width` values and zeros.
DEVICE float plain_chain(const Layer& layer, const float* row, int width, int column) {
    const float* weights = reinterpret_cast<const float*>(layer.weights) + column;
    Chains<1> chain;
    for (int first = 0; first < layer.inputs; first += BLOCK) {
        if (first) chain.close(first / BLOCK, layer.inputs);
        const int last = smaller(first + BLOCK, layer.inputs);
#pragma unroll 8
        for (int k = first; k < last; k++)
            chain.sums[0] = fma32(k < width ? row[k] : 0.0f, weights[static_cast<int64>(k) * layer.outputs],
                                  chain.sums[0]);
    }
    return chain.result(0);
}

DEVICE float4 load4(const float* pointer) { return *reinterpret_cast<const float4*>(pointer); }

// The input of a trellis layer from values 4 lane .. 4 lane + 3 of a block: scaled, rotated, rounded to half.
//
// A row's halves are kept in the order of the B operand: of 32 inputs, lane t of a quad has its two steps' four pairs
// in 16 bytes, so input 16 a + 8 b + 2 t + i is at 8 t + 4 a + 2 b + i.
DEVICE void write_input(const Layer& layer, int block, const float values[4], int lane, half_bits* row) {
    float v[4], scales[4];
    load_halves(layer.input_scales + block * BLOCK + 4 * lane, scales);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = values[i] * scales[i];
    rotate_128(v, lane);
    const unsigned first = pack_half2(half_of(v[0]), half_of(v[1])), second = pack_half2(half_of(v[2]), half_of(v[3]));
    // Lanes two apart have the two halves of a step: each takes one pair of lanes' 8 bytes.
    const bool upper = (lane & 2) != 0;
    const unsigned theirs = shuffle_xor(upper ? first : second, 2);
    const int quad_lane = 2 * (lane & 1) + upper, step = lane >> 2 & 1;
    half_bits* place = row + block * BLOCK + (lane >> 3) * 32 + 8 * quad_lane + 4 * step;
    *reinterpret_cast<uint2*>(place) = upper ? make_uint2(theirs, second) : make_uint2(first, theirs);
}

// Outputs 4 lane .. 4 lane + 3 of a block from its sums, in place; zero past the layer's real outputs.
DEVICE void finish_outputs(const Layer& layer, int block, float values[4], int lane) {
    const int column = block * BLOCK + 4 * lane;
    if (layer.format != PLAIN) {
        rotate_128(values, lane);
        float scales[4];
        load_halves(layer.output_scales + column, scales);
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = values[i] * scales[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool real = column + i < layer.real_outputs;
        if (real && layer.bias) values[i] = values[i] + layer.bias[column + i];
        if (!real) values[i] = 0.0f;
    }
}

// The hidden values of a pair's block from the sums of gate and up, as the down projection takes them.
DEVICE void write_hidden(const Layer* layers, int expert, int block, float gates[4], float ups[4], int lane,
                         half_bits* halves, float* floats) {
    finish_outputs(layer_of(layers, expert, GATE), block, gates, lane);
    finish_outputs(layer_of(layers, expert, UP), block, ups, lane);
    float hidden[4];
#pragma unroll
    for (int i = 0; i < 4; i++) hidden[i] = silu32(gates[i]) * ups[i];
    const Layer& down = layer_of(layers, expert, DOWN);
    if (down.format != PLAIN) write_input(down, block, hidden, lane, halves);
    else
        *reinterpret_cast<float4*>(floats + block * BLOCK + 4 * lane) =
            make_float4(hidden[0], hidden[1], hidden[2], hidden[3]);
}

// The float64 sum of a row's terms by ascending expert, in expert shards, the shared term last; rounded once.
struct ShardedSum {
    double total, shard_sum;
    int shard_size, shard_end;

    __device__ __forceinline__ explicit ShardedSum(int experts) {
        total = shard_sum = 0.0;
        shard_end = shard_size = (experts + EXPERT_SHARDS - 1) / EXPERT_SHARDS;
    }
    __device__ __forceinline__ void add(int expert, float term) {
        while (expert >= shard_end) {
            total = total + shard_sum;
            shard_sum = 0.0;
            shard_end += shard_size;
        }
        shard_sum = shard_sum + term;
    }
    __device__ __forceinline__ float with_shared(float term) const {
        return static_cast<float>(total + shard_sum + term);
    }
};
