// Storing rows: keys and values as halves, raw index keys, and the pooled keys of the blocks that rows finish.
// Macros: KV_HEADS, HEAD_DIM, INDEX_DIM, BLOCK, ROTARY.
#include "ops/sparse_attention/normed_rows.cuh"

constexpr int SCRATCH = HEAD_DIM > INDEX_DIM ? HEAD_DIM : INDEX_DIM;  // floats of one warp

DEVICE void store_halves(const float* x, int count, half_bits* halves) {
    for (int i = lane_of_warp(); i < count; i += WARP) halves[i] = half_of(x[i]);
}

// average [INDEX_DIM] = the mean of the block that pool row `last` finishes; its rows from `first_given` on are given.
DEVICE void average_block(
    const float* raw, int last, const float* given, int64 given_step, int count_given, float* average
) {
    for (int i = lane_of_warp(); i < INDEX_DIM; i += WARP) {
        float total = 0.0f;
        for (int row = 0; row < BLOCK; row++) {
            const int back = BLOCK - 1 - row;
            const float value = back < count_given ? given[i - back * given_step]
                                                   : raw[static_cast<int64>(last - back) * INDEX_DIM + i];
            total = row == 0 ? value : total + value;
        }
        average[i] = total / static_cast<float>(BLOCK);
    }
    __syncwarp();
}

// One block a row; its warps share the row's 2 * KV_HEADS + 1 pieces. k, v, index_k: rows of so many floats apart.
extern "C" __global__ void write_rows(
    const float* k, int k_step, const float* v, int v_step, const float* index_k, int index_step,
    const float* k_weight, const float* index_weight, float eps, const float* cosines, const float* sines,
    const int* segment_of_row, const int* starts, const int* positions, const int* pages, int pages_width,
    half_bits* keys, half_bits* values, float* raw, float* pooled
) {
    await_inputs();
    DYNAMIC_SHARED(float, scratch);
    float* work = scratch + warp_of_block() * SCRATCH;
    const int row = blockIdx.x, position = positions[row], segment = segment_of_row[row];
    const int slot = pool_row(pages + static_cast<int64>(segment) * pages_width, position);
    for (int piece = warp_of_block(); piece < 2 * KV_HEADS + 1; piece += blockDim.x / WARP) {
        if (piece < KV_HEADS) {
            const float* head = k + static_cast<int64>(row) * k_step + piece * HEAD_DIM;
            norm_and_rotate<HEAD_DIM, ROTARY>(
                hold<HEAD_DIM>(head), hold<HEAD_DIM>(k_weight), eps, angles_at<ROTARY>(position, cosines, sines), work
            );
            store_halves(work, HEAD_DIM, keys + (static_cast<int64>(slot) * KV_HEADS + piece) * HEAD_DIM);
            __syncwarp();
        } else if (piece < 2 * KV_HEADS) {
            const int head = piece - KV_HEADS;
            store_halves(
                v + static_cast<int64>(row) * v_step + head * HEAD_DIM, HEAD_DIM,
                values + (static_cast<int64>(slot) * KV_HEADS + head) * HEAD_DIM
            );
        } else {
            const float* own = index_k + static_cast<int64>(row) * index_step;
            float* raw_row = raw + static_cast<int64>(slot) * INDEX_DIM;
            for (int i = lane_of_warp(); i < INDEX_DIM; i += WARP) raw_row[i] = own[i];
            if ((position + 1) % BLOCK != 0) continue;
            average_block(raw, slot, own, index_step, row - starts[segment] + 1, work);
            norm_and_rotate<INDEX_DIM, ROTARY>(
                hold<INDEX_DIM>(work), hold<INDEX_DIM>(index_weight), eps,
                angles_at<ROTARY>(position + 1 - BLOCK, cosines, sines), work
            );
            float* target = pooled + static_cast<int64>(slot / BLOCK) * INDEX_DIM;
            for (int i = lane_of_warp(); i < INDEX_DIM; i += WARP) target[i] = work[i];
            __syncwarp();
        }
    }
}
