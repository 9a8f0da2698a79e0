// The causal depthwise convolution; docs/arithmetic.md, *delta_rule* and *ngram_embedding*.
//
// Macros: TAPS, DILATION, COLUMNS (neighbouring columns of a thread, 1 or 4). A block takes `chunk` rows of some
// columns. The rows of a segment that read the pool belong, with the pool's move, to the thread that has its first.
#include "device.cuh"

constexpr int KEPT = DILATION * (TAPS - 1);

struct Values {
    float at[COLUMNS];
};

DEVICE Values load_values(const float* from) {
    Values values;
#if COLUMNS == 4
    const float4 loaded = *reinterpret_cast<const float4*>(from);
    values.at[0] = loaded.x, values.at[1] = loaded.y, values.at[2] = loaded.z, values.at[3] = loaded.w;
#else
    values.at[0] = *from;
#endif
    return values;
}

DEVICE void store_values(float* to, const Values& values) {
#if COLUMNS == 4
    *reinterpret_cast<float4*>(to) = make_float4(values.at[0], values.at[1], values.at[2], values.at[3]);
#else
    *to = values.at[0];
#endif
}

// A segment's rows start to end - 1 in the thread's columns: x has one row after another, state the KEPT before them.
struct Segment {
    const float* x;
    float* state;
    int64 width;
    int start, end;

    __device__ Values row_before(int row) const {
        return load_values(row < start ? state + (KEPT + row - start) * width : x + row * width);
    }

    // The KEPT rows before `row`, oldest first; `to` may be the state itself, whose later rows are not yet written.
    __device__ void keep(int row, float* to) const {
        for (int place = 0; place < KEPT; place++) store_values(to + place * width, row_before(row - KEPT + place));
    }
};

DEVICE Values silu_of_chain(const Values (&taps)[TAPS], const Values (&rows)[TAPS]) {
    Values result;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        float total = 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) total = fma32(taps[tap].at[i], rows[tap].at[i], total);
        result.at[i] = silu32(total);
    }
    return result;
}

// emit(row, silu of the convolution) for every row; x and weight [., width], state [slots, KEPT, width].
template <typename Emit>
DEVICE void convolve_rows(
    const float* __restrict__ x, const float* __restrict__ weight, float* state, float* journal, const int* places,
    const int* starts, const int* slots, const int* segment_of_row, int rows, int width, int chunk, Emit emit) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COLUMNS;
    Values taps[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
        if (column < width) taps[tap] = load_values(weight + static_cast<int64>(tap) * width + column);
    await_inputs();
    if (column >= width) return;
    const int last = smaller(static_cast<int>(blockIdx.y + 1) * chunk, rows);
    int row = blockIdx.y * chunk;
    while (row < last) {
        const int place = segment_of_row[row];
        const int64 slot = static_cast<int64>(slots[place]) * KEPT * width;
        const Segment segment = {x + column, state + slot + column, width, starts[place], starts[place + 1]};
        const int head = smaller(segment.start + KEPT, segment.end);
        auto journal_row = [&](int row) {
            const int to = places ? places[row] : -1;
            if (to >= 0) segment.keep(row + 1, journal + static_cast<int64>(to) * KEPT * width + column);
        };
        if (row == segment.start) {
            for (; row < head; row++) {
                Values before[TAPS];
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++)
                    before[tap] = segment.row_before(row - (TAPS - 1 - tap) * DILATION);
                emit(row, column, silu_of_chain(taps, before));
                journal_row(row);
            }
            segment.keep(segment.end, segment.state);
        }
        const int end = smaller(last, segment.end);
#pragma unroll 4
        for (row = larger(row, head); row < end; row++) {
            Values before[TAPS];
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                before[tap] = load_values(x + (row - (TAPS - 1 - tap) * DILATION) * static_cast<int64>(width) + column);
            emit(row, column, silu_of_chain(taps, before));
            journal_row(row);
        }
    }
}

// out [rows, width].
extern "C" __global__ void convolve(
    const float* x, const float* weight, float* state, float* journal, const int* places, const int* starts,
    const int* slots, const int* segment_of_row, int rows, int width, int chunk, float* __restrict__ out) {
    convolve_rows(x, weight, state, journal, places, starts, slots, segment_of_row, rows, width, chunk,
                  [=](int row, int column, const Values& convolved) {
                      store_values(out + static_cast<int64>(row) * width + column, convolved);
                  });
}

// streams [rows, width] += gates * value + convolved; gates [rows, width / hidden], value [rows, hidden].
extern "C" __global__ void convolve_into_streams(
    const float* x, const float* weight, float* state, float* journal, const int* places, const int* starts,
    const int* slots, const int* segment_of_row, int rows, int width, int chunk, const float* __restrict__ gates,
    const float* __restrict__ value, int hidden, float* __restrict__ streams) {
    convolve_rows(x, weight, state, journal, places, starts, slots, segment_of_row, rows, width, chunk,
                  [=](int row, int column, const Values& convolved) {
                      const int64 wide = row;
                      const float gate = gates[wide * (width / hidden) + column / hidden];
                      const Values values = load_values(value + wide * hidden + column % hidden);
                      float* at = streams + wide * width + column;
                      Values sums = load_values(at);
#pragma unroll
                      for (int i = 0; i < COLUMNS; i++)
                          sums.at[i] = sums.at[i] + (gate * values.at[i] + convolved.at[i]);
                      store_values(at, sums);
                  });
}
