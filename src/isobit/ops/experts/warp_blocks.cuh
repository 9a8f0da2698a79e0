// What a warp does with a block of 128 values, four neighbours a lane: with few blocks, sooner than octets do.
#pragma once
#include "ops/experts/layers.cuh"
#include "ops/linear/rotate.cuh"

struct FourScales {
    float values[4];

    __device__ __forceinline__ explicit FourScales(const uint2& halves) {
        values[0] = float_of_half(static_cast<half_bits>(halves.x & 0xFFFFu));
        values[1] = float_of_half(static_cast<half_bits>(halves.x >> 16));
        values[2] = float_of_half(static_cast<half_bits>(halves.y & 0xFFFFu));
        values[3] = float_of_half(static_cast<half_bits>(halves.y >> 16));
    }
    __device__ __forceinline__ FourScales(const half_bits* scales, int block, int lane)
        : FourScales(*reinterpret_cast<const uint2*>(scales + block * BLOCK + 4 * lane)) {}
};

// Where the first two of a lane's four halves go in a row of a B operand's inputs, as write_input has them; the other
// two follow at 8.
DEVICE int operand_place(int block, int lane) {
    return block * BLOCK + 32 * (lane / 8) + 16 * (lane % 2) + 4 * (lane / 4 % 2) + 2 * (lane / 2 % 2);
}

// The input of a trellis layer from a lane's values of a block, which are changed: scaled, rotated, rounded to half.
DEVICE void write_input_by_warp(const FourScales& scales, int block, float v[4], int lane, half_bits* row) {
    const uint2 pairs = rotated(v, scales.values, lane);
    half_bits* place = row + operand_place(block, lane);
    *reinterpret_cast<unsigned*>(place) = pairs.x;
    *reinterpret_cast<unsigned*>(place + 8) = pairs.y;
}

// A lane's scales of a block; of plain layers, which have none, zeros.
DEVICE uint2 scales_of(const half_bits* scales, int block, int lane) {
    if (!scales) return uint2{};
    return *reinterpret_cast<const uint2*>(scales + block * BLOCK + 4 * lane);
}

// A block of outputs from its sums, in place; zeros past the layer's real outputs.
DEVICE void finish_outputs_by_warp(const Layer& layer, const uint2& output_scales, int block, float v[4], int lane) {
    if (layer.format != PLAIN) {
        const FourScales scales(output_scales);
        rotate_128(v, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = v[i] * scales.values[i];
    }
    if (!layer.bias && (block + 1) * BLOCK <= layer.real_outputs) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = block * BLOCK + 4 * lane + i;
        const bool real = column < layer.real_outputs;
        if (real && layer.bias) v[i] = v[i] + layer.bias[column];
        if (!real) v[i] = 0.0f;
    }
}

// The layers of an expert, and a lane's scales of one block of hidden values.
struct Triple {
    Layer gate, up, down;
    int block;
    uint2 gate_scales, up_scales, down_scales;

    __device__ __forceinline__ Triple(const Layer* layers, int expert, int block, int lane)
        : gate(layer_of(layers, expert, GATE)),
          up(layer_of(layers, expert, UP)),
          down(layer_of(layers, expert, DOWN)) {
        load_scales(block, lane);
    }
    __device__ __forceinline__ void load_scales(int of_block, int lane) {
        block = of_block;
        gate_scales = scales_of(gate.output_scales, block, lane);
        up_scales = scales_of(up.output_scales, block, lane);
        down_scales = scales_of(down.input_scales, block, lane);
    }
};

// A pair's block of hidden values from its sums of gate and up, as the down projection takes them: halves or floats.
DEVICE void write_hidden_by_warp(const Triple& expert, const float* gate_sums, const float* up_sums, int lane,
                                 half_bits* halves, float* floats) {
    float hidden[4], ups[4];
    load_four(gate_sums, lane, hidden);
    load_four(up_sums, lane, ups);
    finish_outputs_by_warp(expert.gate, expert.gate_scales, expert.block, hidden, lane);
    finish_outputs_by_warp(expert.up, expert.up_scales, expert.block, ups, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) hidden[i] = silu32(hidden[i]) * ups[i];
    if (expert.down.format != PLAIN)
        write_input_by_warp(FourScales(expert.down_scales), expert.block, hidden, lane, halves);
    else
        store_four(hidden, lane, floats + expert.block * BLOCK);
}

// A pair's block of weighted outputs from its sums of down, in place.
DEVICE void weight_outputs_by_warp(const Layer& down, const uint2& scales, int block, float weight, int lane,
                                   float* sums) {
    float v[4];
    load_four(sums, lane, v);
    finish_outputs_by_warp(down, scales, block, v, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = weight * v[i];
    store_four(v, lane, sums);
}
