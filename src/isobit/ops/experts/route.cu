// The router's choice: one warp a row. Macros: COUNT experts, CHOSEN of them, RENORMALISE 0 or 1.
#include "device.cuh"

constexpr int PER_LANE = (COUNT + WARP - 1) / WARP;  // expert 32 j + lane is value j of that lane
constexpr int MOST_WARPS = 4;
constexpr int ABSENT = -1;  // below every probability's bits
constexpr float BELOW_ROUNDING = 0x1.ffffep-1f;  // what is smaller by this factor is so after a rounded division
constexpr float LEAST_DIVIDED = 0x1p-100f;       // and that from here on, by at most COUNT, gives no subnormal

struct Choice { int ids[CHOSEN]; float probabilities[CHOSEN]; };
struct Candidates { int ids[WARP]; float values[WARP]; };

// Of a row without NaN; with one, every probability is NaN whatever this gives.
DEVICE float largest_of(const float values[PER_LANE]) {
    float largest = values[0];
#pragma unroll
    for (int j = 1; j < PER_LANE; j++) largest = larger(largest, values[j]);
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) largest = larger(largest, shuffle_xor(largest, mask));
    return largest;
}

// Values become exponentials; returns their sum, by which softmax divides each.
DEVICE float exponentials(float (&values)[PER_LANE], int lane) {
    const float largest = largest_of(values);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        values[j] = exp32(values[j] - largest);
        if (WARP * j + lane < COUNT) sum = sum + values[j];
    }
    return lane_sum(sum);
}

// A probability's rank as a whole number; NaN, which a row has everywhere or nowhere, gives ties.
DEVICE int key_of(float probability) {
    return probability != probability ? 0 : static_cast<int>(bits_of(probability));
}

DEVICE unsigned lanes_below(int lane) { return (1u << lane) - 1; }

// How many lanes hold a larger key, or an equal one at a lower lane.
DEVICE int rank_of(int key, int lane) {
    int rank = 0;
#pragma unroll
    for (int other = 0; other < WARP; other++) {
        const int theirs = shuffle(key, other);
        rank += theirs > key || (theirs == key && other < lane);
    }
    return rank;
}

// Put what is marked into `ids` and `found` by ascending id, as far as `room` goes; returns how many there are.
DEVICE int gather(const bool marked[PER_LANE], const float values[PER_LANE], int lane, int room, int* ids,
                  float* found) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        const unsigned lanes = ballot(marked[j]);
        const int place = count + popcount(lanes & lanes_below(lane));
        if (marked[j] && place < room) {
            ids[place] = WARP * j + lane;
            found[place] = values[j];
        }
        count += popcount(lanes);
    }
    return count;
}

// At least CHOSEN exponentials are as large as the CHOSEN-th largest of the lanes' best. Divided by `total`, all that
// are smaller by more than rounding stay smaller, unless quotients are tiny: divide and rank the others, if they fit a
// warp.
DEVICE bool choose_of_few(const float values[PER_LANE], float total, int lane, Candidates& candidates, Choice& choice) {
    if (CHOSEN > WARP) return false;
    float best = values[0];
#pragma unroll
    for (int j = 1; j < PER_LANE; j++) best = larger(best, values[j]);
    const unsigned last = ballot(rank_of(key_of(best), lane) == CHOSEN - 1);
    const float least = shuffle(best, 31 - leading_zeros(last)) * BELOW_ROUNDING;
    if (total != total || !(least >= LEAST_DIVIDED)) return false;
    bool marked[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) marked[j] = values[j] >= least;
    const int count = gather(marked, values, lane, WARP, candidates.ids, candidates.values);
    __syncwarp();
    if (count > WARP) return false;
    const bool filled = lane < count;
    const float probability = filled ? candidates.values[lane] / total : 0.0f;
    const bool chosen = rank_of(filled ? key_of(probability) : ABSENT, lane) < CHOSEN;
    const int place = popcount(ballot(chosen) & lanes_below(lane));
    if (chosen) {
        choice.ids[place] = candidates.ids[lane];
        choice.probabilities[place] = probability;
    }
    return true;
}

// The largest probability left, CHOSEN times, ties to the lower id.
DEVICE void choose_one_by_one(float (&values)[PER_LANE], float total, int lane, Choice& choice) {
    int keys[PER_LANE];
    bool taken[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        values[j] = values[j] / total;
        keys[j] = WARP * j + lane < COUNT ? key_of(values[j]) : ABSENT;
        taken[j] = false;
    }
    for (int i = 0; i < CHOSEN; i++) {
        int best = ABSENT - 1, id = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            if (keys[j] > best) {
                best = keys[j];
                id = WARP * j + lane;
            }
#pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) {
            const int other = shuffle_xor(best, mask), other_id = shuffle_xor(id, mask);
            const bool better = other > best || (other == best && other_id < id);
            best = better ? other : best;
            id = better ? other_id : id;
        }
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            if (id == WARP * j + lane) {
                taken[j] = true;
                keys[j] = ABSENT;
            }
    }
    gather(taken, values, lane, CHOSEN, choice.ids, choice.probabilities);
}

DEVICE void write_choice(const Choice& choice, int lane, int* ids, float* weights) {
    float total = 0.0f;
    if (RENORMALISE)
        for (int i = 0; i < CHOSEN; i++) total = total + choice.probabilities[i];
    for (int i = lane; i < CHOSEN; i += WARP) {
        ids[i] = choice.ids[i];
        weights[i] = RENORMALISE ? choice.probabilities[i] / total : choice.probabilities[i];
    }
}

// logits [rows, COUNT] -> ids, weights [rows, CHOSEN].
extern "C" __global__ void route(const float* logits, int* ids, float* weights, int rows) {
    await_inputs();
    __shared__ Choice choices[MOST_WARPS];
    __shared__ Candidates candidates[MOST_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = blockIdx.x * (blockDim.x / WARP) + warp;
    if (row >= rows) return;
    const float* source = logits + static_cast<int64>(row) * COUNT;
    const float minus_infinity = float_of(0xff800000u);
    float values[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        const int i = WARP * j + lane;
        values[j] = i < COUNT ? source[i] : minus_infinity;
    }
    const float total = exponentials(values, lane);
    if (!choose_of_few(values, total, lane, candidates[warp], choices[warp]))
        choose_one_by_one(values, total, lane, choices[warp]);
    __syncwarp();
    const int64 place = static_cast<int64>(row) * CHOSEN;
    write_choice(choices[warp], lane, ids + place, weights + place);
}
