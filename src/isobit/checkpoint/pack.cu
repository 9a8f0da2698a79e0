// States to the bits that a checkpoint stores of them, as pack_states and pack_ring of trellis.py do.
#include "device.cuh"

constexpr int TILE_VALUES = 256;

// The bit of a tile's stream at which the first `count` states end; twice: the width, doubled.
DEVICE int states_end(int count, int twice) { return (count * twice - (twice % 2 ? count % 2 : 0)) / 2; }

DEVICE unsigned shifted(unsigned symbol, int left) { return left >= 0 ? symbol << left : symbol >> -left; }

// states uint16 [tiles, 256] -> words [tiles, 8 * bits]: the stream's first bit is a word's highest.
extern "C" __global__ void pack_tiles(const unsigned short* states, unsigned* words, int64 count, int twice) {
    const int words_of_tile = 4 * twice;
    const int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const unsigned short* tile = states + at / words_of_tile * TILE_VALUES;
    const int first = static_cast<int>(at % words_of_tile) * WARP;
    unsigned word = 0;
    for (int position = larger(2 * first / twice - 1, 0); position < TILE_VALUES; position++) {
        const int begin = states_end(position, twice), end = states_end(position + 1, twice);
        if (begin >= first + WARP) break;
        const unsigned symbol = tile[position] & ((1u << (end - begin)) - 1);
        if (end > first) word |= shifted(symbol, first + WARP - end);
    }
    words[at] = word;
}

// states uint16 [rings, length] -> words uint16 [rings, length * bits / 16]: the stream's first bit is a word's lowest.
extern "C" __global__ void pack_rings(const unsigned short* states, unsigned short* words, int64 count, int bits,
                                      int length) {
    constexpr int WORD = 16;
    const int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const int words_of_ring = length * bits / WORD;
    const unsigned short* ring = states + at / words_of_ring * length;
    const int first = static_cast<int>(at % words_of_ring) * WORD;
    unsigned word = 0;
    for (int position = first / bits; position * bits < first + WORD; position++)
        word |= shifted(ring[position] & ((1u << bits) - 1), position * bits - first);
    words[at] = static_cast<unsigned short>(word);
}
