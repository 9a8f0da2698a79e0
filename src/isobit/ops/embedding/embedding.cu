// Rows of the token embedding table as float32; an id outside the table gives a row of NaN.
#include "device.cuh"

#ifdef KIND
// KIND: 0 float32, 1 halves, 2 bfloat16.
#if KIND == 0
using Stored = float;
#else
using Stored = unsigned short;
#endif

DEVICE float widened(Stored value) {
#if KIND == 0
    return value;
#elif KIND == 1
    return float_of_half(value);
#else
    return float_of(static_cast<unsigned>(value) << 16);
#endif
}

// table [vocabulary, hidden], out [rows, hidden]; each thread has 8 columns, a block's width apart.
extern "C" __global__ void plain_rows(const int* __restrict__ ids, const Stored* __restrict__ table,
                                      float* __restrict__ out, int vocabulary, int hidden) {
    const int first = blockIdx.x * blockDim.x * 8 + threadIdx.x;
    const int id = ids[blockIdx.y];
    const bool known = id >= 0 && id < vocabulary;
    const Stored* stored = table + static_cast<int64>(known ? id : 0) * hidden;
    float* row = out + static_cast<int64>(blockIdx.y) * hidden;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = first + i * static_cast<int>(blockDim.x);
        if (column < hidden) row[column] = known ? widened(stored[column]) : float_of(0x7fc00000u);
    }
}
#endif

#ifdef BITS
constexpr int GROUP = 256;
constexpr int LANE_VALUES = GROUP / WARP;
constexpr int RING_WORDS = 1 + GROUP * BITS / 16;
constexpr int SYMBOLS = (16 + BITS - 1) / BITS;  // in a state of 16 bits

// Bits [i*BITS, (i+1)*BITS) of a ring's stream, little-endian.
DEVICE unsigned symbol(const unsigned short* stream, int i) {
    const int bit = i * BITS, word = bit >> 4;
    const int following = word + 1 < RING_WORDS - 1 ? word + 1 : 0;
    const unsigned window = stream[word] | static_cast<unsigned>(stream[following]) << 16;
    return window >> (bit & 15) & ((1u << BITS) - 1);
}

// The mul1 codebook's half value of a state, as float32.
DEVICE float mul1_value(unsigned state) {
    const unsigned total = dp4a(state * 0x83DCD12Du, 0x01010101u, 1024u);
    return float_of_half(half_of(fma32(static_cast<float>(total), float_of_half(0x1EEE), float_of_half(0xC931))));
}

// A warp a group of 256: lane l has values 8l to 8l + 7. stored [vocabulary, groups * RING_WORDS], signs [groups, 256].
extern "C" __global__ void quantized_rows(const int* __restrict__ ids, const unsigned short* __restrict__ stored,
                                          const float* __restrict__ signs, float* __restrict__ out, int vocabulary,
                                          int hidden, int groups) {
    const int lane = threadIdx.x, group = blockIdx.x;
    const int id = ids[blockIdx.y];
    const bool known = id >= 0 && id < vocabulary;
    const unsigned short* ring = stored + (static_cast<int64>(known ? id : 0) * groups + group) * RING_WORDS;
    const float scale = float_of_half(ring[0]);
    float values[LANE_VALUES];
    unsigned state = 0;
#pragma unroll
    for (int i = 1 - SYMBOLS; i < LANE_VALUES; i++) {
        const int place = (lane * LANE_VALUES + i + GROUP) % GROUP;
        state = (state << BITS | symbol(ring + 1, place)) & 0xFFFFu;
        if (i >= 0) values[i] = mul1_value(state) * scale;
    }
#pragma unroll
    for (int stride = 1; stride < LANE_VALUES; stride *= 2)
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++)
            if (!(i & stride)) {
                const float a = values[i], b = values[i + stride];
                values[i] = a + b;
                values[i + stride] = a - b;
            }
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2)
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            const float other = shuffle_xor(values[i], mask);
            values[i] = lane & mask ? other - values[i] : values[i] + other;
        }
    const int first = group * GROUP + lane * LANE_VALUES;
    float* row = out + static_cast<int64>(blockIdx.y) * hidden;
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++)
        if (first + i < hidden)
            row[first + i] = known ? (values[i] * 0.0625f) * signs[first + i] : float_of(0x7fc00000u);
}
#endif
