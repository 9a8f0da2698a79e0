// The recurrence; docs/arithmetic.md, *On CUDA*, *delta_rule*. Rows in order, value columns side by side.
//
// Macros: KEY_DIM, VALUE_DIM (multiples of 4), KEY_HEADS, VALUE_HEADS; GROUP, the value heads, of one key head, of a
// lane in many_rows (1 to 3); JOURNAL, whether many_rows writes one. Eight lanes share a value column: lane `piece` has
// the k with k / 4 mod 8 == piece, and adds its piece of every sum over k.
#include "device.cuh"

constexpr int PIECES = 8, STEPS = 3;  // of a sum over k, and of the tree that adds them
constexpr int QUADS = (KEY_DIM + 4 * PIECES - 1) / (4 * PIECES);
constexpr int TERMS = 4 * QUADS;
constexpr int PADDED = PIECES * TERMS;  // of a key or query: zeros from KEY_DIM on
constexpr int CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM;
constexpr float L2_EPS = 1e-6f;

DEVICE float sum_of_pieces(float value) {
#pragma unroll
    for (int mask = PIECES / 2; mask > 0; mask >>= 1) value = value + shuffle_xor(value, mask);
    return value;
}

// One row of N value columns: state moves on. Gives the pieces of what the query reads of the state before, and change.
template <int N>
DEVICE void advance(float (&state)[N][TERMS], const float (&key)[TERMS], const float (&query)[TERMS],
                    const float (&decay)[N], const float (&beta)[N], const float (&value)[N], float (&read)[N],
                    float (&change)[N]) {
    float remembered[N];
#pragma unroll
    for (int n = 0; n < N; n++) remembered[n] = 0.0f, read[n] = 0.0f;
#pragma unroll
    for (int t = 0; t < TERMS; t++)
#pragma unroll
        for (int n = 0; n < N; n++) remembered[n] = fma32(state[n][t], key[t], remembered[n]);
    // sum_of_pieces, with what does not need the sum between its steps.
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float other[N];
#pragma unroll
        for (int n = 0; n < N; n++) other[n] = shuffle_xor(remembered[n], PIECES / 2 >> step);
#pragma unroll
        for (int t = TERMS * step / STEPS; t < TERMS * (step + 1) / STEPS; t++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                read[n] = fma32(state[n][t], query[t], read[n]);
                state[n][t] = state[n][t] * decay[n];
            }
#pragma unroll
        for (int n = 0; n < N; n++) remembered[n] = remembered[n] + other[n];
    }
#pragma unroll
    for (int n = 0; n < N; n++) change[n] = beta[n] * (value[n] - decay[n] * remembered[n]);
#pragma unroll
    for (int t = 0; t < TERMS; t++)
#pragma unroll
        for (int n = 0; n < N; n++) state[n][t] = fma32(key[t], change[n], state[n][t]);
}

// From what a row's query read of the state before it to what it reads of the state after it.
DEVICE float output_of(float read, float decay, float change, float product) {
    return fma32(change, product, decay * read);
}

DEVICE float decay_of(float a, float dt_bias, float rate) { return exp32(-rate * softplus32(a + dt_bias)); }

DEVICE int key_head_of(int value_head) { return value_head * KEY_HEADS / VALUE_HEADS; }

// A warp norms one key and query of `row` (the row's qkv): to keys_queries [2 * PADDED]. Gives their product.
DEVICE float norm_key_query(const float* row, int head, float scale, float* keys_queries) {
    const int lane = threadIdx.x % WARP;
    float query[QUADS], key[QUADS], query_squares = 0.0f, key_squares = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int k = i * WARP + lane;
        query[i] = k < KEY_DIM ? row[head * KEY_DIM + k] : 0.0f;
        key[i] = k < KEY_DIM ? row[(KEY_HEADS + head) * KEY_DIM + k] : 0.0f;
        query_squares = fma32(query[i], query[i], query_squares);
        key_squares = fma32(key[i], key[i], key_squares);
    }
    const float query_inverse = rsqrt32(lane_sum(query_squares) + L2_EPS);
    const float key_inverse = rsqrt32(lane_sum(key_squares) + L2_EPS);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        query[i] = (query[i] * query_inverse) * scale;
        key[i] = key[i] * key_inverse;
        if (i * WARP + lane >= KEY_DIM) query[i] = key[i] = 0.0f;
        product = fma32(key[i], query[i], product);
        keys_queries[i * WARP + lane] = key[i];
        keys_queries[PADDED + i * WARP + lane] = query[i];
    }
    return lane_sum(product);
}

// The lane's terms of a padded key or query in shared memory.
DEVICE void load_terms(const float* from, int piece, float (&terms)[TERMS]) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const float4 quad = *reinterpret_cast<const float4*>(from + 4 * (PIECES * i + piece));
        terms[4 * i] = quad.x, terms[4 * i + 1] = quad.y, terms[4 * i + 2] = quad.z, terms[4 * i + 3] = quad.w;
    }
}

DEVICE int k_of_term(int t, int piece) { return 4 * (PIECES * (t / 4) + piece) + t % 4; }

// The first element of a head's state [KEY_DIM, VALUE_DIM] in slot or journal row `place`.
DEVICE int64 state_at(int place, int value_head) {
    return (static_cast<int64>(place) * VALUE_HEADS + value_head) * KEY_DIM * VALUE_DIM;
}

// What many_rows reads of every row. keys_queries [rows, KEY_HEADS, 2 * PADDED]; gates [rows, VALUE_HEADS / GROUP, 8]:
// the heads' decays, from 4 on their betas, and at 3 the product of key and query. A warp takes a key head of a row.
extern "C" __global__ void prepare_rows(
    const float* __restrict__ qkv, const float* __restrict__ a, const float* __restrict__ b,
    const float* __restrict__ rate, const float* __restrict__ dt_bias, float scale, int rows,
    float* __restrict__ keys_queries, float* __restrict__ gates) {
    const int lane = threadIdx.x % WARP;
    const int item = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (item >= rows * KEY_HEADS) return;
    const int64 row = item / KEY_HEADS;
    const int head = item % KEY_HEADS;
    const float product =
        norm_key_query(qkv + row * CHANNELS, head, scale, keys_queries + static_cast<int64>(item) * 2 * PADDED);
    const int first = (head * VALUE_HEADS + KEY_HEADS - 1) / KEY_HEADS;
    for (int value_head = first + lane; value_head < VALUE_HEADS && key_head_of(value_head) == head;
         value_head += WARP) {
        float* gate = gates + (row * (VALUE_HEADS / GROUP) + value_head / GROUP) * 8;
        const int member = value_head % GROUP;
        gate[member] = decay_of(a[row * VALUE_HEADS + value_head], dt_bias[value_head], rate[value_head]);
        gate[4 + member] = sigmoid32(b[row * VALUE_HEADS + value_head]);
        if (member == 0) gate[3] = product;
        if (member == 0) gate[7] = 0.0f;
    }
}

constexpr int TILE = 16;  // value columns of a block of many_rows, four a warp
constexpr int TILE_WARPS = TILE / 4;
constexpr int TILES = (VALUE_DIM + TILE - 1) / TILE;
constexpr int STAGE_ROWS = 16;
constexpr int STAGES = 2;
constexpr int UNROLLED = 2;  // rows side by side, so that one hides what the other waits for
constexpr int VALUES_AT = 2 * PADDED;
constexpr int GATES_AT = VALUES_AT + GROUP * TILE;
constexpr int ROW_FLOATS = GATES_AT + 8;  // of a staged row: key, query, values, gates

// The lanes of a column add their pieces of GROUP reads; lane `piece` ends with the read of head_of_lane(piece).
DEVICE float fold_reads(const float (&read)[GROUP], int piece) {
    float folded = read[0];
    if (GROUP == 1) {
        folded = folded + shuffle_xor(folded, 4);
    } else {
        const bool second = piece & 4;
        const float other = read[GROUP > 1];
        folded = (second ? other : folded) + shuffle_xor(second ? folded : other, 4);
    }
    if (GROUP < 3) {
        folded = folded + shuffle_xor(folded, 2);
    } else {
        const float last = read[GROUP - 1] + shuffle_xor(read[GROUP - 1], 4);
        const bool third = piece & 2;
        folded = (third ? last : folded) + shuffle_xor(third ? folded : last, 2);
    }
    return folded + shuffle_xor(folded, 1);
}

DEVICE int head_of_lane(int piece) {
    if (GROUP == 3 && piece & 2) return 2;
    return GROUP > 1 && piece & 4 ? 1 : 0;
}

DEVICE bool writes(int piece) { return piece == 0 || (GROUP > 1 && piece == 4) || (GROUP == 3 && piece == 2); }

// What one lane copies of every row: a quarter of a warp's key and query, and at most one more piece.
struct RowCopy {
    const float* pair;
    const float* rest;  // 16 bytes of values or gates, or null
    int64 rest_stride;
    int rest_at;

    __device__ RowCopy(const float* qkv, const float* keys_queries, const float* gates, int64 row, int group,
                       int column) {
        const int lane = threadIdx.x % WARP;
        pair = keys_queries + (row * KEY_HEADS + key_head_of(group * GROUP)) * 2 * PADDED + 4 * lane;
        const int member = lane / (TILE / 4), quad = lane % (TILE / 4) * 4;
        const int half = 4 * (lane - GROUP * (TILE / 4));
        rest = nullptr, rest_at = 0, rest_stride = 0;
        if (member < GROUP && column + quad < VALUE_DIM) {
            const int value_column = (group * GROUP + member) * VALUE_DIM + column + quad;
            rest = qkv + row * CHANNELS + 2 * KEY_HEADS * KEY_DIM + value_column;
            rest_at = VALUES_AT + member * TILE + quad, rest_stride = CHANNELS;
        } else if (half == 0 || half == 4) {
            rest = gates + (row * (VALUE_HEADS / GROUP) + group) * 8 + half;
            rest_at = GATES_AT + half, rest_stride = VALUE_HEADS / GROUP * 8;
        }
    }

    __device__ void copy_row(float* staged) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int chunk = 0; chunk < 2 * PADDED / 4; chunk += WARP)
            if (chunk + lane < 2 * PADDED / 4) copy_async_16(staged + 4 * (chunk + lane), pair + 4 * chunk);
        if (rest) copy_async_16(staged + rest_at, rest);
    }

    __device__ void move_on(int rows) {
        pair += static_cast<int64>(rows) * KEY_HEADS * 2 * PADDED;
        if (rest) rest += rows * rest_stride;
    }
};

// states [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]. Grid: (VALUE_HEADS / GROUP * TILES, segments); out [rows, ...].
extern "C" __global__ void __launch_bounds__(TILE_WARPS* WARP, 1) many_rows(
    const float* qkv, const float* keys_queries, const float* gates, float* states, float* journal, const int* places,
    const int* starts, const int* slots, float* __restrict__ out) {
    DYNAMIC_SHARED(float, stages);
    const int piece = threadIdx.x % PIECES, warp = threadIdx.x / WARP;
    const int group = blockIdx.x / TILES, tile_column = blockIdx.x % TILES * TILE;
    const int tile_place = threadIdx.x / PIECES;
    const int column = tile_column + tile_place;
    const int start = starts[blockIdx.y], end = starts[blockIdx.y + 1], slot = slots[blockIdx.y];
    if (start == end) return;
    const int lane_head = head_of_lane(piece);
    const bool writer = writes(piece) && column < VALUE_DIM;

    RowCopy source(qkv, keys_queries, gates, start + warp, group, tile_column);
    auto copy_stage = [&](int number) {
        float* staged = stages + (number % STAGES * STAGE_ROWS + warp) * ROW_FLOATS;
        const int left = end - start - number * STAGE_ROWS - warp;
#pragma unroll
        for (int i = 0; i < STAGE_ROWS; i += TILE_WARPS) {
            if (i < left) source.copy_row(staged + i * ROW_FLOATS);
            source.move_on(TILE_WARPS);
        }
        copy_async_commit();
    };
    for (int number = 0; number < STAGES - 1; number++) copy_stage(number);

    float state[GROUP][TERMS];
#pragma unroll
    for (int n = 0; n < GROUP; n++)
#pragma unroll
        for (int t = 0; t < TERMS; t++) {
            const int k = k_of_term(t, piece);
            const bool there = k < KEY_DIM && column < VALUE_DIM;
            state[n][t] = there ? states[state_at(slot, group * GROUP + n) + k * VALUE_DIM + column] : 0.0f;
        }
    auto keep_state = [&](float* pool, int place) {
#pragma unroll
        for (int n = 0; n < GROUP; n++)
#pragma unroll
            for (int t = 0; t < TERMS; t++) {
                const int k = k_of_term(t, piece);
                if (k < KEY_DIM && column < VALUE_DIM)
                    pool[state_at(place, group * GROUP + n) + k * VALUE_DIM + column] = state[n][t];
            }
    };

    const int64 head_at = (group * GROUP + lane_head) * VALUE_DIM + column;
    float* out_at = out + static_cast<int64>(start) * VALUE_HEADS * VALUE_DIM + head_at;
    auto compute_row = [&](const float* staged) {
        float key[TERMS], query[TERMS], decay[GROUP], beta[GROUP], value[GROUP], read[GROUP], change[GROUP];
        load_terms(staged, piece, key);
        load_terms(staged + PADDED, piece, query);
        const float4 decays = *reinterpret_cast<const float4*>(staged + GATES_AT);
        const float4 betas = *reinterpret_cast<const float4*>(staged + GATES_AT + 4);
#pragma unroll
        for (int n = 0; n < GROUP; n++) {
            decay[n] = n == 0 ? decays.x : n == 1 ? decays.y : decays.z;
            beta[n] = n == 0 ? betas.x : n == 1 ? betas.y : betas.z;
            value[n] = staged[VALUES_AT + n * TILE + tile_place];
        }
        advance(state, key, query, decay, beta, value, read, change);
        float lane_decay = decay[0], lane_change = change[0];
#pragma unroll
        for (int n = 1; n < GROUP; n++) {
            lane_decay = lane_head == n ? decay[n] : lane_decay;
            lane_change = lane_head == n ? change[n] : lane_change;
        }
        const float output = output_of(fold_reads(read, piece), lane_decay, lane_change, decays.w);
        if (writer) *out_at = output;
        out_at += VALUE_HEADS * VALUE_DIM;
    };

    for (int number = 0; number * STAGE_ROWS < end - start; number++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        copy_stage(number + STAGES - 1);
        const float* staged = stages + number % STAGES * STAGE_ROWS * ROW_FLOATS;
        const int first = start + number * STAGE_ROWS;
        if (!JOURNAL && end - first >= STAGE_ROWS) {
#pragma unroll UNROLLED
            for (int i = 0; i < STAGE_ROWS; i++) compute_row(staged + i * ROW_FLOATS);
        } else {
#pragma unroll 1
            for (int row = first; row < smaller(first + STAGE_ROWS, end); row++, staged += ROW_FLOATS) {
                compute_row(staged);
                if (JOURNAL && places[row] >= 0) keep_state(journal, places[row]);
            }
        }
    }
    keep_state(states, slot);
}

constexpr int WARP_COLUMNS = 16;  // of a warp of few_rows, four a lane
constexpr int FEW_WARPS = 4;
constexpr int FEW_COLUMNS = FEW_WARPS * WARP_COLUMNS;
constexpr int FEW_TILES = (VALUE_DIM + FEW_COLUMNS - 1) / FEW_COLUMNS;
constexpr int FEW_STAGE = 8;

// many_rows without prepare_rows, for a few rows a segment; states, starts and slots are settled. Grid: (VALUE_HEADS *
// FEW_TILES, segments).
extern "C" __global__ void __launch_bounds__(FEW_WARPS* WARP) few_rows(
    const float* qkv, const float* a, const float* b, const float* rate, const float* dt_bias, float scale,
    float* states, float* journal, const int* places, const int* starts, const int* slots, float* out) {
    __shared__ float4 keys_queries[FEW_STAGE][2 * PADDED / 4], values[FEW_STAGE][FEW_COLUMNS / 4];
    __shared__ float gates[FEW_STAGE][3];  // decay, beta, the product of key and query
    __shared__ int journal_rows[FEW_STAGE];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int piece = lane % PIECES;
    const int head = blockIdx.x / FEW_TILES, tile_column = blockIdx.x % FEW_TILES * FEW_COLUMNS;
    const int tile_place = warp * WARP_COLUMNS + lane / PIECES * 4;
    const int column = tile_column + tile_place;
    const int start = starts[blockIdx.y], end = starts[blockIdx.y + 1], slot = slots[blockIdx.y];
    if (start == end) {
        await_inputs();
        return;
    }

    if (threadIdx.x == 0) {
        fetch_line(rate + head);
        fetch_line(dt_bias + head);
    }
    float state[4][TERMS];
#pragma unroll
    for (int t = 0; t < TERMS; t++) {
        const int k = k_of_term(t, piece);
        float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k < KEY_DIM && column < VALUE_DIM)
            quad = *reinterpret_cast<const float4*>(states + state_at(slot, head) + k * VALUE_DIM + column);
        state[0][t] = quad.x, state[1][t] = quad.y, state[2][t] = quad.z, state[3][t] = quad.w;
    }
    await_inputs();
    auto keep_state = [&](float* pool, int place) {
#pragma unroll
        for (int t = 0; t < TERMS; t++) {
            const int k = k_of_term(t, piece);
            if (k < KEY_DIM && column < VALUE_DIM)
                *reinterpret_cast<float4*>(pool + state_at(place, head) + k * VALUE_DIM + column) =
                    make_float4(state[0][t], state[1][t], state[2][t], state[3][t]);
        }
    };

    for (int first = start; first < end; first += FEW_STAGE) {
        const int count = smaller(FEW_STAGE, end - first);
        if (first > start) __syncthreads();
        for (int i = warp; i < count; i += FEW_WARPS) {
            const int64 row = first + i;
            const float* inputs = qkv + row * CHANNELS;
            const int from = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + tile_column;
            for (int place = lane; place < FEW_COLUMNS; place += WARP)
                reinterpret_cast<float*>(values[i])[place] =
                    tile_column + place < VALUE_DIM ? inputs[from + place] : 0.0f;
            const float decay = decay_of(a[row * VALUE_HEADS + head], dt_bias[head], rate[head]);
            const float beta = sigmoid32(b[row * VALUE_HEADS + head]);
            const float product =
                norm_key_query(inputs, key_head_of(head), scale, reinterpret_cast<float*>(keys_queries[i]));
            if (lane == 0) {
                gates[i][0] = decay, gates[i][1] = beta, gates[i][2] = product;
                journal_rows[i] = places ? places[row] : -1;
            }
        }
        __syncthreads();
        for (int i = 0; i < count; i++) {
            const float* pair = reinterpret_cast<const float*>(keys_queries[i]);
            float key[TERMS], query[TERMS], decay[4], beta[4], read[4], change[4];
            load_terms(pair, piece, key);
            load_terms(pair + PADDED, piece, query);
            const float4 loaded = values[i][tile_place / 4];
            const float value[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
            for (int n = 0; n < 4; n++) decay[n] = gates[i][0], beta[n] = gates[i][1];
            advance(state, key, query, decay, beta, value, read, change);
            float output[4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                output[n] = output_of(sum_of_pieces(read[n]), decay[n], change[n], gates[i][2]);
            const int64 row = first + i;
            if (piece == 0 && column < VALUE_DIM)
                *reinterpret_cast<float4*>(out + (row * VALUE_HEADS + head) * VALUE_DIM + column) =
                    make_float4(output[0], output[1], output[2], output[3]);
            if (journal_rows[i] >= 0) keep_state(journal, journal_rows[i]);
        }
    }
    keep_state(states, slot);
}
