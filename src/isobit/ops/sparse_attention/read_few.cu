// Reading for few rows: a block of threads for each part of a row's list, then one that merges them.
// Macros: those of attend.cuh.
#include "ops/sparse_attention/attend.cuh"

constexpr int PART_ENTRIES = PART_KEYS / BLOCK;

struct PartScratch {
    Stage ring[STAGES];
    Scratch group;
    int places[PART_ENTRIES];
};
static_assert(sizeof(PartScratch) == SCRATCH_BYTES, "the launch gives another size");

// blockIdx: (part, unit, row). Writes the part's unscaled sums [row][head][part][HEAD_DIM], and its highest score and
// total, edges [row][head][part][2]; nothing for parts that the row has not. q_gate: rows of q_step floats.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) read_parts(
    const float* q_gate, int q_step, const float* weight, float eps, const float* cosines, const float* sines,
    const int* segment_of_row, const int* positions, const int* pages, int pages_width, const int* blocks,
    const int* counts, const half_bits* keys, const half_bits* values, float scale, float* sums_out, float* edges
) {
    await_inputs();
    DYNAMIC_SHARED(PartScratch, shared);
    Scratch& group = shared->group;
    const int part = blockIdx.x, row_index = blockIdx.z, thread = threadIdx.x, parts = gridDim.x;
    const float* q = q_gate + static_cast<int64>(row_index) * q_step;
    const HeldQueries held = hold_queries(q, weight, blockIdx.y, thread);
    const Row row = row_of(row_index, blockIdx.y, positions, counts);
    const int first = part * PART_KEYS, count = smaller(PART_KEYS, row.listed - first);
    if (count <= 0) return;
    const Angles<ROTARY> angles = angles_at<ROTARY>(row.position, cosines, sines);
    const int64 own_pages = static_cast<int64>(segment_of_row[row_index]) * pages_width;
    find_places(
        row, blocks + static_cast<int64>(row_index) * KEPT, pages + own_pages, part * PART_ENTRIES, PART_ENTRIES,
        shared->places, thread
    );
    __syncthreads();
    const int chunks = whole(count, STAGE_KEYS), steps = 2 * chunks;
    auto load = [&](int step) {
        if (step < steps) {
            const bool is_value = step >= chunks;
            const int chunk = is_value ? step - chunks : step;
            load_stage(
                shared->ring[step % STAGES], is_value ? values : keys, row, shared->places, chunk * STAGE_KEYS, count,
                thread
            );
        }
        copy_async_commit();
    };
    auto arrive = [&](int step) -> Stage& {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        return shared->ring[step % STAGES];
    };
    for (int step = 0; step < STAGES - 1; step++) load(step);
    float* work = reinterpret_cast<float*>(&shared->ring[STAGES - 1]);
    prepare_queries(group, work, held, row.heads.count, eps, angles, thread);
    if (DIM > HEAD_DIM) __syncthreads();
    clear_padding(&shared->ring[0][0][0], STAGES * STAGE_KEYS, thread);

    for (int chunk = 0; chunk < chunks; chunk++) score_stage(group, arrive(chunk), chunk, scale, thread);
    __syncthreads();
    weigh(group, row.heads.count, count, thread);
    float sums[SUM_TILES][4] = {};
    for (int chunk = 0; chunk < chunks; chunk++)
        add_stage(sums, group, arrive(chunks + chunk), chunk, count - chunk * STAGE_KEYS, thread);

    const int64 first_record = (static_cast<int64>(row_index) * HEADS + row.heads.first) * parts + part;
    const int lane = lane_of_warp();
#pragma unroll
    for (int tile = 0; tile < SUM_TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = lane / 4 + i / 2 * 8, dim = thread / WARP * WARP_DIMS + tile * 8 + lane % 4 * 2 + i % 2;
            if (head < row.heads.count && dim < HEAD_DIM)
                sums_out[(first_record + static_cast<int64>(head) * parts) * HEAD_DIM + dim] = sums[tile][i];
        }
    if (thread < row.heads.count) {
        float* edge = edges + 2 * (first_record + static_cast<int64>(thread) * parts);
        edge[0] = group.highest[thread];
        edge[1] = group.total[thread];
    }
}

constexpr int HELD_PARTS = 20;  // whose sums a thread asks for at a time

// blockIdx: (head, row). The parts in order, the division and the gate: out [row][head][HEAD_DIM]. Dynamic shared
// memory: parts * (Merge, float2).
extern "C" __global__ void merge_parts(
    const float* sums, const float* edges, int parts, const float* q_gate, int q_step, const int* positions,
    const int* counts, float* out
) {
    await_inputs();
    DYNAMIC_SHARED(Merge, merges);
    float* ends = reinterpret_cast<float*>(merges + parts);
    const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x;
    const int64 record = static_cast<int64>(row) * HEADS + head;
    const float* own = sums + record * parts * HEAD_DIM;
    const float* edge = edges + 2 * record * parts;
    float held[HELD_PARTS];
    auto hold = [&](int first, int dim) {
#pragma unroll
        for (int i = 0; i < HELD_PARTS; i++)
            held[i] = first + i < parts ? own[(first + i) * HEAD_DIM + dim] : 0.0f;
    };
    if (thread < HEAD_DIM) hold(0, thread);
    for (int i = thread; i < 2 * parts; i += blockDim.x) ends[i] = edge[i];
    const int listed = counts[row] * BLOCK + (positions[row] + 1) % BLOCK, found = whole(listed, PART_KEYS);
    __syncthreads();
    for (int part = 1 + thread; part < found; part += blockDim.x) {
        float highest = ends[0];
#pragma unroll 8
        for (int before = 1; before < part; before++) highest = highest > ends[2 * before] ? highest : ends[2 * before];
        merges[part] = merged(highest, ends[2 * part]);
    }
    __syncthreads();
    const float* gates = q_gate + static_cast<int64>(row) * q_step + (2 * head + 1) * HEAD_DIM;
    for (int dim = thread; dim < HEAD_DIM; dim += blockDim.x) {
        if (dim != thread) hold(0, dim);
        const float gate = gates[dim];
        float sum = held[0], total = ends[1];
        for (int first = 0; first < found; first += HELD_PARTS) {
            if (first) hold(first, dim);
#pragma unroll
            for (int i = 0; i < HELD_PARTS; i++) {
                const int part = first + i;
                if (part == 0 || part >= found) continue;
                sum = joined(merges[part], sum, held[i]);
                total = joined(merges[part], total, ends[2 * part + 1]);
            }
        }
        out[record * HEAD_DIM + dim] = gated(sum, total, gate);
    }
}
