// Many rows times half weights on tensor cores, one float32 chain an output over ascending k.
#include "device.cuh"

constexpr int TILE_ROWS = 128, TILE_OUTPUTS = 128, TILE_INPUTS = 32;
constexpr int PRODUCT_STAGES = 4;
constexpr int PRODUCT_THREADS = 256;
constexpr int WARP_ROWS = 64, WARP_OUTPUTS = 32;  // 2 warps of rows by 4 of outputs
constexpr int STEP = 16;
constexpr int PIECE = 8;  // halves in 16 bytes
constexpr int ROW_PIECES = TILE_INPUTS / PIECE;
constexpr int TILE_PIECES = TILE_ROWS * ROW_PIECES;
constexpr int SWIZZLE = 64;  // blocks of rows that share a stripe of weights

// 16 bytes of a staged tile: a row's pieces change places so that 8 rows of one column lie in different banks.
DEVICE int place_of(int row, int piece) { return row * ROW_PIECES + (piece ^ (row >> 1 & 3)); }

struct ProductStage {
    uint4 inputs[TILE_PIECES];
    uint4 weights[TILE_PIECES];
};

constexpr int THREAD_PIECES = TILE_PIECES / PRODUCT_THREADS;
constexpr int THREAD_ROWS = PRODUCT_THREADS / ROW_PIECES;  // from one of a thread's pieces to the next

// What a thread copies of 128 rows of a matrix: one piece of every 64th row. Rows past the last repeat it.
struct TileCopy {
    const half_bits* from[THREAD_PIECES];

    __device__ __forceinline__ TileCopy(const half_bits* matrix, int first, int rows, int width, int k) {
        const int row = threadIdx.x / ROW_PIECES, piece = threadIdx.x % ROW_PIECES;
#pragma unroll
        for (int i = 0; i < THREAD_PIECES; i++) {
            const int64 own_row = smaller(first + row + i * THREAD_ROWS, rows - 1);
            from[i] = matrix + own_row * width + k + piece * PIECE;
        }
    }

    // Copy the pieces, of TILE_INPUTS inputs, and go on to the next inputs.
    __device__ __forceinline__ void advance(uint4* target) {
#pragma unroll
        for (int i = 0; i < THREAD_PIECES; i++) {
            // THREAD_ROWS is a multiple of 8, so that all of a thread's pieces change places alike.
            copy_async_16(target + i * PRODUCT_THREADS, from[i]);
            from[i] += TILE_INPUTS;
        }
    }
};

// grid (row tiles * output tiles, shards), 256 threads, PRODUCT_STAGES stages of dynamic shared memory. x: half
// [rows, inputs], weights: half [outputs, inputs], whole 16s of inputs. values: float [rows, outputs] of every shard,
// `shard_stride` floats from one to the next.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 2)
product(const half_bits* x, const half_bits* weights, float* values, int64 shard_stride, int rows, int outputs,
        int inputs) {
    DYNAMIC_SHARED(ProductStage, stages);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int output_tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int tall = SWIZZLE * output_tiles, stripe = blockIdx.x / tall, in_stripe = blockIdx.x % tall;
    const int stripe_rows = smaller(SWIZZLE, row_tiles - stripe * SWIZZLE);
    const int first_row = (stripe * SWIZZLE + in_stripe % stripe_rows) * TILE_ROWS;
    const int first_output = in_stripe / stripe_rows * TILE_OUTPUTS;
    const int shard = blockIdx.y, shards = gridDim.y, blocks = (inputs + 127) / 128;
    const int begin = shard * blocks / shards * 128, end = smaller((shard + 1) * blocks / shards * 128, inputs);

    TileCopy input_copy(x, first_row, rows, inputs, begin), weight_copy(weights, first_output, outputs, inputs, begin);
    const int own_piece = place_of(threadIdx.x / ROW_PIECES, threadIdx.x % ROW_PIECES);
    // The first input of the piece that this thread copies next.
    int ahead = begin + threadIdx.x % ROW_PIECES * PIECE;
#pragma unroll
    for (int stage = 0; stage < PRODUCT_STAGES - 1; stage++, ahead += TILE_INPUTS) {
        if (ahead < end) {
            input_copy.advance(stages[stage].inputs + own_piece);
            weight_copy.advance(stages[stage].weights + own_piece);
        }
        copy_async_commit();
    }
    const int own_row = warp / 4 * WARP_ROWS, own_output = warp % 4 * WARP_OUTPUTS;
    const bool idle = first_row + own_row >= rows || first_output + own_output >= outputs;
    const int matrix = lane / 8, matrix_row = lane % 8;
    float c[WARP_ROWS / 16][WARP_OUTPUTS / 8][4] = {};
    int stage = 0;
#pragma unroll 1
    for (int k = begin; k < end; k += TILE_INPUTS) {
        copy_async_wait<PRODUCT_STAGES - 2>();
        __syncthreads();
        if (ahead < end) {
            ProductStage& free = stages[stage == 0 ? PRODUCT_STAGES - 1 : stage - 1];
            input_copy.advance(free.inputs + own_piece);
            weight_copy.advance(free.weights + own_piece);
        }
        ahead += TILE_INPUTS;
        copy_async_commit();
        const ProductStage& own = stages[stage];
#pragma unroll
        for (int step = 0; step < TILE_INPUTS / STEP; step++) {
            if (idle || k + step * STEP >= end) break;
            unsigned a[WARP_ROWS / 16][4], b[WARP_OUTPUTS / 16][4];
#pragma unroll
            for (int i = 0; i < WARP_ROWS / 16; i++) {
                const int row = own_row + 16 * i + matrix % 2 * 8 + matrix_row;
                load_matrix_x4(a[i], own.inputs + place_of(row, 2 * step + matrix / 2));
            }
#pragma unroll
            for (int j = 0; j < WARP_OUTPUTS / 16; j++) {
                const int row = own_output + 16 * j + matrix / 2 * 8 + matrix_row;
                load_matrix_x4(b[j], own.weights + place_of(row, 2 * step + matrix % 2));
            }
#pragma unroll
            for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
                for (int j = 0; j < WARP_OUTPUTS / 8; j++) mma_16x8x16(c[i][j], a[i], b[j / 2] + j % 2 * 2);
        }
        stage = stage + 1 == PRODUCT_STAGES ? 0 : stage + 1;
    }
    values += shard * shard_stride;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 16; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + own_row + 16 * i + lane / 4 + 8 * half;
            if (row >= rows) continue;
#pragma unroll
            for (int j = 0; j < WARP_OUTPUTS / 8; j++) {
                const int output = first_output + own_output + 8 * j + lane % 4 * 2;
                // The outputs are whole 16s.
                if (output < outputs)
                    *reinterpret_cast<float2*>(values + static_cast<int64>(row) * outputs + output) =
                        make_float2(c[i][j][2 * half], c[i][j][2 * half + 1]);
            }
        }
    }
}
