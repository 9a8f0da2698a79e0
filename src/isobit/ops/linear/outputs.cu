// The last step of a layer of many rows: shards summed, outputs rotated, scaled and biased.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"

constexpr int OUTPUT_WARPS = 8;

// grid (columns / 128, ceil(rows / 8)), 256 threads: a warp a row and block of 128. The sums are those of columns
// first_block * 128 on.
extern "C" __global__ void rotate_outputs(
    const float* values, int terms, int stored_rows, int columns, int first_block, int rows, const half_bits* scales,
    const float* bias, float* y, int outputs) {
    const int lane = threadIdx.x % WARP, row = blockIdx.y * OUTPUT_WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    const Sums sums = {values, terms, stored_rows, columns};
    const Finish finish = {scales, bias, y, outputs};
    float v[4];
    totals_of(sums, row, blockIdx.x * ROTATION + 4 * lane, v);
    finish_block(finish, row, first_block + blockIdx.x, v, lane);
}

// grid (ceil(columns / 256), rows), 256 threads: plain layers. The sums are those of outputs first_output on.
extern "C" __global__ void sum_outputs(
    const float* values, int terms, int stored_rows, int columns, int first_output, const float* bias, float* y,
    int outputs) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, output = first_output + column, row = blockIdx.y;
    if (column >= columns || output >= outputs) return;
    const Sums sums = {values, terms, stored_rows, columns};
    float total = total_of(sums, row, column);
    if (bias) total = total + bias[output];
    y[static_cast<int64>(row) * outputs + output] = total;
}
