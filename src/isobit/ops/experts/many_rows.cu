// The steps around the products of many rows: pairs sorted by expert, inputs, the shared expert's gate, the sum.
#define NATURAL_ORDER 1
#include "ops/experts/layers.cuh"
#include "ops/experts/shared_gate.cuh"

constexpr int SORT_WARPS = 16, SORT_LOADS = 8;
constexpr int PLAN_THREADS = 1024;
constexpr int GATE_ROWS = 32;
constexpr int PREPARE_WARPS = 4;

// Call `use` with the number of each routed pair from `first` to last - 1 that chose the expert, and with how many came
// before it; returns how many there are. By one warp, with SORT_LOADS reads on their way.
template <typename Use>
DEVICE int each_pair(const int* ids, int first, int last, int expert, int lane, Use use) {
    int count = 0;
    for (int begin = first; begin < last; begin += SORT_LOADS * WARP) {
        int found[SORT_LOADS];
#pragma unroll
        for (int i = 0; i < SORT_LOADS; i++) {
            const int routed = begin + i * WARP + lane;
            found[i] = routed < last ? ids[routed] : -1;
        }
#pragma unroll
        for (int i = 0; i < SORT_LOADS; i++) {
            const unsigned lanes = ballot(found[i] == expert);
            if (found[i] == expert) use(begin + i * WARP + lane, count + popcount(lanes & ((1u << lane) - 1)));
            count += popcount(lanes);
        }
    }
    return count;
}

// members[expert * rows + i]: the pairs of each expert by ascending row; counts[expert]. One block an expert.
extern "C" __global__ void __launch_bounds__(SORT_WARPS * WARP) sort_pairs(
    const int* ids, int* members, int* counts, int rows, int chosen, int experts) {
    __shared__ int warp_counts[SORT_WARPS];
    const int expert = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int* list = members + static_cast<int64>(expert) * rows;
    if (expert == experts) {
        for (int row = threadIdx.x; row < rows; row += SORT_WARPS * WARP) list[row] = row * (chosen + 1) + chosen;
        if (threadIdx.x == 0) counts[expert] = rows;
        return;
    }
    const int share = (rows * chosen + SORT_WARPS - 1) / SORT_WARPS;
    const int first = smaller(warp * share, rows * chosen), last = smaller(first + share, rows * chosen);
    const int own = each_pair(ids, first, last, expert, lane, [](int, int) {});
    if (lane == 0) warp_counts[warp] = own;
    __syncthreads();
    int before = 0, all = 0;
    for (int other = 0; other < SORT_WARPS; other++) {
        before += other < warp ? warp_counts[other] : 0;
        all += warp_counts[other];
    }
    if (own)
        each_pair(ids, first, last, expert, lane, [&](int routed, int place) {
            list[before + place] = routed / chosen * (chosen + 1) + routed % chosen;
        });
    if (threadIdx.x == 0) counts[expert] = all;
}

// Cut each expert's rows into tiles of about equal size, at most row_tile rows; tiles after the last, up to `most`, are
// empty. One block.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_tiles(
    const int* counts, RowTile* tiles, int rows, int experts, int row_tile, int most) {
    __shared__ int ends[2][PLAN_THREADS];
    int begin = 0;
    for (int first = 0; first <= experts; first += PLAN_THREADS) {
        const int expert = first + threadIdx.x;
        const int count = expert <= experts ? counts[expert] : 0;
        const int parts = (count + row_tile - 1) / row_tile;
        int turn = 0;
        ends[0][threadIdx.x] = parts;
        __syncthreads();
        for (int step = 1; step < PLAN_THREADS; step *= 2, turn ^= 1) {
            const int before = threadIdx.x >= step ? ends[turn][threadIdx.x - step] : 0;
            ends[turn ^ 1][threadIdx.x] = ends[turn][threadIdx.x] + before;
            __syncthreads();
        }
        const int end = begin + ends[turn][threadIdx.x];
        const int size = parts ? (count + parts - 1) / parts : 0;
        for (int i = 0; i < parts; i++) {
            const int at = i * size;
            tiles[end - parts + i] = {expert, expert * rows + at, smaller(size, count - at), 0};
        }
        begin += ends[turn][PLAN_THREADS - 1];
        __syncthreads();
    }
    for (int i = begin + threadIdx.x; i < most; i += PLAN_THREADS) tiles[i] = {0, 0, 0, 0};
}

// x [rows, hidden] -> each pair's inputs of gate and up: ready [2][pairs, width].
// grid (blocks of 128 inputs / 4, rows), 128 threads: the octets of a warp have blocks, the warps experts by turns.
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * WARP) prepare_rows(
    const float* x, const int* ids, const Layer* layers, half_bits* ready, int rows, int chosen, int experts,
    int hidden, int width) {
    const int row = blockIdx.y, j = threadIdx.x % OCTET, blocks = width / BLOCK;
    const int octet_block = blockIdx.x * OCTETS + threadIdx.x % WARP / OCTET;
    const int block = smaller(octet_block, blocks - 1);
    float values[OCTET_VALUES];
    load_octet_of_row(x + static_cast<int64>(row) * hidden, block * BLOCK, hidden, j, values);
    const int64 pairs = static_cast<int64>(rows) * (chosen + 1);
    for (int choice = threadIdx.x / WARP; choice <= chosen; choice += PREPARE_WARPS) {
        const int64 pair = static_cast<int64>(row) * (chosen + 1) + choice;
        const int expert = choice == chosen ? experts : ids[row * chosen + choice];
#pragma unroll
        for (int projection = GATE; projection <= UP; projection++) {
            const Layer& layer = layer_of(layers, expert, projection);
            if (layer.format == PLAIN) continue;
            float own[OCTET_VALUES];
#pragma unroll
            for (int i = 0; i < OCTET_VALUES; i++) own[i] = values[i];
            write_input(OctetScales(layer.input_scales, block, j), block, own, j, octet_block < blocks,
                        ready + (projection * pairs + pair) * width);
        }
    }
}

// grid ceil(rows / 32), 128 threads.
extern "C" __global__ void __launch_bounds__(GATE_THREADS) shared_gates(
    const float* x, int hidden, int rows, const float* weights, int inputs, const float* bias, float* logits) {
    __shared__ GateInputs<GATE_ROWS> staged;
    shared_gate_logits(x, hidden, rows, blockIdx.x * GATE_ROWS, weights, inputs, bias, logits, staged);
}

// terms [pairs, width] -> y [rows, hidden]. grid (ceil(width / 512), rows), 128 threads of 4 columns.
extern "C" __global__ void __launch_bounds__(128) add_terms(
    const float* terms, const int* ids, float* y, int chosen, int experts, int hidden, int width) {
    const int row = blockIdx.y, column = 4 * (blockIdx.x * 128 + threadIdx.x);
    if (column >= width) return;
    ShardedSums<4> sums(experts);
    const float* source = terms + static_cast<int64>(row) * (chosen + 1) * width + column;
    float values[4];
#pragma unroll 4
    for (int choice = 0; choice < chosen; choice++) {
        load_four(source + static_cast<int64>(choice) * width, 0, values);
        sums.add(ids[row * chosen + choice], values);
    }
    load_four(source + static_cast<int64>(chosen) * width, 0, values);
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = sums.with_shared(i, values[i]);
    store_outputs(values, y + static_cast<int64>(row) * hidden, column, hidden);
}
