// Attending of one row's query heads of one key-value head over parts of its list of keys (docs/arithmetic.md, *On
// CUDA*). 128 threads, a group, share a row. Macros: HEADS, KV_HEADS, HEAD_DIM, BLOCK, KEPT, ROTARY, STAGE_KEYS (keys,
// or values, that are loaded at a time: 32 or 64), STAGES (how many of these there is memory for), THROUGH_L1 (whether
// rows of a multiprocessor may share what they load). The last three change no bit.
#pragma once
#include "ops/sparse_attention/normed_rows.cuh"

constexpr int PART_KEYS = 128;
constexpr int GROUP_WARPS = 4;
constexpr int GROUP_THREADS = GROUP_WARPS * WARP;
constexpr int TILE_HEADS = 16;                            // query heads of one product
constexpr int SHARING_HEADS = HEADS / KV_HEADS;           // query heads of one key-value head
constexpr int HEAD_TILES = whole(SHARING_HEADS, TILE_HEADS);
constexpr int WARP_HEADS = whole(SHARING_HEADS < TILE_HEADS ? SHARING_HEADS : TILE_HEADS, GROUP_WARPS);
constexpr int DIM = whole(HEAD_DIM, 16 * GROUP_WARPS) * 16 * GROUP_WARPS;
constexpr int DIM_STEP = DIM + 8;                         // halves of a row, so that eight rows lie in all banks
constexpr int WEIGHT_STEP = 2 * PART_KEYS + 8;
constexpr int SCORE_STEP = WEIGHT_STEP / 2;
constexpr int WARP_DIMS = DIM / GROUP_WARPS;              // dims of the values that a warp sums
constexpr int SUM_TILES = WARP_DIMS / 8;
constexpr int PIECES = HEAD_DIM / 8;                      // of a key, 16 bytes each
constexpr int WARP_KEYS = STAGE_KEYS / GROUP_WARPS;       // keys of a stage that a warp loads and scores
constexpr float WEIGHT_SCALE = 32768.0f;                  // weights as halves are scaled up: little is subnormal

struct Heads {
    int first, count, kv_head;
};
// The query heads of a unit: up to TILE_HEADS of those that share a key-value head.
DEVICE Heads heads_of(int unit) {
    const int kv_head = unit / HEAD_TILES, first = unit % HEAD_TILES * TILE_HEADS;
    return {kv_head * SHARING_HEADS + first, smaller(TILE_HEADS, SHARING_HEADS - first), kv_head};
}

struct Row {
    int position, listed;  // keys of the list: the selected blocks' and the unfinished block's
    Heads heads;
};

struct alignas(16) Scratch {
    half_bits queries[TILE_HEADS][DIM_STEP];
    union {
        float scores[TILE_HEADS][SCORE_STEP];
        half_bits weights[TILE_HEADS][WEIGHT_STEP];  // the upper halves of PART_KEYS weights, then the lower
    };
    float highest[TILE_HEADS], total[TILE_HEADS];
};
using Stage = half_bits[STAGE_KEYS][DIM_STEP];

DEVICE Row row_of(int row, int unit, const int* positions, const int* counts) {
    const int position = positions[row];
    return {position, counts[row] * BLOCK + (position + 1) % BLOCK, heads_of(unit)};
}

// places[i] = the pool row at which entry first_entry + i of the row's list begins: its blocks, then the unfinished
// one.
DEVICE void find_places(
    const Row& row, const int* blocks, const int* pages, int first_entry, int entries, int* places, int thread
) {
    const int selected = row.listed / BLOCK, all = whole(row.listed, BLOCK);
    for (int i = thread; i < smaller(entries, all - first_entry); i += GROUP_THREADS) {
        const int entry = first_entry + i;
        const int block = entry < selected ? blocks[entry] : (row.position + 1) / BLOCK;
        places[i] = pool_row(pages, block * BLOCK);
    }
}

#if THROUGH_L1 && !defined(EMULATED)
DEVICE void copy_row_piece(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(shared_address(shared)), "l"(global) : "memory");
}
#else
DEVICE void copy_row_piece(void* shared, const void* global) { copy_async_16(shared, global); }
#endif

// A warp's keys of a stage, those of ranks first_key on; those past the end of the list become zeros.
template <bool ARE_ALL_LISTED>
DEVICE void load_warp_keys(half_bits* target, const half_bits* head, const int* places, int first_key, int listed) {
    constexpr int TOGETHER = PIECES < WARP ? WARP / PIECES : 1;  // keys that a warp loads at a time
    constexpr int64 KEY_HALVES = KV_HEADS * HEAD_DIM;
    const int within = lane_of_warp() / PIECES;
    if (within >= TOGETHER) return;
    // first_key is a multiple of WARP_KEYS, and that a multiple of BLOCK or a part of it.
    const int* entry = places + static_cast<unsigned>(first_key) / BLOCK;
    head += BLOCK <= WARP_KEYS ? 0 : static_cast<unsigned>(first_key) % BLOCK * KEY_HALVES;
    constexpr int LOADS = whole(WARP_KEYS, TOGETHER);
    const half_bits* sources[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const unsigned key = i * TOGETHER + within;
        const bool is_listed = key < WARP_KEYS && (ARE_ALL_LISTED || first_key + static_cast<int>(key) < listed);
        sources[i] = is_listed ? head + entry[key / BLOCK] * KEY_HALVES + key % BLOCK * KEY_HALVES : nullptr;
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int key = i * TOGETHER + within;
        if (key >= WARP_KEYS) break;
#pragma unroll
        for (int piece = lane_of_warp() % PIECES; piece < PIECES; piece += WARP) {
            half_bits* shared = target + key * DIM_STEP + piece * 8;
            if (ARE_ALL_LISTED || sources[i]) copy_row_piece(shared, sources[i] + piece * 8);
            else *reinterpret_cast<uint4*>(shared) = make_uint4(0, 0, 0, 0);
        }
    }
}

// The keys (or values) first .. first + STAGE_KEYS - 1 of the list; zeros past its end. places: from entry 0 on.
DEVICE void load_stage(
    Stage& stage, const half_bits* pool, const Row& row, const int* places, int first, int listed, int thread
) {
    const half_bits* head = pool + row.heads.kv_head * HEAD_DIM;
    if constexpr (HEAD_DIM % 8 == 0) {
        const int own = thread / WARP * WARP_KEYS;
        if (first + STAGE_KEYS <= listed) load_warp_keys<true>(stage[own], head, places, first + own, listed);
        else load_warp_keys<false>(stage[own], head, places, first + own, listed);
    } else {
        for (int i = thread; i < STAGE_KEYS * HEAD_DIM; i += GROUP_THREADS) {
            const int key = i / HEAD_DIM, rank = first + key;
            const int64 place = rank < listed ? places[rank / BLOCK] + rank % BLOCK : 0;
            stage[key][i % HEAD_DIM] = rank < listed ? head[place * (KV_HEADS * HEAD_DIM) + i % HEAD_DIM] : 0;
        }
    }
}

// Zeros past HEAD_DIM in rows of DIM_STEP halves.
DEVICE void clear_padding(half_bits* rows, int count, int thread) {
    if constexpr (DIM > HEAD_DIM)
        for (int i = thread; i < count * (DIM - HEAD_DIM); i += GROUP_THREADS)
            rows[i / (DIM - HEAD_DIM) * DIM_STEP + HEAD_DIM + i % (DIM - HEAD_DIM)] = 0;
}

// The rows of q that a warp norms, every fourth head's, read early; q: [HEADS][2][HEAD_DIM].
struct HeldQueries {
    HeldRow<HEAD_DIM> rows[WARP_HEADS], weight;
};
DEVICE HeldQueries hold_queries(const float* q, const float* weight, int unit, int thread) {
    const Heads heads = heads_of(unit);
    HeldQueries held;
    held.weight = hold<HEAD_DIM>(weight);
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
        const int head = heads.first + smaller(thread / WARP + i * GROUP_WARPS, heads.count - 1);
        held.rows[i] = hold<HEAD_DIM>(q + static_cast<int64>(head) * 2 * HEAD_DIM);
    }
    return held;
}

// The row's queries, normed and rotated in float32, as halves; zeros for absent heads. work: HEAD_DIM floats a warp.
DEVICE void prepare_queries(
    Scratch& scratch, float* work, const HeldQueries& held, int heads, float eps, const Angles<ROTARY>& angles,
    int thread
) {
    float* own = work + thread / WARP * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < TILE_HEADS / GROUP_WARPS; i++) {
        const int head = thread / WARP + i * GROUP_WARPS;
        const bool is_present = i < WARP_HEADS && head < heads;
        if (is_present)
            norm_and_rotate<HEAD_DIM, ROTARY>(held.rows[i < WARP_HEADS ? i : 0], held.weight, eps, angles, own);
        for (int dim = lane_of_warp(); dim < DIM; dim += WARP)
            scratch.queries[head][dim] = is_present && dim < HEAD_DIM ? half_of(own[dim]) : 0;
        __syncwarp();
    }
}

// The scores of a stage's keys: chunk i of the part; a warp scores WARP_KEYS keys, eight a chain.
DEVICE void score_stage(Scratch& scratch, const Stage& stage, int chunk, float scale, int thread) {
    constexpr int CHAINS = WARP_KEYS / 8;
    const int own = thread / WARP * WARP_KEYS, lane = lane_of_warp();
    float sums[CHAINS][4] = {};
#pragma unroll 4
    for (int dim = 0; dim < DIM; dim += 32) {
        unsigned low[4], high[4], keys[CHAINS][4];
        load_matrix_x4(low, &scratch.queries[lane % 16][dim + lane / 16 * 8]);
        load_matrix_x4(high, &scratch.queries[lane % 16][dim + 16 + lane / 16 * 8]);
#pragma unroll
        for (int i = 0; i < CHAINS; i++) load_matrix_x4(keys[i], &stage[own + i * 8 + lane % 8][dim + lane / 8 * 8]);
#pragma unroll
        for (int i = 0; i < CHAINS; i++) mma_16x8x16(sums[i], low, keys[i]);
#pragma unroll
        for (int i = 0; i < CHAINS; i++) mma_16x8x16(sums[i], high, keys[i] + 2);
    }
#pragma unroll
    for (int i = 0; i < CHAINS; i++) {
        const int head = lane / 4, key = chunk * STAGE_KEYS + own + i * 8 + lane % 4 * 2;
        const float* s = sums[i];
        *reinterpret_cast<float2*>(&scratch.scores[head][key]) = make_float2(s[0] * scale, s[1] * scale);
        *reinterpret_cast<float2*>(&scratch.scores[head + 8][key]) = make_float2(s[2] * scale, s[3] * scale);
    }
}

// Of each of the warp's heads, every fourth: the scores of the part's first `count` keys become weights, as two halves
// each; the head's highest score and total.
DEVICE void weigh(Scratch& scratch, int heads, int count, int thread) {
    constexpr int HELD = PART_KEYS / WARP;
    const int first_head = thread / WARP, lane = lane_of_warp();
    float held[WARP_HEADS][HELD], highest[WARP_HEADS], total[WARP_HEADS];
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
        for (int t = 0; t < HELD; t++) {
            const int key = lane + t * WARP;
            held[i][t] = scratch.scores[first_head + i * GROUP_WARPS][key < count ? key : 0];
            highest[i] = t == 0 || held[i][t] > highest[i] ? held[i][t] : highest[i];
        }
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1)
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++) {
            const float other = shuffle_xor(highest[i], mask);
            highest[i] = other > highest[i] ? other : highest[i];
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
        total[i] = 0.0f;
#pragma unroll
        for (int t = 0; t < HELD; t++) {
            held[i][t] = lane + t * WARP < count ? exp32(held[i][t] - highest[i]) : 0.0f;
            total[i] += held[i][t];
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) total[i] = lane_sum(total[i]);
#pragma unroll
    for (int i = 0; i < WARP_HEADS; i++) {
        const int head = first_head + i * GROUP_WARPS;
        if (head >= heads) break;
#pragma unroll
        for (int t = 0; t < HELD; t++) {
            const float weight = held[i][t] * WEIGHT_SCALE;
            const half_bits upper = half_of(weight);
            scratch.weights[head][lane + t * WARP] = upper;
            scratch.weights[head][PART_KEYS + lane + t * WARP] = half_of(weight - float_of_half(upper));
        }
        if (lane == 0) {
            scratch.highest[head] = highest[i];
            scratch.total[head] = total[i];
        }
    }
    __syncwarp();
}

// sums += the part's weights of a stage's `count` values times these; a warp sums WARP_DIMS dims of all heads.
DEVICE void add_stage(
    float (&sums)[SUM_TILES][4], const Scratch& scratch, const Stage& stage, int chunk, int count, int thread
) {
    const int first_dim = thread / WARP * WARP_DIMS, lane = lane_of_warp();
#pragma unroll
    for (int first = 0; first < STAGE_KEYS; first += 16) {
        if (first >= count) break;
        const half_bits* weights = &scratch.weights[lane % 16][chunk * STAGE_KEYS + first + lane / 16 * 8];
        unsigned upper[4], lower[4];
        load_matrix_x4(upper, weights);
        load_matrix_x4(lower, weights + PART_KEYS);
#pragma unroll
        for (int tile = 0; tile < SUM_TILES; tile += 2) {
            unsigned values[4];
            load_matrix_x4_transposed(values, &stage[first + lane % 16][first_dim + tile * 8 + lane / 16 * 8]);
            mma_16x8x16(sums[tile], upper, values);
            mma_16x8x16(sums[tile + 1], upper, values + 2);
            mma_16x8x16(sums[tile], lower, values);
            mma_16x8x16(sums[tile + 1], lower, values + 2);
        }
    }
}

// A head's part joins the parts before it: what each side is multiplied by, so that both have the larger highest score.
struct Merge { float highest, before, after; };
DEVICE Merge merged(float before, float after) {
    const float highest = before > after ? before : after;
    return {highest, exp32(before - highest), exp32(after - highest)};
}
DEVICE float joined(const Merge& merge, float before, float after) {
    return before * merge.before + after * merge.after;
}

DEVICE float gated(float sum, float total, float gate) { return sum * (1.0f / WEIGHT_SCALE) / total * sigmoid32(gate); }
