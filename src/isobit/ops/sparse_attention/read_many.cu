// Reading for many rows: ROWS rows a block of threads, in step, each row's parts one after another.
// Macros: those of attend.cuh, ROWS, and BLOCKS_AT_ONCE (of threads on a multiprocessor).
#include "ops/sparse_attention/attend.cuh"

constexpr int ENTRIES = KEPT + 1;

struct RowScratch {
    Stage ring[STAGES];
    Scratch group;
    Merge merges[TILE_HEADS];
    float highest[TILE_HEADS], total[TILE_HEADS];  // of the parts so far
    int places[ENTRIES];
};
static_assert(ROWS * sizeof(RowScratch) == SCRATCH_BYTES, "the launch gives another size");

// What is loaded when: the keys of a part, chunk by chunk, then its values, then the next part's keys.
struct Step {
    int part, chunk;
    bool is_value;
};
DEVICE int chunks_of(int part, int listed) { return whole(smaller(PART_KEYS, listed - part * PART_KEYS), STAGE_KEYS); }
DEVICE Step step_at(int step, int listed) {
    constexpr int PART_STEPS = 2 * PART_KEYS / STAGE_KEYS;
    const int part = step / PART_STEPS, within = step % PART_STEPS, chunks = chunks_of(part, listed);
    const bool is_value = within >= chunks;
    return {part, is_value ? within - chunks : within, is_value};
}
DEVICE int steps_of(int listed) {
    return listed / PART_KEYS * (2 * PART_KEYS / STAGE_KEYS) + 2 * whole(listed % PART_KEYS, STAGE_KEYS);
}

// The parts before join a new one; by the warp that weighed the heads, a lane a head.
DEVICE void merge_head(RowScratch& own, int head, bool is_first) {
    const float after = own.group.highest[head], total = own.group.total[head];
    const Merge merge = is_first ? Merge{after, 0.0f, 1.0f} : merged(own.highest[head], after);
    own.total[head] = is_first ? total : joined(merge, own.total[head], total);
    own.highest[head] = merge.highest;
    own.merges[head] = merge;
}

DEVICE void join_sums(float (&all)[SUM_TILES][4], const float (&part)[SUM_TILES][4], const RowScratch& own) {
    const int head = lane_of_warp() / 4;
    const Merge low = own.merges[head], high = own.merges[head + 8];
#pragma unroll
    for (int tile = 0; tile < SUM_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) all[tile][i] = joined(i < 2 ? low : high, all[tile][i], part[tile][i]);
}

DEVICE void write_out(
    const float (&sums)[SUM_TILES][4], const RowScratch& own, const Row& row, const float* q, float* out, int thread
) {
    const int lane = lane_of_warp();
#pragma unroll
    for (int tile = 0; tile < SUM_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = lane / 4 + i / 2 * 8, dim = thread / WARP * WARP_DIMS + tile * 8 + lane % 4 * 2 + i % 2;
            if (head >= row.heads.count || dim >= HEAD_DIM) continue;
            const float gate = q[(2 * (row.heads.first + head) + 1) * HEAD_DIM + dim];
            out[(row.heads.first + head) * HEAD_DIM + dim] = gated(sums[tile][i], own.total[head], gate);
        }
}

// blockIdx: (ROWS rows, the last first: their lists are the longest; unit). out: [row][head][HEAD_DIM].
extern "C" __global__ void __launch_bounds__(ROWS * GROUP_THREADS, BLOCKS_AT_ONCE) read_many(
    const float* q_gate, int q_step, const float* weight, float eps, const float* cosines, const float* sines,
    const int* segment_of_row, const int* positions, const int* pages, int pages_width, const int* blocks,
    const int* counts, const half_bits* keys, const half_bits* values, float scale, int rows, float* out
) {
    DYNAMIC_SHARED(RowScratch, shared);
    const int thread = threadIdx.x % GROUP_THREADS, group_index = threadIdx.x / GROUP_THREADS;
    const int first_row = (gridDim.x - 1 - blockIdx.x) * ROWS, row_index = smaller(first_row + group_index, rows - 1);
    RowScratch& own = shared[group_index];
    Scratch& group = own.group;
    const float* q = q_gate + static_cast<int64>(row_index) * q_step;
    const HeldQueries held = hold_queries(q, weight, blockIdx.y, thread);
    const Row row = row_of(row_index, blockIdx.y, positions, counts);
    int longest = row.listed;
    for (int i = 0; i < ROWS; i++) {
        const int other = smaller(first_row + i, rows - 1);
        longest = larger(longest, counts[other] * BLOCK + (positions[other] + 1) % BLOCK);
    }
    const Angles<ROTARY> angles = angles_at<ROTARY>(row.position, cosines, sines);
    const int64 own_pages = static_cast<int64>(segment_of_row[row_index]) * pages_width;
    find_places(
        row, blocks + static_cast<int64>(row_index) * KEPT, pages + own_pages, 0, ENTRIES, own.places, thread
    );
    __syncthreads();
    const int steps = steps_of(longest);
    auto load = [&](int at) {
        if (at < steps) {
            const Step step = step_at(at, longest);
            load_stage(
                own.ring[at % STAGES], step.is_value ? values : keys, row, own.places,
                step.part * PART_KEYS + step.chunk * STAGE_KEYS, row.listed, thread
            );
        }
        copy_async_commit();
    };
    auto arrive = [&](int step) -> Stage& {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        return own.ring[step % STAGES];
    };
    for (int step = 0; step < STAGES - 1; step++) load(step);
    float* work = reinterpret_cast<float*>(&own.ring[STAGES - 1]);
    prepare_queries(group, work, held, row.heads.count, eps, angles, thread);
    if (DIM > HEAD_DIM) __syncthreads();
    clear_padding(&own.ring[0][0][0], STAGES * STAGE_KEYS, thread);

    float all[SUM_TILES][4] = {};
    int step = 0;
    for (int part = 0; part * PART_KEYS < longest; part++) {
        const int chunks = chunks_of(part, longest), count = smaller(PART_KEYS, row.listed - part * PART_KEYS);
        for (int chunk = 0; chunk < chunks; chunk++) score_stage(group, arrive(step++), chunk, scale, thread);
        __syncthreads();
        if (count > 0) {
            weigh(group, row.heads.count, count, thread);
            const int head = thread / WARP + lane_of_warp() * GROUP_WARPS;
            if (head < row.heads.count) merge_head(own, head, part == 0);
        }
        float sums[SUM_TILES][4] = {};
        for (int chunk = 0; chunk < chunks; chunk++)
            add_stage(sums, group, arrive(step++), chunk, count - chunk * STAGE_KEYS, thread);
        if (part == 0) {
#pragma unroll
            for (int i = 0; i < SUM_TILES * 4; i++) all[i / 4][i % 4] = sums[i / 4][i % 4];
        } else if (count > 0) {
            join_sums(all, sums, own);
        }
    }
    if (first_row + group_index < rows)
        write_out(all, own, row, q, out + static_cast<int64>(row_index) * HEADS * HEAD_DIM, thread);
}
