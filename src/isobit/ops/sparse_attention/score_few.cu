// Scores of finished blocks, one row at a time: a thread for each (head, block) of a tile of blocks.
// Macros: INDEX_HEADS, INDEX_DIM, BLOCK, KEPT, ROTARY.
#include "ops/sparse_attention/normed_rows.cuh"

constexpr int THREADS = 256;
constexpr int TILE = 64;                             // blocks of keys
constexpr int WIDTH = whole(INDEX_DIM, WARP) * WARP;
constexpr int KEY_STEP = WIDTH + 4;                  // so that eight lanes read sixteen bytes each without a conflict
constexpr int PAGE_BLOCKS = PAGE_ROWS / BLOCK;
constexpr int HEADS_TOGETHER = THREADS / TILE;

struct Scratch {
    float keys[TILE][KEY_STEP];
    float queries[INDEX_HEADS][WIDTH];
    float products[INDEX_HEADS][TILE];
};
static_assert(sizeof(Scratch) == SCRATCH_BYTES, "the launch gives another size");

DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Four accumulators of the lane sum, those of elements 4m to 4m + 3 of every 32.
DEVICE float4 accumulate(const float4* query, const float4* key, int m) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = m; i < WIDTH / 4; i += WARP / 4) {
        const float4 q = query[i], k = key[i];
        sum.x = fma32(q.x, k.x, sum.x);
        sum.y = fma32(q.y, k.y, sum.y);
        sum.z = fma32(q.z, k.z, sum.z);
        sum.w = fma32(q.w, k.w, sum.w);
    }
    return sum;
}

// The lane sum of a product by one thread: accumulators j and j + 16 first, then j and j + 8, ...
DEVICE float lane_product(const float4* query, const float4* key) {
    float4 fours[4];
#pragma unroll
    for (int m = 0; m < 4; m++) fours[m] = add4(accumulate(query, key, m), accumulate(query, key, m + 4));
    const float4 sum = add4(add4(fours[0], fours[2]), add4(fours[1], fours[3]));
    return (sum.x + sum.z) + (sum.y + sum.w);
}

DEVICE void norm_queries(
    Scratch& scratch, const float* index_q, const float* weight, float eps, const Angles<ROTARY>& angles
) {
    for (int head = warp_of_block(); head < INDEX_HEADS; head += THREADS / WARP) {
        float* query = scratch.queries[head];
        norm_and_rotate<INDEX_DIM, ROTARY>(
            hold<INDEX_DIM>(index_q + head * INDEX_DIM), hold<INDEX_DIM>(weight), eps, angles, query
        );
        for (int i = INDEX_DIM + lane_of_warp(); i < WIDTH; i += WARP) query[i] = -0.0f;
    }
}

DEVICE void load_keys(Scratch& scratch, const float* pooled, const int* pages, int first, int count) {
    if (INDEX_DIM % 4 == 0) {
        constexpr int PIECES = INDEX_DIM / 4;
#pragma unroll 4
        for (int piece = threadIdx.x; piece < count * PIECES; piece += THREADS) {
            const int at = piece / PIECES, block = first + at, column = piece % PIECES * 4;
            const int64 place = static_cast<int64>(pages[block / PAGE_BLOCKS]) * PAGE_BLOCKS + block % PAGE_BLOCKS;
            copy_async_16(&scratch.keys[at][column], pooled + place * INDEX_DIM + column);
        }
        copy_async_commit();
        copy_async_wait<0>();
    } else {
        for (int i = threadIdx.x; i < count * INDEX_DIM; i += THREADS) {
            const int at = i / INDEX_DIM, block = first + at;
            const int64 place = static_cast<int64>(pages[block / PAGE_BLOCKS]) * PAGE_BLOCKS + block % PAGE_BLOCKS;
            scratch.keys[at][i % INDEX_DIM] = pooled[place * INDEX_DIM + i % INDEX_DIM];
        }
    }
}

// blockIdx.y: the row; blockIdx.x: its first tile of blocks, then every gridDim.x-th. Writes scores[row][block] of
// finished blocks, of no row that keeps all it has finished unless `all_rows`. index_q: rows of q_step floats.
extern "C" __global__ void __launch_bounds__(THREADS) score_few(
    const float* index_q, int q_step, const float* weight, float eps, const float* cosines, const float* sines,
    const int* segment_of_row, const int* positions, const int* pages, int pages_width, const float* pooled,
    float scale, int all_rows, float* scores, int scores_step
) {
    await_inputs();
    DYNAMIC_SHARED(Scratch, shared);
    Scratch& scratch = *shared;
    const int row = blockIdx.y, position = positions[row], finished = (position + 1) / BLOCK;
    if ((finished <= KEPT && !all_rows) || static_cast<int>(blockIdx.x) * TILE >= finished) return;
    const int* own_pages = pages + static_cast<int64>(segment_of_row[row]) * pages_width;
    const Angles<ROTARY> angles = angles_at<ROTARY>(position, cosines, sines);
    norm_queries(scratch, index_q + static_cast<int64>(row) * q_step, weight, eps, angles);
    for (int i = threadIdx.x; i < TILE * (WIDTH - INDEX_DIM); i += THREADS)
        scratch.keys[i / (WIDTH - INDEX_DIM)][INDEX_DIM + i % (WIDTH - INDEX_DIM)] = 0.0f;
    const int within = threadIdx.x % TILE;
    for (int first = blockIdx.x * TILE; first < finished; first += gridDim.x * TILE) {
        const int count = smaller(TILE, finished - first);
        load_keys(scratch, pooled, own_pages, first, count);
        __syncthreads();
        for (int head = threadIdx.x / TILE; head < INDEX_HEADS; head += HEADS_TOGETHER)
            if (within < count)
                scratch.products[head][within] = lane_product(
                    reinterpret_cast<const float4*>(scratch.queries[head]),
                    reinterpret_cast<const float4*>(scratch.keys[within])
                );
        __syncthreads();
        if (threadIdx.x < count) {
            float sum = 0.0f;
            for (int head = 0; head < INDEX_HEADS; head++) {
                const float product = scratch.products[head][within];
                sum += product > 0.0f ? product : 0.0f;
            }
            scores[static_cast<int64>(row) * scores_step + first + within] = sum * scale;
        }
    }
}
