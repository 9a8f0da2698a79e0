// Fetched rows of the n-gram table to values; docs/arithmetic.md, *ngram_embedding*.
//
// Macros: WIDTH, the values of a row; KIND, how they are stored: 0 a ring of BITS, 1 float16, 2 float32, 3 bfloat16.
#include "device.cuh"

constexpr int WORDS = KIND == 0 ? 1 + WIDTH * BITS / 16 : KIND == 2 ? 2 * WIDTH : WIDTH;  // 16-bit words of a row
constexpr int STREAM_WORDS = WORDS - 1;
constexpr int SYMBOLS = (15 + BITS) / BITS;  // that a state holds, the latest in the lowest bits

DEVICE float mul1_value(unsigned state) {
    const unsigned total = dp4a(state * 0x83DCD12Du, 0x01010101u, 1024u);
    const float value = fma32(static_cast<float>(total), float_of_half(0x1EEE), float_of_half(0xC931));
    return float_of_half(half_of(value));
}

// The state of value i of a ring: stream bits [i * BITS, (i + 1) * BITS), little-endian, are its lowest.
DEVICE unsigned state_of(const half_bits* stream, int i) {
    unsigned state = 0;
#pragma unroll
    for (int age = SYMBOLS - 1; age >= 0; age--) {
        int from = i - age;
        while (from < 0) from += WIDTH;
        const int bit = from * BITS, word = bit / 16;
        const unsigned following = stream[word + 1 < STREAM_WORDS ? word + 1 : 0];
        const unsigned symbol = (stream[word] | following << 16) >> bit % 16 & ((1u << BITS) - 1);
        state = state << BITS | symbol;
    }
    return state & 0xFFFFu;
}

DEVICE float value_of(const half_bits* row, int i) {
    if (KIND == 1) return float_of_half(row[i]);
    if (KIND == 2) return reinterpret_cast<const float*>(row)[i];
    if (KIND == 3) return float_of(static_cast<unsigned>(row[i]) << 16);
    return mul1_value(state_of(row + 1, i)) * float_of_half(row[0]);
}

// stored [., WORDS]: row ids[i], or row i where ids is null, goes to out [count, WIDTH] + bias [heads, WIDTH] or null.
extern "C" __global__ void decode_rows(
    const half_bits* __restrict__ stored, const int64* __restrict__ ids, const float* __restrict__ bias, int heads,
    int count, float* __restrict__ out) {
    const int lane = threadIdx.x % WARP;
    const int item = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (item >= count) return;
    const half_bits* row = stored + (ids ? ids[item] : item) * WORDS;
    for (int i = lane; i < WIDTH; i += WARP) {
        float value = value_of(row, i);
        if (bias) value = value + bias[item % heads * WIDTH + i];
        out[static_cast<int64>(item) * WIDTH + i] = value;
    }
}
