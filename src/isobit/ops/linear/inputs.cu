// Inputs as the products read them: rotated or plain, rounded to half.
#include "device.cuh"
#include "ops/linear/rotate_octet.cuh"

constexpr int INPUT_WARPS = 8, WARP_ROWS = 4;

// For few rows, in the order of rotate_units. grid (ceil(rows * blocks / 32)), 256 threads: eight lanes a row's block.
extern "C" __global__ void rotate_few(
    const float* x, const half_bits* scales, unsigned* operand, int rows, int inputs, int blocks, int whole) {
    // The next kernel reads only constants before it has awaited this one, and so those before.
    let_next_begin();
    await_inputs_alone();
    const int first = blockIdx.x * (INPUT_WARPS * WARP / octet::LANES), units = rows * blocks;
    rotate_units(operand, x, scales, 0, first, smaller(first + INPUT_WARPS * WARP / octet::LANES, units), rows, inputs,
                 whole, threadIdx.x, blockDim.x);
}

// For many rows: half [rows, 128 * blocks]. grid (blocks, ceil(rows / 32)), 256 threads: a warp four rows.
extern "C" __global__ void rotate_many(
    const float* x, const half_bits* scales, half_bits* halves, int rows, int inputs, int blocks, int whole) {
    const int lane = threadIdx.x % WARP, block = blockIdx.x, column = block * ROTATION + 4 * lane;
    const int first_row = (blockIdx.y * INPUT_WARPS + threadIdx.x / WARP) * WARP_ROWS;
    if (first_row >= rows) return;
    float v[WARP_ROWS][4], scale[4];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const int row = smaller(first_row + i, rows - 1);
        load_inputs(x + static_cast<int64>(row) * inputs, column, inputs, whole, v[i]);
    }
    load_halves(scales + column, scale);
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const uint2 pairs = rotated(v[i], scale, lane);
        const int64 at = (static_cast<int64>(first_row + i) * blocks + block) * ROTATION + 4 * lane;
        if (first_row + i < rows) *reinterpret_cast<uint2*>(halves + at) = pairs;
    }
}

// Plain layers of many rows: half [parts, stored_rows, columns], zeros past the inputs. Part 0 is x rounded, part 1, if
// there is one, what that leaves rounded. grid (ceil(columns / 1024), rows), 256 threads; columns are whole 16s.
extern "C" __global__ void round_many(
    const float* x, half_bits* halves, int stored_rows, int inputs, int columns, int parts, int whole) {
    const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x), row = blockIdx.y;
    if (column >= columns) return;
    float v[4];
    load_inputs(x + static_cast<int64>(row) * inputs, column, inputs, whole, v);
    half_bits high[4];
#pragma unroll
    for (int i = 0; i < 4; i++) high[i] = half_of(v[i]);
    half_bits* at = halves + static_cast<int64>(row) * columns + column;
    *reinterpret_cast<uint2*>(at) = make_uint2(pack_half2(high[0], high[1]), pack_half2(high[2], high[3]));
    if (parts == 1) return;
    half_bits low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) low[i] = half_of(v[i] - float_of_half(high[i]));
    at += static_cast<int64>(stored_rows) * columns;
    *reinterpret_cast<uint2*>(at) = make_uint2(pack_half2(low[0], low[1]), pack_half2(low[2], low[3]));
}

// float32 [rows, columns] with zeros past the inputs. grid (ceil(columns / 1024), rows), 256 threads.
extern "C" __global__ void pad_inputs(const float* x, float* padded, int inputs, int columns) {
    await_inputs();
    const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x), row = blockIdx.y;
    if (column >= columns) return;
    float v[4];
    load_inputs(x + static_cast<int64>(row) * inputs, column, inputs, false, v);
    float* at = padded + static_cast<int64>(row) * columns + column;
    *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
}
