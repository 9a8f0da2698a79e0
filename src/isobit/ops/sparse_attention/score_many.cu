// Scores of finished blocks for many rows: tiles of 16 rows by 64 blocks, a thread for all heads of a row and 4 blocks.
// Macros: INDEX_HEADS, INDEX_DIM, BLOCK, KEPT, ROTARY.
#include "ops/sparse_attention/normed_rows.cuh"

constexpr int THREADS = 256;
constexpr int TILE_ROWS = 16;
constexpr int TILE = 64;                                  // blocks of keys
constexpr int QUAD = 4;                                   // heads, and blocks, that a thread takes at a time
constexpr int WIDTH = whole(INDEX_DIM, WARP) * WARP;
constexpr int ROW_HEADS = whole(INDEX_HEADS, QUAD) * QUAD;
constexpr int QUERY_STEP = TILE_ROWS * ROW_HEADS + QUAD;  // the last QUAD spreads a column over the banks
constexpr int KEY_STEP = TILE + QUAD;
constexpr int PAGE_BLOCKS = PAGE_ROWS / BLOCK;

struct Scratch {
    float queries[WIDTH][QUERY_STEP];  // [element][row * ROW_HEADS + head]
    float keys[WIDTH][KEY_STEP];       // [element][block]
    float work[THREADS / WARP][INDEX_DIM];
};
static_assert(sizeof(Scratch) == SCRATCH_BYTES, "the launch gives another size");

struct Sums { float of[QUAD][QUAD]; };  // [head][block]

DEVICE Sums add(const Sums& a, const Sums& b) {
    Sums sum;
#pragma unroll
    for (int i = 0; i < QUAD; i++)
#pragma unroll
        for (int j = 0; j < QUAD; j++) sum.of[i][j] = a.of[i][j] + b.of[i][j];
    return sum;
}

DEVICE void add_products(Sums& sums, const float4& q, const float4& k) {
    const float heads[QUAD] = {q.x, q.y, q.z, q.w}, blocks[QUAD] = {k.x, k.y, k.z, k.w};
#pragma unroll
    for (int i = 0; i < QUAD; i++)
#pragma unroll
        for (int j = 0; j < QUAD; j++) sums.of[i][j] = fma32(heads[i], blocks[j], sums.of[i][j]);
}

// What the lane sum's accumulators j, j + STEP, j + 2 STEP, ... have become after its halvings down to STEP.
template <int STEP>
DEVICE Sums folded(const float* query, const float* key, int j) {
    if constexpr (STEP == WARP) {
        Sums sums = {};
#pragma unroll
        for (int t = 0; t < WIDTH; t += WARP)
            add_products(
                sums, *reinterpret_cast<const float4*>(query + (j + t) * QUERY_STEP),
                *reinterpret_cast<const float4*>(key + (j + t) * KEY_STEP)
            );
        return sums;
    } else {
        return add(folded<2 * STEP>(query, key, j), folded<2 * STEP>(query, key, j + STEP));
    }
}

// Lane sums of four heads' queries with four keys. The outer halvings are loops, so that the code stays small.
DEVICE Sums lane_products(const float* query, const float* key) {
    Sums whole_sum = {};
#pragma unroll 1
    for (int odd = 0; odd < 2; odd++) {
        Sums half = {};
#pragma unroll 1
        for (int upper = 0; upper < 2; upper++) {
            const Sums quarter = folded<4>(query, key, odd + 2 * upper);
            half = upper ? add(half, quarter) : quarter;
        }
        whole_sum = odd ? add(whole_sum, half) : half;
    }
    return whole_sum;
}

DEVICE void norm_queries(
    Scratch& scratch, const float* index_q, int q_step, int first_row, int rows, const float* weight, float eps,
    const float* cosines, const float* sines, const int* positions
) {
    float* work = scratch.work[warp_of_block()];
    for (int i = warp_of_block(); i < TILE_ROWS * ROW_HEADS; i += THREADS / WARP) {
        const int row = i / ROW_HEADS, head = i % ROW_HEADS;
        const bool present = row < rows && head < INDEX_HEADS;
        if (present) {
            const float* x = index_q + static_cast<int64>(first_row + row) * q_step + head * INDEX_DIM;
            norm_and_rotate<INDEX_DIM, ROTARY>(
                hold<INDEX_DIM>(x), hold<INDEX_DIM>(weight), eps,
                angles_at<ROTARY>(positions[first_row + row], cosines, sines), work
            );
        }
        for (int j = lane_of_warp(); j < WIDTH; j += WARP)
            scratch.queries[j][i] = present && j < INDEX_DIM ? work[j] : -0.0f;
        __syncwarp();
    }
}

// Keys past `count` repeat the last one.
DEVICE void load_keys(Scratch& scratch, const float* pooled, const int* pages, int first, int count) {
    constexpr int UNIT = INDEX_DIM % 4 == 0 ? 4 : 1, PIECES = INDEX_DIM / UNIT, NEAR = UNIT;
#pragma unroll 4
    for (int piece = threadIdx.x; piece < TILE * PIECES; piece += THREADS) {
        // Lanes take NEAR pieces of each of several keys: whole sectors are read, and few banks written twice.
        const int outer = piece / (TILE * NEAR) * NEAR;
        const int group = PIECES % NEAR ? smaller(NEAR, PIECES - outer) : NEAR, within = piece - outer * TILE;
        const int at = within / group, column = (outer + within % group) * UNIT;
        const int block = first + smaller(at, count - 1);
        const int64 place = static_cast<int64>(pages[block / PAGE_BLOCKS]) * PAGE_BLOCKS + block % PAGE_BLOCKS;
        const float* source = pooled + place * INDEX_DIM + column;
        if constexpr (UNIT == 4) {
            const float4 values = *reinterpret_cast<const float4*>(source);
            scratch.keys[column][at] = values.x;
            scratch.keys[column + 1][at] = values.y;
            scratch.keys[column + 2][at] = values.z;
            scratch.keys[column + 3][at] = values.w;
        } else {
            scratch.keys[column][at] = *source;
        }
    }
}

// The scores of the tile's rows of one segment, for tiles of blocks first_tile, first_tile + tile_step, ...
DEVICE void score_rows(
    Scratch& scratch, int first_row, int rows, const int* positions, const int* pages, const float* pooled, float scale,
    bool all_rows, int first_tile, int tile_step, float* scores, int scores_step
) {
    const int lane = lane_of_warp(), warp = warp_of_block();
    const int own_row = warp % 4 * 4 + lane / 8, own_block = (warp / 4 * 8 + lane % 8) * QUAD;
    const int most = (positions[first_row + rows - 1] + 1) / BLOCK;
    const int finished = own_row < rows ? (positions[first_row + own_row] + 1) / BLOCK : 0;
    const bool wanted = finished > KEPT || all_rows;
    for (int first = first_tile * TILE; first < most; first += tile_step * TILE) {
        __syncthreads();
        load_keys(scratch, pooled, pages, first, smaller(TILE, most - first));
        __syncthreads();
        if (!wanted || first + own_block >= finished) continue;
        float totals[QUAD] = {};
#pragma unroll 1
        for (int head = 0; head < ROW_HEADS; head += QUAD) {
            const int query = own_row * ROW_HEADS + head;
            const Sums sums = lane_products(&scratch.queries[0][query], &scratch.keys[0][own_block]);
#pragma unroll
            for (int i = 0; i < QUAD; i++)
#pragma unroll
                for (int j = 0; j < QUAD; j++) totals[j] += sums.of[i][j] > 0.0f ? sums.of[i][j] : 0.0f;
        }
        const int64 at = static_cast<int64>(first_row + own_row) * scores_step + first + own_block;
#pragma unroll
        for (int j = 0; j < QUAD; j++)
            if (first + own_block + j < finished) scores[at + j] = totals[j] * scale;
    }
}

// blockIdx.x: a tile of rows, which may hold several segments; blockIdx.y: its first tile of blocks. As score_few.
extern "C" __global__ void __launch_bounds__(THREADS, 2) score_many(
    const float* index_q, int q_step, const float* weight, float eps, const float* cosines, const float* sines,
    const int* segment_of_row, const int* starts, const int* positions, const int* pages, int pages_width,
    const float* pooled, float scale, int all_rows, int first_row, int last_row, float* scores, int scores_step
) {
    DYNAMIC_SHARED(Scratch, shared);
    Scratch& scratch = *shared;
    const int tile_first = first_row + blockIdx.x * TILE_ROWS, tile_last = smaller(tile_first + TILE_ROWS, last_row);
    for (int i = threadIdx.x; i < (WIDTH - INDEX_DIM) * TILE; i += THREADS)
        scratch.keys[INDEX_DIM + i / TILE][i % TILE] = 0.0f;
    int row = tile_first;
    while (row < tile_last) {
        const int segment = segment_of_row[row], end = smaller(starts[segment + 1], tile_last);
        const int most = (positions[end - 1] + 1) / BLOCK;
        if ((most > KEPT || all_rows) && static_cast<int>(blockIdx.y) * TILE < most) {
            __syncthreads();
            norm_queries(
                scratch, index_q, q_step, row, end - row, weight, eps, cosines, sines, positions
            );
            score_rows(
                scratch, row, end - row, positions, pages + static_cast<int64>(segment) * pages_width, pooled, scale,
                all_rows, blockIdx.y, gridDim.y, scores - static_cast<int64>(first_row) * scores_step, scores_step
            );
        }
        row = end;
    }
}
