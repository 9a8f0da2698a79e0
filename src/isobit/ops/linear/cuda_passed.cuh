// Sums that one thread block hands to another, which waits for it: each 8 bytes that say whether it is there, so that
// no fence or counter comes between. Zeros before a launch and after it.
//
// Who waits must have the higher number in the grid: blocks begin in that order, so that those awaited are never
// behind.
#pragma once
#include "device.cuh"
#include "ops/linear/cuda_finish.cuh"

constexpr uint64 IS_THERE = 1ull << 32;

DEVICE void pass_sum(uint64* at, float sum) {
    const uint64 word = IS_THERE | bits_of(sum);
#ifdef EMULATED
    *at = word;
#else
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
#endif
}

DEVICE uint64 passed_word(const uint64* at) {
#ifdef EMULATED
    return *at;
#else
    uint64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
#endif
}

// Wait for four neighbouring sums, and leave zeros.
DEVICE void take_sums(uint64* at, float v[4]) {
    uint64 words[4];
    do {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = passed_word(at + i);
    } while (((words[0] & words[1]) & (words[2] & words[3]) & IS_THERE) == 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = float_of(static_cast<unsigned>(words[i]));
        at[i] = 0;
    }
}

// Pass the chains of a column of tiles to passed [rows, columns], as put_column has them.
template <int COUNT>
DEVICE void pass_column(const float (&chains)[COUNT][4], uint64* passed, int rows, int columns, int first_output,
                        int lane) {
    const auto put = [=](int64 place, float sum) { pass_sum(passed + place, sum); };
    put_column(chains, rows, columns, first_output, lane, put);
}
