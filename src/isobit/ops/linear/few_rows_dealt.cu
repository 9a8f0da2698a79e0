// A trellis layer of many outputs for up to 16 rows: a block a multiprocessor, whose warps are dealt columns of tiles.
//
// Weights are the A operand (16 outputs), rows the B operand (8 at a time). A warp that comes free is dealt the next
// column. The last columns are dealt in parts, upper parts first, so that all warps end together: between two parts a
// column's chains wait in shared memory for whichever warp is dealt the next part.
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
#ifndef STAGES
#define STAGES 2
#endif
#ifndef OPERAND_ROWS
#define OPERAND_ROWS 1
#endif
#ifndef PRODUCTS
#define PRODUCTS 0
#endif
#ifndef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 1
#endif

constexpr int MOST_WARPS = ROW_TILES == 1 ? 32 : 28;
constexpr int GROUP_TILES = 8;  // 128 inputs
constexpr int UNROLLED_GROUPS = GROUPS_AT_ONCE;
constexpr int WORDS = tile_words(TWICE_BITS);
constexpr int CHUNK_BYTES = CHUNK_TILES * WORDS * 4;  // tiles one below the other
constexpr int PIECES = CHUNK_TILES * TWICE_BITS;  // of 16 bytes
constexpr int LANE_PIECES = (PIECES + WARP - 1) / WARP;
constexpr bool FROM_SHARED = OPERAND_ROWS > 0;  // rows of the operand in shared memory, or none

static_assert(CHUNK_TILES % GROUP_TILES == 0, "a chunk must be whole groups");

// The counter's number before, one higher after.
DEVICE int drawn(int* counter) {
#ifdef EMULATED
    return (*counter)++;
#else
    return atomicAdd(counter, 1);
#endif
}

// Say how far a column's chains are; what the warp wrote before is then to be seen.
DEVICE void publish(int* reached, int chunk, int lane) {
    __syncwarp();
    if (lane != 0) return;
#ifdef EMULATED
    *reached = chunk;
#else
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(reached)), "r"(chunk) : "memory");
#endif
}

DEVICE void wait_until_reached(const int* reached, int chunk) {
#ifdef EMULATED
    while (*reached != chunk) emulator::pause(emulator::READY);
#else
    for (;;) {
        int at;
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(at) : "r"(shared_address(reached)) : "memory");
        if (at == chunk) break;
        __nanosleep(100);
    }
#endif
    __syncwarp();
}

// What a warp carries at a time: `count` chunks of one of the block's columns from the chunk `first` on.
struct Unit {
    int column, first, count;
};

// The block's columns: `whole` dealt whole, then `split` in parts. parts divide the chunks.
struct Deal {
    int* counter;
    int whole, split, part_chunks, chunks;

    // The next unit; count 0: there is none. A part is dealt after the column's parts above it.
    __device__ __forceinline__ Unit next(int lane) const {
        int number = 0;
        if (lane == 0) number = drawn(counter);
        number = shuffle(number, 0);
        if (number < whole) return {number, 0, chunks};
        int first = 0;
        for (number -= whole; number >= split && first < chunks; number -= split) first += part_chunks;
        return {whole + number, first, first < chunks ? part_chunks : 0};
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
        if (STAGES == 2)
            stage = CHUNK_BYTES - stage;
        else
            stage = stage == (STAGES - 1) * CHUNK_BYTES ? 0 : stage + CHUNK_BYTES;
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
    for (int row = 0; row < sums.rows; row++) {
        float v[4];
        totals_of(sums, row, block * ROTATION + 4 * lane, v);
        finish_block(finish, row, block, v, lane);
    }
}

// The operand of two tiles, the HALF-th of a group: from shared memory, or from rotate_few's array.
template <int HALF>
DEVICE uint4 operand_at(unsigned offset, const uint4* inputs, int rows, int place) {
    if constexpr (FROM_SHARED) return four_at<HALF * 64 * OPERAND_ROWS>(offset);
    return inputs[HALF * 4 * rows + place];
}

// Carry the chains over two tiles, the HALF-th of a group.
template <int HALF>
DEVICE void carry_two(float chains[ROW_TILES][4], const LaneWords<TWICE_BITS>& words, unsigned stage, unsigned shift,
                      unsigned operand, const uint4* inputs, int rows, const int places[ROW_TILES]) {
    uint4 pairs[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
        pairs[tile] = operand_at<HALF>(operand + tile * 512, inputs, rows, places[tile]);
    unsigned even[4], odd[4];
    decode_window<CODEBOOK, PRODUCTS>(words.template window<2 * HALF>(stage, shift), even);
    decode_window<CODEBOOK, PRODUCTS>(words.template window<2 * HALF + 1>(stage, shift), odd);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
        const unsigned upper[2] = {pairs[tile].x, pairs[tile].y}, lower[2] = {pairs[tile].z, pairs[tile].w};
        mma_16x8x16(chains[tile], even, upper);
        mma_16x8x16(chains[tile], odd, lower);
    }
}

// Copy rotate_few's array to shared memory, OPERAND_ROWS rows apart; rows past the last repeat it.
DEVICE void copy_operand(uint4* own, const uint4* operand, int pieces, int rows) {
    for (int i = threadIdx.x; i < pieces * OPERAND_ROWS; i += blockDim.x) {
        const int row = smaller(i / 4 % larger(OPERAND_ROWS, 1), rows - 1);
        own[i] = operand[(i / (4 * larger(OPERAND_ROWS, 1)) * rows + row) * 4 + i % 4];
    }
}

// Any grid, up to 32 * MOST_WARPS threads. Layers of one k-shard, tile_columns a multiple of 8. The inputs are whole
// chunks, at least STAGES of them, as a part has; part_chunks divides them. operand: rotate_few made it of the rows.
// values: float [rows, 16 * tile_columns], used here. counters: zeros, one a block of 128 outputs. Shared memory: the
// warps' stages, the operand, the chains of most_split columns, the counter of units, how far those columns are.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP, 1)
few_rows_dealt(const uint4* __restrict__ trellis, const uint4* operand, float* values, int* counters, int tile_columns,
               int input_blocks, int rows, const half_bits* output_scales, const float* bias, float* y, int outputs,
               int most_split, int part_chunks) {
    DYNAMIC_SHARED(unsigned, shared);
    const int lane = remembered(threadIdx.x % WARP), warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int chunks = input_blocks * GROUP_TILES / CHUNK_TILES;
    const int columns = (tile_columns - blockIdx.x + gridDim.x - 1) / gridDim.x;
    uint4* own_operand = reinterpret_cast<uint4*>(shared + warps * STAGES * CHUNK_BYTES / 4);
    float4* waiting = reinterpret_cast<float4*>(own_operand + input_blocks * 16 * OPERAND_ROWS);
    int* counter = reinterpret_cast<int*>(waiting + most_split * ROW_TILES * WARP);
    int* reached = counter + 1;
    for (int i = threadIdx.x; i <= most_split; i += blockDim.x) counter[i] = 0;
    __syncthreads();

    const int split = smaller(most_split, columns);
    const Deal deal = {counter, columns - split, split, part_chunks, chunks};
    const unsigned* stages = shared + warp * STAGES * CHUNK_BYTES / 4;
    UnitRing ring(stages, tile_columns, lane);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) ring.advance(trellis, deal, lane);
    await_inputs();
    if (FROM_SHARED) {
        copy_operand(own_operand, operand, input_blocks * 16, rows);
        __syncthreads();
    }

    const LanePlace<TWICE_BITS> place(lane);
    const LaneWords<TWICE_BITS> words(stages, place);
    int places[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
        places[tile] = smaller(8 * tile + lane / 4, rows - 1) * 4 + lane % 4;
    const unsigned own_place = offset_of(own_operand + (OPERAND_ROWS == 1 ? lane % 4 : lane));
    const Sums sums = {values, 1, rows, tile_columns * TILE};
    const Finish finish = {output_scales, bias, y, outputs};
#pragma unroll 1
    for (Unit unit = ring.next; unit.count > 0; unit = ring.next) {
        const int slot = unit.column - deal.whole;
        float4* chains_wait = waiting + slot * ROW_TILES * WARP + lane;
        float chains[ROW_TILES][4] = {};
        if (unit.first > 0) {
            wait_until_reached(reached + slot, unit.first);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                const float4 c = chains_wait[tile * WARP];
                chains[tile][0] = c.x, chains[tile][1] = c.y, chains[tile][2] = c.z, chains[tile][3] = c.w;
            }
        }
        const int first_half = unit.first * (CHUNK_TILES / 2);
        unsigned input_place = own_place + first_half * 64 * OPERAND_ROWS;
        const uint4* inputs = operand + (FROM_SHARED ? 0 : first_half * 4 * rows);
#pragma unroll 1
        for (int chunk = 0; chunk < unit.count; chunk++) {
            copy_async_wait<STAGES - 1>();
            __syncwarp();
#pragma unroll UNROLLED_GROUPS
            for (unsigned group = 0; group < CHUNK_BYTES; group += GROUP_TILES * WORDS * 4) {
                const unsigned stage = ring.stage + group;
                carry_two<0>(chains, words, stage, place.shift, input_place, inputs, rows, places);
                carry_two<1>(chains, words, stage, place.shift, input_place, inputs, rows, places);
                carry_two<2>(chains, words, stage, place.shift, input_place, inputs, rows, places);
                carry_two<3>(chains, words, stage, place.shift, input_place, inputs, rows, places);
                input_place += GROUP_TILES / 2 * 64 * OPERAND_ROWS;
                if (!FROM_SHARED) inputs += GROUP_TILES / 2 * 4 * rows;
            }
            __syncwarp();
            ring.advance(trellis, deal, lane);
        }
        if (unit.first + unit.count < chunks) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                const float* c = chains[tile];
                chains_wait[tile * WARP] = make_float4(c[0], c[1], c[2], c[3]);
            }
            publish(reached + slot, unit.first + unit.count, lane);
        } else {
            const int column = blockIdx.x + unit.column * gridDim.x;
            store_column(chains, values, rows, tile_columns * TILE, column * TILE, lane);
            finish_column(sums, finish, counters, column, lane);
        }
    }
}
