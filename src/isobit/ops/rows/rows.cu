// Rows moved without arithmetic, in units of 16 or 4 bytes. UNIT: the unit's bytes.
#include "device.cuh"

#if UNIT == 16
using Unit = uint4;
#else
using Unit = unsigned;
#endif

// Row i of previous [rows, width] is row i - 1 of x, or last[slot] for a segment's first row; last[slot] becomes the
// segment's last row, and journal[places[i]] row i where places[i] is not negative.
extern "C" __global__ void shift(const Unit* __restrict__ x, Unit* last, Unit* __restrict__ previous, int width,
                                 const int* __restrict__ slots, const int* __restrict__ starts,
                                 const int* __restrict__ segment_of_row, const int* __restrict__ places,
                                 Unit* __restrict__ journal) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (column >= width) return;
    const int64 here = static_cast<int64>(row) * width + column;
    const int segment = segment_of_row[row];
    if (row == starts[segment]) {
        const int64 kept = static_cast<int64>(slots[segment]) * width + column;
        previous[here] = last[kept];
        last[kept] = x[static_cast<int64>(starts[segment + 1] - 1) * width + column];
    } else {
        previous[here] = x[here - width];
    }
    if (places && places[row] >= 0) journal[static_cast<int64>(places[row]) * width + column] = x[here];
}
