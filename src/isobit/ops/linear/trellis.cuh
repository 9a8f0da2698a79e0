// EXL3 tiles decoded in registers, straight into the A operand of mma_16x8x16 (m = outputs, k = inputs).
//
// A tile of `twice` = 2 * bits is 4 * twice words of 32 bits, a circular bit stream read from each word's most
// significant bit. Lane l decodes positions 8l to 8l + 7, which are its eight values of the operand.
#pragma once
#include "device.cuh"

constexpr int THREE_INST = 0, MCG = 1, MUL1 = 2;
constexpr int TILE = 16;
constexpr int LANE_VALUES = 8;

__host__ __device__ constexpr int tile_words(int twice_bits) { return 4 * twice_bits; }
__host__ __device__ constexpr int tile_bytes(int twice_bits) { return 16 * twice_bits; }

// The stream bit, counted from the lane's own first position, at which its position j's state ends.
__host__ __device__ constexpr int state_end(int twice_bits, int j) {
    return twice_bits % 2 == 0 ? (j + 1) * (twice_bits / 2) : ((j + 1) * twice_bits - (j + 1) % 2) / 2;
}

// The bits from the first state's first to the last state's last.
__host__ __device__ constexpr int window_bits(int twice_bits) {
    return state_end(twice_bits, 7) - state_end(twice_bits, 0) + 16;
}

// The stream bit at which the lane's window begins.
__host__ __device__ constexpr int window_start(int twice_bits, int lane) {
    return (4 * twice_bits * lane + state_end(twice_bits, 0) - 16 + 128 * twice_bits) % (128 * twice_bits);
}

__host__ __device__ constexpr int most_shift(int twice_bits) {
    int most = 0;
    for (int lane = 0; lane < 32; ++lane) {
        const int shift = window_start(twice_bits, lane) % 32;
        most = shift > most ? shift : most;
    }
    return most;
}

__host__ __device__ constexpr int window_words(int twice_bits) {
    return (most_shift(twice_bits) + window_bits(twice_bits) + 31) / 32;
}

// Widths whose windows begin at the same bit of a word in every lane.
__host__ __device__ constexpr bool has_one_shift(int twice_bits) { return twice_bits % 8 == 0; }

// The same value, which the compiler is to keep rather than compute again in a loop.
DEVICE int kept(int value) {
#ifndef EMULATED
    asm volatile("" : "+r"(value));
#endif
    return value;
}

// The same value, which stays in its register: a shuffle cannot be computed again.
DEVICE int remembered(int value) { return shuffle_xor(value, 0); }

// Where a lane's window lies in every tile of a width; computed once.
template <int twice>
struct LanePlace {
    int first, second, third;
    unsigned shift;

    __device__ __forceinline__ explicit LanePlace(int lane) {
        constexpr int words = tile_words(twice);
        const int start = window_start(twice, lane);
        first = kept(start / 32);
        second = kept((first + 1) % words);
        third = window_words(twice) > 2 ? kept((first + 2) % words) : 0;
        shift = has_one_shift(twice) ? most_shift(twice) : kept(start % 32);
    }

    // Before a long loop, by a whole warp: have it in registers from here on.
    __device__ __forceinline__ void remember() {
        first = remembered(first), second = remembered(second);
        if (window_words(twice) > 2) third = remembered(third);
        if (!has_one_shift(twice)) shift = remembered(static_cast<int>(shift));
    }
};

// 16 bits of a word as a number: those that end `above` bits over its least significant bit.
template <int ABOVE>
DEVICE unsigned state_in(unsigned word) {
    static_assert(ABOVE >= 0 && ABOVE <= 16, "the state must lie in the word");
    if (ABOVE == 16) return word >> 16;
    // States 8 bits apart share this shift.
    const unsigned shifted = word >> ABOVE % 8;
    return ABOVE < 8 ? shifted & 0xFFFFu : byte_perm(shifted, 0u, 0x4421u);
}

// A lane's window of up to 72 bits, from its first state's first bit on.
template <int twice>
struct Window {
    static constexpr int bits = window_bits(twice);
    // Two words suffice: the window's first 32 bits and, if it is longer, its last 32.
    static constexpr bool by_ends = window_words(twice) == 2;
    unsigned begin, middle, last;

    __device__ __forceinline__ Window(const unsigned* words, const LanePlace<twice>& place)
        : Window(words[place.first], words[place.second], by_ends ? 0 : words[place.third], place.shift) {}

    // The words of the lane's place; the third where two do not suffice.
    __device__ __forceinline__ Window(unsigned first, unsigned second, unsigned third, unsigned place_shift) {
        const unsigned shift = has_one_shift(twice) ? most_shift(twice) : place_shift;
        begin = funnel_left(second, first, shift);
        middle = last = 0;
        if (by_ends) {
            if (bits > 32) last = funnel_right(second, first, 64 - bits - shift);
        } else {
            middle = funnel_left(third, second, shift);
            if (bits > 64) last = third << shift;
        }
    }

    template <int J>
    __device__ __forceinline__ unsigned state() const {
        constexpr int offset = state_end(twice, J) - state_end(twice, 0);
        if (by_ends) {
            // Single-step extractions first: from the end's last byte boundaries, then from the beginning's.
            constexpr int above = bits - 16 - offset;
            if constexpr (bits > 32 && above <= 16) return state_in<above>(last);
            if constexpr (offset <= 16) return state_in<16 - (offset <= 16 ? offset : 16)>(begin);
        } else {
            if constexpr (offset <= 16) return state_in<16 - (offset <= 16 ? offset : 16)>(begin);
            if constexpr (offset > 16 && offset < 32) return funnel_right(middle, begin, 48 - offset) & 0xFFFFu;
            if constexpr (offset >= 32 && offset <= 48)
                return state_in<offset >= 32 && offset <= 48 ? 48 - offset : 0>(middle);
            if constexpr (offset > 48) return funnel_right(last, middle, 80 - offset) & 0xFFFFu;
        }
        return 0;
    }
};

// Two states -> their two half values, packed.
template <int codebook>
DEVICE unsigned codebook_values(unsigned low, unsigned high) {
    if (codebook == MUL1) {
        // As half bits, 0x6400 + n is 1024 + n.
        const unsigned first = dp4a(low * 0x83DCD12Du, 0x01010101u, 0x6400u);
        const unsigned second = dp4a(high * 0x83DCD12Du, 0x01010101u, 0x6400u);
        return fma_half2(byte_perm(first, second, 0x5410u), 0x1EEE1EEEu, 0xC931C931u);
    }
    const unsigned multiplier = codebook == MCG ? 0xCBAC1FEDu : 89226354u;
    const unsigned added = codebook == MCG ? 0u : 64248484u;
    const unsigned first = ((low * multiplier + added) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const unsigned second = ((high * multiplier + added) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    return add_half2(byte_perm(first, second, 0x5410u), byte_perm(first, second, 0x7632u));
}

// The lane's four registers of the tile's A operand: bit 0 of a position is k + 1, bit 1 k + 8, bit 2 output + 8.
template <int codebook, int twice>
DEVICE void decode_window(const Window<twice>& window, unsigned fragment[4]) {
    fragment[0] = codebook_values<codebook>(window.template state<0>(), window.template state<1>());
    fragment[1] = codebook_values<codebook>(window.template state<4>(), window.template state<5>());
    fragment[2] = codebook_values<codebook>(window.template state<2>(), window.template state<3>());
    fragment[3] = codebook_values<codebook>(window.template state<6>(), window.template state<7>());
}

// The same from a tile's words.
template <int codebook, int twice>
DEVICE void decode_fragment(
        const unsigned* words, const LanePlace<twice>& place, unsigned fragment[4]) {
    decode_window<codebook>(Window<twice>(words, place), fragment);
}
