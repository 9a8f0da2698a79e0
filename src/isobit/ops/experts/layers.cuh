// What the kernels of the experts share: the layers of all experts, tiles of rows, a layer's inputs and outputs.
//
// A *pair* is a row with one of its experts: pair row * (chosen + 1) + choice, the shared expert being the last choice.
// Macros of the products: THREE_INST_WIDTHS, MCG_WIDTHS, MUL1_WIDTHS: bit 2 b is set where a layer has b bits of that
// codebook; PLAIN_LAYERS, LONG_LAYERS: 1 where a layer is plain, or has inputs enough for k-shards. NATURAL_ORDER: 1 in
// sources whose products read rows of halves in ascending order.
#pragma once
#include "device.cuh"
#include "ops/linear/rotate_octet.cuh"

#ifndef LONG_LAYERS
#define LONG_LAYERS 1
#endif
#ifndef NATURAL_ORDER
#define NATURAL_ORDER 0
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

// Rows of one expert that are computed together: `count` entries of the list of pairs from `first` on. part: of a few
// rows, number of the expert's tile, below MOST_PARTS.
struct alignas(16) RowTile { int expert, first, count, part; };
constexpr int TILE_ROWS = 8, MOST_PARTS = 8;  // of a few rows

DEVICE const Layer& layer_of(const Layer* layers, int expert, int projection) {
    return layers[expert * PROJECTIONS + projection];
}

DEVICE int expert_of_pair(const int* ids, int pair, int chosen, int experts) {
    const int row = pair / (chosen + 1), choice = pair % (chosen + 1);
    return choice == chosen ? experts : ids[row * chosen + choice];
}

DEVICE int whole_blocks(int count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

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

    // Go on at a 128-block with sums and totals of another's chains.
    __device__ __forceinline__ void resume(int block, int inputs) {
#if LONG_LAYERS
        sharded = inputs >= LONG_INPUTS && block > shard_begin(1, (inputs + BLOCK - 1) / BLOCK);
#endif
        close(block, inputs);
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

// Eight lanes, an octet, have a block of 128 values: value 2 p + i of lane j is number octet_place(j) +
// octet_offset(p) + i. In natural order a lane's values come by fours; otherwise they are, of every 32 inputs, what
// lane j % 4 of a quad takes for two steps of the B operand.
constexpr int OCTET = 8, OCTET_VALUES = BLOCK / OCTET, OCTETS = WARP / OCTET;

DEVICE int octet_place(int j) { return NATURAL_ORDER ? 4 * j : 16 * (j / 4) + 2 * (j % 4); }
DEVICE int octet_offset(int pair) { return 32 * (pair / 2) + (NATURAL_ORDER ? 2 : 8) * (pair % 2); }

DEVICE void load_octet(const float* block, int j, float v[OCTET_VALUES]) {
#if NATURAL_ORDER
#pragma unroll
    for (int m = 0; m < OCTET_VALUES / 4; m++) {
        const float4 four = *reinterpret_cast<const float4*>(block + 4 * j + 32 * m);
        v[4 * m] = four.x, v[4 * m + 1] = four.y, v[4 * m + 2] = four.z, v[4 * m + 3] = four.w;
    }
    return;
#endif
#pragma unroll
    for (int pair = 0; pair < OCTET_VALUES / 2; pair++) {
        const float2 two = *reinterpret_cast<const float2*>(block + octet_place(j) + octet_offset(pair));
        v[2 * pair] = two.x;
        v[2 * pair + 1] = two.y;
    }
}

DEVICE void store_octet(const float v[OCTET_VALUES], int j, float* block) {
#if NATURAL_ORDER
#pragma unroll
    for (int m = 0; m < OCTET_VALUES / 4; m++)
        *reinterpret_cast<float4*>(block + 4 * j + 32 * m) =
            make_float4(v[4 * m], v[4 * m + 1], v[4 * m + 2], v[4 * m + 3]);
    return;
#endif
#pragma unroll
    for (int pair = 0; pair < OCTET_VALUES / 2; pair++)
        *reinterpret_cast<float2*>(block + octet_place(j) + octet_offset(pair)) =
            make_float2(v[2 * pair], v[2 * pair + 1]);
}

// A row's values of the block that begins at `first`, zeros from `width` on.
DEVICE void load_octet_of_row(const float* row, int first, int width, int j, float v[OCTET_VALUES]) {
    if (width % 4 == 0 && first + BLOCK <= width) {
        load_octet(row + first, j, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < OCTET_VALUES; i++) {
        const int k = first + octet_place(j) + octet_offset(i / 2) + i % 2;
        v[i] = k < width ? row[k] : 0.0f;
    }
}

// A lane's scales of a block, as pairs of halves; of plain layers, which have none, zeros.
struct OctetScales {
    unsigned pairs[OCTET_VALUES / 2];

    __device__ __forceinline__ OctetScales(const half_bits* scales, int block, int j) {
        if (!scales) {
#pragma unroll
            for (int pair = 0; pair < OCTET_VALUES / 2; pair++) pairs[pair] = 0u;
            return;
        }
        scales += block * BLOCK + octet_place(j);
#if NATURAL_ORDER
#pragma unroll
        for (int m = 0; m < OCTET_VALUES / 4; m++) {
            const uint2 four = *reinterpret_cast<const uint2*>(scales + 32 * m);
            pairs[2 * m] = four.x, pairs[2 * m + 1] = four.y;
        }
#else
#pragma unroll
        for (int pair = 0; pair < OCTET_VALUES / 2; pair++)
            pairs[pair] = *reinterpret_cast<const unsigned*>(scales + octet_offset(pair));
#endif
    }

    __device__ __forceinline__ void apply(float v[OCTET_VALUES]) const {
#pragma unroll
        for (int pair = 0; pair < OCTET_VALUES / 2; pair++) {
            v[2 * pair] = v[2 * pair] * float_of_half(static_cast<half_bits>(pairs[pair] & 0xFFFFu));
            v[2 * pair + 1] = v[2 * pair + 1] * float_of_half(static_cast<half_bits>(pairs[pair] >> 16));
        }
    }
};

// The input of a trellis layer from a block of values, which are changed: scaled, rotated, rounded to half.
//
// Unless in natural order, a row's halves are kept as in the B operand: of 32 inputs, lane t of a quad has its two
// steps' four pairs in 16 bytes, so input 16 a + 8 b + 2 t + i is at 8 t + 4 a + 2 b + i.
DEVICE void write_input(const OctetScales& scales, int block, float (&v)[OCTET_VALUES], int j, bool writes,
                        half_bits* row) {
    scales.apply(v);
    octet::rotate<NATURAL_ORDER>(v, j);
    if (!writes) return;
    half_bits* place = row + block * BLOCK + (NATURAL_ORDER ? 4 * j : 8 * (j % 4) + 4 * (j / 4));
#pragma unroll
    for (int m = 0; m < OCTET_VALUES / 4; m++)
        *reinterpret_cast<uint2*>(place + 32 * m) = make_uint2(half_pair_of(v[4 * m], v[4 * m + 1]),
                                                               half_pair_of(v[4 * m + 2], v[4 * m + 3]));
}

// By a whole warp: count an arrival of each lane that arrives at its counter. Those that are the last of `expected`,
// after which their counters are 0 again; what the warps wrote before their arrivals is then to be seen.
DEVICE unsigned last_arrivals(bool arrives, int* counter, int expected) {
    __syncwarp();
    bool last = false;
    if (arrives) {
#ifdef EMULATED
        const int before = (*counter)++;
#else
        int before;
        asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
#endif
        last = before + 1 == expected;
        if (last) *counter = 0;
    }
    const unsigned lasts = ballot(last);
#ifndef EMULATED
    if (lasts) asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
    __syncwarp();
    return lasts;
}

// The float64 sums of N columns of a row's terms by ascending expert, in expert shards, the shared term last; rounded
// once.
template <int N>
struct ShardedSums {
    double totals[N], shard_sums[N];
    int shard_size, shard_end;

    __device__ __forceinline__ explicit ShardedSums(int experts) {
#pragma unroll
        for (int i = 0; i < N; i++) totals[i] = shard_sums[i] = 0.0;
        shard_end = shard_size = (experts + EXPERT_SHARDS - 1) / EXPERT_SHARDS;
    }
    __device__ __forceinline__ void add(int expert, const float terms[N]) {
        while (expert >= shard_end) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                totals[i] = totals[i] + shard_sums[i];
                shard_sums[i] = 0.0;
            }
            shard_end += shard_size;
        }
#pragma unroll
        for (int i = 0; i < N; i++) shard_sums[i] = shard_sums[i] + terms[i];
    }
    __device__ __forceinline__ float with_shared(int i, float term) const {
        return static_cast<float>(totals[i] + shard_sums[i] + term);
    }
};

DEVICE void load_four(const float* block, int lane, float v[4]) {
    const float4 four = *reinterpret_cast<const float4*>(block + 4 * lane);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

DEVICE void store_four(const float v[4], int lane, float* block) {
    *reinterpret_cast<float4*>(block + 4 * lane) = make_float4(v[0], v[1], v[2], v[3]);
}

// Four neighbouring outputs of a row of y from `column` on, as far as it has them.
DEVICE void store_outputs(const float v[4], float* row, int column, int hidden) {
    if (hidden % 4 == 0) {
        if (column < hidden) store_four(v, 0, row + column);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i < hidden) row[column + i] = v[i];
}
