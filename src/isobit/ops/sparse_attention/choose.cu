// The best blocks of every row, ascending: a radix search for the threshold, which ends by ranking what few keys are
// left, then a stable compaction.
// Macros: BLOCK, KEPT. Scores are never negative and never NaN, so that their bits are in their order.
#include "ops/sparse_attention/normed_rows.cuh"

constexpr int CACHED = 8192;  // scores of a row that are kept in shared memory
constexpr int BINS = 2048;
constexpr int GROUP_BINS = 64;
constexpr int PASSES = 3;
constexpr int BATCH = 8;  // scores that a thread reads at a time
constexpr int FEW = 128;  // keys that are ranked by comparing all of them
constexpr unsigned NO_KEY = 0xffffffffu;

#ifdef EMULATED
DEVICE int add_to(int* bin, int count) { return (*bin += count) - count; }
#else
DEVICE int add_to(int* bin, int count) { return atomicAdd(bin, count); }
#endif

struct Choice {
    int bins[BINS];
    int group_sums[BINS / GROUP_BINS];
    int threshold, best;      // the threshold's upper bits so far; how many of the keys with these bits are chosen
    int sharing, ranked;      // how many keys have these bits; how many of them are in `few`
    unsigned few[FEW];
    int greater[WARP], equal[WARP];  // of each warp's range of blocks
    float cached[CACHED];
};

DEVICE int sum_of_lanes(int value) {
    for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}

// The sum over this and the higher lanes.
DEVICE int sum_from_lane(int value) {
    for (int step = 1; step < WARP; step <<= 1) {
        const int above = shuffle(value, lane_of_warp() + step);
        if (lane_of_warp() + step < WARP) value += above;
    }
    return value;
}

// The highest lane at which the sum from the top reaches `best`.
DEVICE int reaching_lane(int from_lane, int best) {
    return WARP - 1 - leading_zeros(ballot(from_lane >= best));
}

// The keys of blocks first, first + step, ...; NO_KEY from `last` on.
DEVICE void read_keys(unsigned (&keys)[BATCH], const float* scores, int first, int step, int last) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int block = first + i * step;
        keys[i] = block < last ? bits_of(scores[block]) : NO_KEY;
    }
}

// bins[d] += how many keys have digit d below the threshold's upper bits. Zeros, which are many, are counted apart.
DEVICE void count_digits(Choice& choice, const float* scores, int finished, int shift, int width) {
    const unsigned upper = choice.threshold;
    int zeros = 0;
    for (int base = 0; base < finished; base += blockDim.x * BATCH) {
        unsigned keys[BATCH];
        read_keys(keys, scores, base + threadIdx.x, blockDim.x, finished);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            zeros += keys[i] == 0;
            if (keys[i] != 0 && keys[i] >> (shift + width) == upper)
                add_to(&choice.bins[keys[i] >> shift & ((1 << width) - 1)], 1);
        }
    }
    zeros = sum_of_lanes(zeros);
    if (zeros && upper == 0 && lane_of_warp() == 0) add_to(&choice.bins[0], zeros);
}

// By the first warp: the digit of the threshold, and how many keys with it are chosen.
DEVICE void find_digit(Choice& choice, int width) {
    const int lane = lane_of_warp(), best = choice.best;
    const int own = choice.group_sums[lane], from_group = sum_from_lane(own);
    const int group = reaching_lane(from_group, best);
    const int left = best - (shuffle(from_group, group) - shuffle(own, group));
    const int* bins = choice.bins + group * GROUP_BINS + 2 * lane;
    const int low = bins[0], high = bins[1], from_pair = sum_from_lane(low + high);
    const int pair = reaching_lane(from_pair, left);
    __syncwarp();  // votes order no memory: every lane has read what one of them now writes
    if (lane == pair) {
        const int within = left - (from_pair - low - high);
        const bool upper = high >= within;
        choice.threshold = choice.threshold << width | (group * GROUP_BINS + 2 * lane + upper);
        choice.best = upper ? within : within - high;
        choice.sharing = upper ? high : low;
    }
}

DEVICE void clear_bins(Choice& choice) {
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) choice.bins[bin] = 0;
}

// The whole threshold, where few keys share its bits above `shift`: of these the one with fewer than `best` larger
// ones, and no fewer with its equals.
DEVICE void rank_few(Choice& choice, const float* scores, int finished, int shift) {
    const unsigned upper = choice.threshold;
    const int best = choice.best, count = choice.sharing;
    for (int base = 0; base < finished; base += blockDim.x * BATCH) {
        unsigned keys[BATCH];
        read_keys(keys, scores, base + threadIdx.x, blockDim.x, finished);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (keys[i] != NO_KEY && keys[i] >> shift == upper) choice.few[add_to(&choice.ranked, 1)] = keys[i];
    }
    __syncthreads();
    for (int own = threadIdx.x; own < count; own += blockDim.x) {
        const unsigned key = choice.few[own];
        int larger_keys = 0, equal = 0, equal_before = 0;
#pragma unroll 8
        for (int other = 0; other < count; other++) {
            const unsigned theirs = choice.few[other];
            larger_keys += theirs > key;
            equal += theirs == key;
            equal_before += theirs == key && other < own;
        }
        if (larger_keys < best && best <= larger_keys + equal && !equal_before) {
            choice.threshold = key;
            choice.best = best - larger_keys;
        }
    }
    __syncthreads();
}

// Sets `threshold` to the bits of the KEPT-th largest score, `best` to how many equal ones belong to the best. The bins
// are clear, and not yet to be seen by all.
DEVICE void find_threshold(Choice& choice, const float* scores, int finished) {
    if (threadIdx.x == 0) {
        choice.threshold = choice.ranked = 0;
        choice.best = KEPT;
    }
    for (int pass = 0; pass < PASSES; pass++) {
        const int width = pass == 0 ? 11 : 10, shift = 20 - 10 * pass;
        if (pass > 0) clear_bins(choice);
        __syncthreads();
        count_digits(choice, scores, finished, shift, width);
        __syncthreads();
        for (int group = warp_of_block(); group < BINS / GROUP_BINS; group += blockDim.x / WARP) {
            const int* bins = choice.bins + group * GROUP_BINS + lane_of_warp();
            const int sum = sum_of_lanes(bins[0] + bins[WARP]);
            if (lane_of_warp() == 0) choice.group_sums[group] = sum;
        }
        __syncthreads();
        if (warp_of_block() == 0) find_digit(choice, width);
        __syncthreads();
        if (shift && choice.sharing <= FEW) return rank_few(choice, scores, finished, shift);
    }
}

// Writes the chosen of the KEPT blocks; each warp has a range of blocks, and knows what the ranges before it hold.
DEVICE void write_chosen(Choice& choice, const float* scores, int finished, int* chosen) {
    const int warp = warp_of_block(), warps = blockDim.x / WARP, lane = lane_of_warp();
    const int range = whole(whole(finished, warps), WARP) * WARP;
    const int first = smaller(warp * range, finished), last = smaller(first + range, finished);
    const unsigned threshold = choice.threshold;
    int greater = 0, equal = 0;
    for (int base = first; base < last; base += WARP * BATCH) {
        unsigned keys[BATCH];
        read_keys(keys, scores, base + lane, WARP, last);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            greater += keys[i] != NO_KEY && keys[i] > threshold;
            equal += keys[i] == threshold;
        }
    }
    greater = sum_of_lanes(greater);
    equal = sum_of_lanes(equal);
    if (lane == 0) {
        choice.greater[warp] = greater;
        choice.equal[warp] = equal;
    }
    __syncthreads();
    greater = sum_of_lanes(lane < warp ? choice.greater[lane] : 0);
    equal = sum_of_lanes(lane < warp ? choice.equal[lane] : 0);
    const unsigned lower_lanes = (1u << lane) - 1;
    for (int base = first; base < last; base += WARP * BATCH) {
        unsigned keys[BATCH];
        read_keys(keys, scores, base + lane, WARP, last);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const unsigned above = ballot(keys[i] != NO_KEY && keys[i] > threshold);
            const unsigned same = ballot(keys[i] == threshold);
            const int equal_before = equal + popcount(same & lower_lanes);
            const int at = greater + popcount(above & lower_lanes) + smaller(equal_before, choice.best);
            if (above >> lane & 1 || (same >> lane & 1 && equal_before < choice.best))
                chosen[at] = base + lane + i * WARP;
            greater += popcount(above);
            equal += popcount(same);
        }
    }
}

// One block of threads a row. scores: rows of `scores_step` floats, 0 where every row keeps all that it has finished.
extern "C" __global__ void choose_blocks(
    const float* scores, int scores_step, const int* positions, int* blocks, int* counts
) {
    __shared__ Choice choice;
    clear_bins(choice);
    await_inputs();
    const int row = blockIdx.x, thread = threadIdx.x;
    const float* own = scores + static_cast<int64>(row) * scores_step;
    const float first = thread < scores_step ? own[thread] : 0.0f;  // on its way beside the position
    const int finished = (positions[row] + 1) / BLOCK;
    int* chosen = blocks + static_cast<int64>(row) * KEPT;
    if (thread == 0) counts[row] = smaller(finished, KEPT);
    if (finished <= KEPT) {
        for (int i = thread; i < KEPT; i += blockDim.x) chosen[i] = i < finished ? i : -1;
        return;
    }
    if (finished <= CACHED) {
        if (thread < finished) choice.cached[thread] = first;
        for (int i = thread + blockDim.x; i < finished; i += blockDim.x) choice.cached[i] = own[i];
        own = choice.cached;
    }
    find_threshold(choice, own, finished);
    write_chosen(choice, own, finished, chosen);
}
