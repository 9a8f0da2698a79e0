// The last step of a layer of many rows: shards summed, outputs rotated, scaled and biased.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"

constexpr int OUTPUT_WARPS = 8, WARP_ROWS = 4;

// grid (columns / 128, ceil(rows / 32)), 256 threads: a warp four rows' blocks of 128, all read before the first is
// rotated. The sums are those of columns first_block * 128 on.
extern "C" __global__ void rotate_outputs(
    const float* values, int terms, int stored_rows, int columns, int first_block, int rows, const half_bits* scales,
    const float* bias, float* y, int outputs) {
    await_inputs();
    const int lane = threadIdx.x % WARP;
    const int first_row = (blockIdx.y * OUTPUT_WARPS + threadIdx.x / WARP) * WARP_ROWS;
    if (first_row >= rows) return;
    const Sums sums = {values, terms, stored_rows, columns};
    const Finish finish = {scales, bias, y, outputs};
    float v[WARP_ROWS][4];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++)
        totals_of(sums, smaller(first_row + i, rows - 1), blockIdx.x * ROTATION + 4 * lane, v[i]);
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++)
        if (first_row + i < rows) finish_block(finish, first_row + i, first_block + blockIdx.x, v[i], lane);
}

// grid (ceil(columns / 256), rows), 256 threads: plain layers. The sums are those of outputs first_output on.
extern "C" __global__ void sum_outputs(
    const float* values, int terms, int stored_rows, int columns, int first_output, const float* bias, float* y,
    int outputs) {
    await_inputs();
    const int column = blockIdx.x * blockDim.x + threadIdx.x, output = first_output + column, row = blockIdx.y;
    if (column >= columns || output >= outputs) return;
    const Sums sums = {values, terms, stored_rows, columns};
    float total = total_of(sums, row, column);
    if (bias) total = total + bias[output];
    y[static_cast<int64>(row) * outputs + output] = total;
}
