// The second half of a gated read: low = silu(down / streams), the layer `up`, the mix, the injection.
//
// Macros: STREAMS, HIDDEN, STEPS of read.cuh; TERMS of each of down's outputs. `up` lies as the A operand's registers,
// uint4 [STREAMS * HIDDEN / 16, STEPS, 32]; low is its B operand, uint2 [row tiles, STEPS, 32]: of lane 4g + t row g's
// halves 2t, 2t + 1 and 2t + 8, 2t + 9.
#include "device.cuh"
#include "ops/gated_residual/read.cuh"

// The sums of down's and inject's outputs: float [TERMS, rows, width], inject's from column `inject` on.
struct Sums {
    const float* values;
    int rows, width, inject;
};

// The terms of COUNT outputs: COUNT / WIDE places of WIDE neighbours, `apart` columns.
template <typename Floats, int COUNT>
struct Terms {
    static constexpr int WIDE = sizeof(Floats) / sizeof(float), PLACES = COUNT / WIDE;
    Floats values[TERMS][PLACES];

    __device__ __forceinline__ void load(const Sums& sums, int row, int column, int apart) {
        const int stride = sums.rows * sums.width;
        const float* at = sums.values + row * sums.width + column;
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int place = 0; place < PLACES; place++)
                values[term][place] = *reinterpret_cast<const Floats*>(at + term * stride + place * apart);
    }

    // Each output's terms added in float64 in order, rounded once.
    __device__ __forceinline__ void add(float totals[COUNT]) const {
        double found[COUNT];
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const double value = reinterpret_cast<const float*>(&values[term][j / WIDE])[j % WIDE];
                found[j] = term ? found[j] + value : value;
            }
#pragma unroll
        for (int j = 0; j < COUNT; j++) totals[j] = static_cast<float>(found[j]);
    }
};

// Lane 4g + t's two registers of a row's low values in one step; the width is even.
struct LowTerms {
    Terms<float2, 4> terms;

    __device__ __forceinline__ void load(const Sums& sums, int row, int step, int pair) {
        terms.load(sums, row, step * SIDE + 2 * pair, SIDE / 2);
    }

    __device__ __forceinline__ uint2 pairs() const {
        float totals[4];
        terms.add(totals);
        half_bits values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = activated(totals[i]);
        return make_uint2(pack_half2(values[0], values[1]), pack_half2(values[2], values[3]));
    }
};

DEVICE void write_injection(const Sums& sums, int row, int stream, float* injection) {
    Terms<float, 1> terms;
    terms.load(sums, row, sums.inject + stream, 0);
    float total;
    terms.add(&total);
    injection[static_cast<int64>(row) * STREAMS + stream] = injection_of(total);
}

// low and injection [rows, STREAMS] (null: none) of all rows; grid covers rows * (4 * STEPS + STREAMS) threads.
extern "C" __global__ void finish_down(const float* values, int rows, int width, int inject, uint2* low,
                                       float* injection) {
    await_inputs();
    const Sums sums = {values, rows, width, inject};
    const int units = 4 * STEPS + STREAMS;
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = at / units, unit = at % units;
    if (row >= rows) return;
    if (unit >= 4 * STEPS) {
        if (injection) write_injection(sums, row, unit - 4 * STEPS, injection);
        return;
    }
    const int step = unit / 4, pair = unit % 4;
    const int64 tile = row / ROW_TILE;
    LowTerms terms;
    terms.load(sums, row, step, pair);
    low[(tile * STEPS + step) * WARP + row % ROW_TILE * 4 + pair] = terms.pairs();
}

constexpr int THREAD_VALUES = (ROW_TILE * SIDE + WARP * STREAMS - 1) / (WARP * STREAMS);

// The streams that a block of mix_few reads. normed: float [rows, STREAMS, HIDDEN], or null: then `streams` of that
// shape after injection [rows, STREAMS] * y [rows, HIDDEN] is added, where there is a y, normed by inverse
// [rows, STREAMS] and norm_weight [STREAMS, HIDDEN].
struct Streams {
    const float* normed;
    float* streams;
    const float *injection, *y, *inverse, *norm_weight;
};

// One column of a row's streams, on its way.
struct StreamColumn {
    float values[STREAMS], strengths[STREAMS], inverses[STREAMS], added;

    __device__ __forceinline__ void load(const Streams& from, int64 row, int column) {
#pragma unroll
        for (int stream = 0; stream < STREAMS; stream++) {
            const int64 at = row * STREAMS + stream;
            values[stream] = (from.normed ? from.normed : from.streams)[at * HIDDEN + column];
            inverses[stream] = from.normed ? 0.0f : from.inverse[at];
            strengths[stream] = from.y ? from.injection[at] : 0.0f;
        }
        added = from.y ? from.y[row * HIDDEN + column] : 0.0f;
    }

    // Add what is added, and write it unless the row is another's.
    __device__ __forceinline__ void write(const Streams& to, int64 row, int column, bool own) {
        if (!to.y) return;
#pragma unroll
        for (int stream = 0; stream < STREAMS; stream++) {
            values[stream] = fma32(strengths[stream], added, values[stream]);
            if (own) to.streams[(row * STREAMS + stream) * HIDDEN + column] = values[stream];
        }
    }

    __device__ __forceinline__ void norm(const Streams& from, const float factors[STREAMS]) {
        if (from.normed) return;
#pragma unroll
        for (int stream = 0; stream < STREAMS; stream++)
            values[stream] = (values[stream] * inverses[stream]) * factors[stream];
    }
};

// low of up to 8 rows, by each block for itself: a unit's terms are loaded while those of the one before are added.
struct OwnLow {
    static constexpr int ROW_UNITS = 4 * STEPS, THREADS = WARP * STREAMS;
    LowTerms next;

    __device__ __forceinline__ void load(const Sums& sums, int unit) {
        if (unit < sums.rows * ROW_UNITS) next.load(sums, unit / ROW_UNITS, unit % ROW_UNITS / 4, unit % 4);
    }

    // After this thread's first unit is loaded.
    __device__ __forceinline__ void finish(const Sums& sums, uint2* own_low) {
        for (int unit = threadIdx.x; unit < sums.rows * ROW_UNITS; unit += THREADS) {
            const LowTerms terms = next;
            load(sums, unit + THREADS);
            own_low[unit % ROW_UNITS / 4 * WARP + unit / ROW_UNITS * 4 + unit % 4] = terms.pairs();
        }
    }
};

// Up to 64 rows: a block has 16 columns of the result, a warp one stream's part. grid (HIDDEN / 16), 32 * STREAMS
// threads. low: finish_down's, or null for up to 8 rows: then from `values` [TERMS, rows, width], by each block for
// itself, and one block more writes the injection. mixed: float [rows, HIDDEN]. The rest as Streams says.
extern "C" __global__ void __launch_bounds__(WARP * STREAMS)
mix_few(const uint4* __restrict__ up, const float* values, const uint2* low, const float* normed, float* streams,
        const float* written_injection, const float* y, const float* inverse, const float* __restrict__ norm_weight,
        float* mixed, float* injection, int rows, int width, int inject) {
    __shared__ uint2 own_low[STEPS * WARP];
    __shared__ float mixes[STREAMS][ROW_TILE][SIDE + 1];
    const int lane = threadIdx.x % WARP, stream = threadIdx.x / WARP, group = lane / 4, pair = lane % 4;
    const int first = blockIdx.x * SIDE, column = first + threadIdx.x % SIDE;
    const Sums sums = {values, rows, width, inject};
    if (first == HIDDEN) {
        await_inputs();
        for (int i = threadIdx.x; injection && i < rows * STREAMS; i += WARP * STREAMS)
            write_injection(sums, i / STREAMS, i % STREAMS, injection);
        return;
    }
    uint4 weights[STEPS];
    const uint4* own = up + static_cast<int64>((stream * HIDDEN + first) / SIDE) * STEPS * WARP + lane;
#pragma unroll
    for (int step = 0; step < STEPS; step++) weights[step] = load_ahead(own + step * WARP);
    float factors[STREAMS];
#pragma unroll
    for (int from = 0; from < STREAMS; from++) factors[from] = 1.0f + norm_weight[from * HIDDEN + column];
    await_inputs();
    const Streams all = {normed, streams, written_injection, y, inverse, norm_weight};
    for (int first_row = 0; first_row < rows; first_row += ROW_TILE) {
        OwnLow own_terms;
        if (!low) own_terms.load(sums, threadIdx.x);
        StreamColumn columns[THREAD_VALUES];
#pragma unroll
        for (int i = 0; i < THREAD_VALUES; i++) {
            const int row = first_row + (i * WARP * STREAMS + threadIdx.x) / SIDE;
            columns[i].load(all, smaller(row, rows - 1), column);
        }
        if (!low) own_terms.finish(sums, own_low);
        __syncthreads();
        const uint2* b = low ? low + static_cast<int64>(first_row / ROW_TILE) * STEPS * WARP : own_low;
        const bool real = first_row + group < rows;
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const uint2 pairs = real ? b[step * WARP + lane] : make_uint2(0u, 0u);
            multiply(c, weights[step], pairs.x, pairs.y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) mixes[stream][2 * pair + i % 2][group + i / 2 * 8] = sigmoid32(c[i]);
#pragma unroll
        for (int i = 0; i < THREAD_VALUES; i++) {
            const int place = i * WARP * STREAMS + threadIdx.x, row = first_row + place / SIDE;
            columns[i].write(all, row, column, place < ROW_TILE * SIDE && row < rows);
            columns[i].norm(all, factors);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < THREAD_VALUES; i++) {
            const int place = i * WARP * STREAMS + threadIdx.x, row = first_row + place / SIDE;
            if (place >= ROW_TILE * SIDE || row >= rows) break;
            float total = 0.0f;
#pragma unroll
            for (int from = 0; from < STREAMS; from++) {
                const float value = mixes[from][place / SIDE][place % SIDE] * columns[i].values[from];
                total = from ? total + value : value;
            }
            mixed[static_cast<int64>(row) * HIDDEN + column] = total / static_cast<float>(STREAMS);
        }
    }
}

// Many rows: units of 128 rows and 64 columns of the result, columns by columns; each block has consecutive units, and
// keeps the weights of its columns in shared memory. A warp has 16 columns of all streams and 32 rows, and waits for
// the others only where columns change: while some multiply, others mix.
constexpr int MIX_COLUMNS = 4, MIX_ROW_GROUPS = 4, GROUP_TILES = 4;
constexpr int MIX_WARPS = MIX_COLUMNS * MIX_ROW_GROUPS, MIX_THREADS = MIX_WARPS * WARP;
constexpr int MIX_TILES = MIX_ROW_GROUPS * GROUP_TILES;
constexpr int COLUMN_TILES = HIDDEN / SIDE;

struct MixRoom {
    uint4 weights[MIX_COLUMNS][STREAMS][STEPS][WARP];
};

DEVICE void stage_weights(MixRoom& room, const uint4* up, int first_tile) {
    constexpr int STREAM_PIECES = STEPS * WARP, COLUMN_PIECES = STREAMS * STREAM_PIECES;
    for (int i = threadIdx.x; i < MIX_COLUMNS * COLUMN_PIECES; i += MIX_THREADS) {
        const int column = i / COLUMN_PIECES, stream = i / STREAM_PIECES % STREAMS, rest = i % STREAM_PIECES;
        const int tile = first_tile + column;
        if (tile < COLUMN_TILES)
            copy_async_16(&room.weights[column][stream][0][0] + rest,
                          up + static_cast<int64>(stream * COLUMN_TILES + tile) * STREAM_PIECES + rest);
    }
    copy_async_commit();
}

// A lane's operands of a step, of a warp's tiles of rows; those past the last are the last.
struct LowPairs { uint2 tiles[GROUP_TILES]; };

DEVICE LowPairs load_low(const uint2* low, int first_tile, int tiles, int step) {
    LowPairs pairs;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++)
        pairs.tiles[tile] = low[(smaller(first_tile + tile, tiles - 1) * STEPS + step) * WARP + threadIdx.x % WARP];
    return pairs;
}

// What a lane mixes of a tile of rows: value i of row i % 2 and column i / 2 * 8 from its first.
struct Mixed {
    float values[STREAMS][4], inverse[STREAMS][2];
};

DEVICE Mixed load_mixed(const float* streams, const float* inverse, int first_row, int rows, int column) {
    Mixed mixed;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64 row = smaller(first_row + i, rows - 1);
#pragma unroll
        for (int stream = 0; stream < STREAMS; stream++) {
            const float* at = streams + (row * STREAMS + stream) * HIDDEN + column;
            mixed.values[stream][i] = at[0];
            mixed.values[stream][i + 2] = at[8];
            mixed.inverse[stream][i] = inverse[row * STREAMS + stream];
        }
    }
    return mixed;
}

// streams: float [rows, STREAMS, HIDDEN]; inverse [rows, STREAMS]; norm_weight [STREAMS, HIDDEN]; the units are
// blockIdx.x * units / gridDim.x and on.
extern "C" __global__ void __launch_bounds__(MIX_THREADS, 1)
mix_many(const uint4* __restrict__ up, const uint2* __restrict__ low, const float* __restrict__ streams,
         const float* __restrict__ inverse, const float* __restrict__ norm_weight, float* __restrict__ mixed,
         int rows) {
    DYNAMIC_SHARED(MixRoom, shared);
    MixRoom& room = *shared;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, pair = lane % 4;
    const int own_column = warp % MIX_COLUMNS, own_tiles = warp / MIX_COLUMNS * GROUP_TILES;
    const int tiles = (rows + ROW_TILE - 1) / ROW_TILE, row_units = (tiles + MIX_TILES - 1) / MIX_TILES;
    const int64 units = static_cast<int64>((COLUMN_TILES + MIX_COLUMNS - 1) / MIX_COLUMNS) * row_units;
    const int first_unit = static_cast<int>(blockIdx.x * units / gridDim.x);
    const int last_unit = static_cast<int>((blockIdx.x + 1) * units / gridDim.x);
    int staged = -1;
    float factors[STREAMS][2];
#pragma unroll 1
    for (int unit = first_unit; unit < last_unit; unit++) {
        const int columns = unit / row_units, first_tile = unit % row_units * MIX_TILES + own_tiles;
        const int column = (columns * MIX_COLUMNS + own_column) * SIDE + group;
        if (columns != staged) {
            __syncthreads();
            stage_weights(room, up, columns * MIX_COLUMNS);
            staged = columns;
#pragma unroll
            for (int stream = 0; stream < STREAMS; stream++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    factors[stream][i] = column < HIDDEN ? 1.0f + norm_weight[stream * HIDDEN + column + 8 * i] : 0.0f;
            copy_async_wait<0>();
            __syncthreads();
        }
        if (column >= HIDDEN || first_tile >= tiles) continue;
        const int first_row = first_tile * ROW_TILE + 2 * pair;
        Mixed next = load_mixed(streams, inverse, first_row, rows, column);
        float c[STREAMS][GROUP_TILES][4] = {};
        LowPairs ahead = load_low(low, first_tile, tiles, 0);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const LowPairs b = ahead;
            if (step + 1 < STEPS) ahead = load_low(low, first_tile, tiles, step + 1);
#pragma unroll
            for (int stream = 0; stream < STREAMS; stream++) {
                const uint4 a = room.weights[own_column][stream][step][lane];
#pragma unroll
                for (int tile = 0; tile < GROUP_TILES; tile++)
                    multiply(c[stream][tile], a, b.tiles[tile].x, b.tiles[tile].y);
            }
        }
#pragma unroll
        for (int tile = 0; tile < GROUP_TILES; tile++) {
            const Mixed now = next;
            if (tile + 1 < GROUP_TILES)
                next = load_mixed(streams, inverse, first_row + (tile + 1) * ROW_TILE, rows, column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float total = 0.0f;
#pragma unroll
                for (int stream = 0; stream < STREAMS; stream++) {
                    const float normed = (now.values[stream][i] * now.inverse[stream][i % 2]) * factors[stream][i / 2];
                    const float value = sigmoid32(c[stream][tile][i]) * normed;
                    total = stream ? total + value : value;
                }
                const int64 row = first_row + tile * ROW_TILE + i % 2;
                if (row < rows) mixed[row * HIDDEN + column + i / 2 * 8] = total / static_cast<float>(STREAMS);
            }
        }
    }
}
