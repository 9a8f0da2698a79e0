// A trellis layer of many outputs for up to 16 rows: a block a multiprocessor, whose warps are dealt columns of tiles.
//
// Weights are the A operand (16 outputs), rows the B operand (8 at a time). A warp that comes free is dealt the next
// column. The last columns are dealt in halves, upper halves first, so that all warps end together: between its halves
// a column's chains wait in shared memory for whichever warp is dealt the lower.
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"
#include "ops/linear/staged.cuh"
#include "ops/linear/trellis.cuh"

#ifndef CODEBOOK
#define CODEBOOK 2
#define TWICE_BITS 6
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef CHUNK_TILES
#define CHUNK_TILES 16
#endif
#ifndef OPERAND_ROWS
#define OPERAND_ROWS 1
#endif

constexpr int MOST_WARPS = 24;
constexpr int STEP_TILES = ROW_TILES == 1 ? 8 : 4;  // that are decoded between products
constexpr int STAGES = 2;
constexpr int COPIED = (OPERAND_ROWS + 1) / 2;  // pieces of the operand that a thread copies together
constexpr int FINISHED_ROWS = OPERAND_ROWS == 1 ? 1 : 4;  // that a warp rotates out together
constexpr int WORDS = tile_words(TWICE_BITS);
constexpr int CHUNK_BYTES = CHUNK_TILES * WORDS * 4;  // tiles one below the other
constexpr int PIECES = CHUNK_TILES * TWICE_BITS;  // of 16 bytes
constexpr int LANE_PIECES = (PIECES + WARP - 1) / WARP;

static_assert(CHUNK_TILES % (ROTATION / TILE) == 0, "a chunk must be whole blocks of inputs");

// The counter's number before, one higher after.
DEVICE int drawn(int* counter) {
#ifdef EMULATED
    return (*counter)++;
#else
    return atomicAdd(counter, 1);
#endif
}

// Say that a column's upper half is done; what the warp wrote before is then to be seen.
DEVICE void publish(int* done, int lane) {
    __syncwarp();
    if (lane != 0) return;
#ifdef EMULATED
    *done = 1;
#else
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(done)), "r"(1) : "memory");
#endif
}

DEVICE void wait_until(const int* done) {
#ifdef EMULATED
    while (!*done) emulator::pause(emulator::READY);
#else
    for (;;) {
        int is_done;
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(is_done) : "r"(shared_address(done)) : "memory");
        if (is_done) break;
        __nanosleep(100);
    }
#endif
    __syncwarp();
}

// What a warp carries at a time: `count` chunks of one of the block's columns from the chunk `first` on.
struct Unit {
    int column, first, count;
};

// The block's columns: `whole` dealt whole, then `halved` in halves.
struct Deal {
    int* counter;
    int whole, halved, chunks;

    // The next unit; count 0: there is none. Lower halves are dealt after all upper ones.
    __device__ __forceinline__ Unit next(int lane) const {
        int number = 0;
        if (lane == 0) number = drawn(counter);
        number = shuffle(number, 0);
        const int columns = whole + halved, half = chunks / 2;
        if (number < whole) return {number, 0, chunks};
        if (number < columns) return {number, 0, half};
        number -= halved;
        return {number, half, number < columns ? chunks - half : 0};
    }
};

// The chunks of a warp's units, one after another, staged ahead in a ring. Positions are in pieces.
struct UnitRing {
    Unit next;  // that whose chunks are staged now; `count` of them are not yet
    unsigned position, row_step, target, stage;
    int left;
    unsigned offsets[LANE_PIECES];

    __device__ __forceinline__ UnitRing(const unsigned* stages, int tile_columns, int lane)
        : next{0, 0, 0}, position(0), row_step(tile_columns * TWICE_BITS), stage(0), left(0) {
        target = offset_of(stages + 4 * lane);
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            const int piece = i * WARP + lane;
            offsets[i] = piece / TWICE_BITS * row_step + piece % TWICE_BITS;
        }
    }

    // Stage one chunk more where the current one lies, and go on to the next. Units have at least STAGES chunks, so
    // that the one staged now is the current one or the next.
    __device__ __forceinline__ void advance(const uint4* trellis, const Deal& deal, int lane) {
        if (left == 0) {
            next = deal.next(lane);
            left = next.count;
            position = next.first * CHUNK_TILES * row_step + (blockIdx.x + next.column * gridDim.x) * TWICE_BITS;
        }
        if (left > 0) {
#pragma unroll
            for (int i = 0; i < LANE_PIECES; i++)
                if (PIECES % WARP == 0 || i * WARP + lane < PIECES)
                    stage_piece(target + stage + 16 * WARP * i, trellis + (position + offsets[i]));
            position += CHUNK_TILES * row_step;
            left--;
        }
        copy_async_commit();
        stage = CHUNK_BYTES - stage;
    }
};

// Count a column of a block of 128 outputs; rotate the block out if it completes it.
DEVICE void finish_column(const Sums& sums, const Finish& finish, int* counters, int column, int lane) {
    constexpr int block_columns = ROTATION / TILE;
    const int block = column / block_columns;
    __syncwarp();
    int last = 0;
    if (lane == 0) last = completes(counters + block, 1, block_columns);
    if (!shuffle(last, 0)) return;
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < sums.rows; row += FINISHED_ROWS) finish_rows<FINISHED_ROWS>(sums, finish, row, block, lane);
}

// A boundary that the compiler moves nothing over, since it would go on only if the value is not all ones, which no
// pair of decoded values is.
DEVICE void keep_apart(unsigned value) {
#ifndef EMULATED
    asm volatile("{\n\t.reg .pred none;\n\tsetp.eq.u32 none, %0, 0xFFFFFFFF;\n\t@none trap;\n\t}"
                 ::"r"(value) : "memory");
#endif
}

template <int FIRST, int NUMBER = 0>
DEVICE void decode_from(unsigned (&fragments)[STEP_TILES][4], const LaneWords<TWICE_BITS>& words, unsigned stage,
                        unsigned shift) {
    decode_window<CODEBOOK>(words.template window<FIRST + NUMBER>(stage, shift), fragments[NUMBER]);
    if constexpr (NUMBER + 1 < STEP_TILES) decode_from<FIRST, NUMBER + 1>(fragments, words, stage, shift);
}

template <int FIRST, int NUMBER = 0>
DEVICE void read_inputs(uint4 (&pairs)[STEP_TILES / 2][ROW_TILES], unsigned operand) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
        pairs[NUMBER][tile] = four_at<(FIRST / 2 + NUMBER) * 64 * OPERAND_ROWS>(operand + tile * 512);
    if constexpr (2 * NUMBER + 2 < STEP_TILES) read_inputs<FIRST, NUMBER + 1>(pairs, operand);
}

// Carry the chains over STEP_TILES tiles of a chunk, from its FIRST on, and over those after them. Several are decoded
// between products: the compiler has the operations of different tiles take turns on the pipes, but not across
// products.
template <int FIRST>
DEVICE void carry_from(float chains[ROW_TILES][4], const LaneWords<TWICE_BITS>& words, unsigned stage, unsigned shift,
                       unsigned operand) {
    unsigned fragments[STEP_TILES][4];
    uint4 pairs[STEP_TILES / 2][ROW_TILES];
    decode_from<FIRST>(fragments, words, stage, shift);
    read_inputs<FIRST>(pairs, operand);
    keep_apart(fragments[STEP_TILES - 1][3]);
#pragma unroll
    for (int i = 0; i < STEP_TILES; i++) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
            const uint4& four = pairs[i / 2][tile];
            const unsigned inputs[2] = {i % 2 ? four.z : four.x, i % 2 ? four.w : four.y};
            mma_16x8x16(chains[tile], fragments[i], inputs);
        }
    }
    constexpr int next = FIRST + STEP_TILES;
    if constexpr (next < CHUNK_TILES) carry_from<next>(chains, words, stage, shift, operand);
}

// Copy rotate_few's array to shared memory, OPERAND_ROWS rows apart; rows past the last repeat it. Plain loads, several
// on their way together: copies in groups would be waited for with all of the weights before them.
DEVICE void copy_operand(uint4* own, const uint4* operand, int pieces, int rows) {
    const int count = pieces * OPERAND_ROWS;
    for (int first = threadIdx.x; first < count; first += COPIED * blockDim.x) {
        uint4 next[COPIED];
#pragma unroll
        for (int n = 0; n < COPIED; n++) {
            const int i = smaller(first + n * static_cast<int>(blockDim.x), count - 1);
            const int row = smaller(i / 4 % OPERAND_ROWS, rows - 1);
            next[n] = operand[(i / (4 * OPERAND_ROWS) * rows + row) * 4 + i % 4];
        }
#pragma unroll
        for (int n = 0; n < COPIED; n++) {
            const int i = first + n * static_cast<int>(blockDim.x);
            if (i < count) own[i] = next[n];
        }
    }
}

// Any grid, up to 32 * MOST_WARPS threads. Layers of one k-shard, tile_columns a multiple of 8. The inputs are whole
// chunks, at least STAGES of them, and of a half where columns are halved. operand: rotate_few made it of the rows.
// values: float [rows, 16 * tile_columns], used here. counters: zeros, one a block of 128 outputs. Shared memory: the
// warps' stages, the operand, the chains of most_halved columns, the counter of units, whether those are there.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP, 1)
few_rows_dealt(const uint4* __restrict__ trellis, const uint4* operand, float* values, int* counters, int tile_columns,
               int input_blocks, int rows, const half_bits* output_scales, const float* bias, float* y, int outputs,
               int most_halved) {
    DYNAMIC_SHARED(unsigned, shared);
    const int lane = remembered(threadIdx.x % WARP), warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int chunks = input_blocks * (ROTATION / TILE) / CHUNK_TILES;
    const int columns = (tile_columns - blockIdx.x + gridDim.x - 1) / gridDim.x;
    uint4* own_operand = reinterpret_cast<uint4*>(shared + warps * STAGES * CHUNK_BYTES / 4);
    float4* waiting = reinterpret_cast<float4*>(own_operand + input_blocks * 16 * OPERAND_ROWS);
    int* counter = reinterpret_cast<int*>(waiting + most_halved * ROW_TILES * WARP);
    int* done = counter + 1;
    for (int i = threadIdx.x; i <= most_halved; i += blockDim.x) counter[i] = 0;
    __syncthreads();

    const int halved = smaller(most_halved, columns);
    const Deal deal = {counter, columns - halved, halved, chunks};
    const unsigned* stages = shared + warp * STAGES * CHUNK_BYTES / 4;
    UnitRing ring(stages, tile_columns, lane);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) ring.advance(trellis, deal, lane);
    await_inputs();
    copy_operand(own_operand, operand, input_blocks * 16, rows);
    __syncthreads();

    const LanePlace<TWICE_BITS> place(lane);
    const LaneWords<TWICE_BITS> words(stages, place);
    const unsigned own_place = offset_of(own_operand + (OPERAND_ROWS == 1 ? lane % 4 : lane));
    const Sums sums = {values, 1, rows, tile_columns * TILE};
    const Finish finish = {output_scales, bias, y, outputs};
#pragma unroll 1
    for (Unit unit = ring.next; unit.count > 0; unit = ring.next) {
        const int slot = unit.column - deal.whole;
        float4* chains_wait = waiting + slot * ROW_TILES * WARP + lane;
        float chains[ROW_TILES][4] = {};
        if (unit.first > 0) {
            wait_until(done + slot);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                const float4 c = chains_wait[tile * WARP];
                chains[tile][0] = c.x, chains[tile][1] = c.y, chains[tile][2] = c.z, chains[tile][3] = c.w;
            }
        }
        unsigned input_place = own_place + unit.first * (CHUNK_TILES / 2) * 64 * OPERAND_ROWS;
#pragma unroll 1
        for (int chunk = 0; chunk < unit.count; chunk++) {
            copy_async_wait<STAGES - 1>();
            __syncwarp();
            carry_from<0>(chains, words, ring.stage, place.shift, input_place);
            input_place += CHUNK_TILES / 2 * 64 * OPERAND_ROWS;
            __syncwarp();
            ring.advance(trellis, deal, lane);
        }
        if (unit.first + unit.count < chunks) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                const float* c = chains[tile];
                chains_wait[tile * WARP] = make_float4(c[0], c[1], c[2], c[3]);
            }
            publish(done + slot, lane);
        } else {
            const int column = blockIdx.x + unit.column * gridDim.x;
            store_column(chains, values, rows, tile_columns * TILE, column * TILE, lane);
            finish_column(sums, finish, counters, column, lane);
        }
    }
}
