// How fast a processor issues what decoding a value takes. Macro OPERATION: which.
#include "ops/linear/trellis.cuh"

constexpr int CHAINS = 8;

// The sums of the four bytes of each of four words, by one integer tensor product: of reg i in sum i.
DEVICE void byte_sums(const unsigned words[4], unsigned b0, unsigned b1, int sums[4]) {
#ifndef EMULATED
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%2,%1,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
        : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(b0), "r"(b1), "r"(0x6400));
#endif
}

// out [threads]: each thread's chains of `count` operations each.
extern "C" __global__ void __launch_bounds__(256) operations(unsigned* out, unsigned start, int count) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned v[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++) v[i] = start + thread * CHAINS + i;
#pragma unroll 4
    for (int n = 0; n < count; n++) {
#if OPERATION < 5
#pragma unroll
        for (int i = 0; i < CHAINS; i++) {
            if (OPERATION == 0) v[i] = v[i] * start + n;
            if (OPERATION == 1) v[i] = dp4a(v[i], 0x01010101u, start);
            if (OPERATION == 2) v[i] = byte_perm(v[i], start, 0x4215u);
            if (OPERATION == 3) v[i] = funnel_left(v[i], start, 12);
            if (OPERATION == 4) v[i] = fma_half2(v[i], 0x1EEE1EEEu, start);
        }
#elif OPERATION == 5
#pragma unroll
        for (int i = 0; i < CHAINS; i += 4) {
            int sums[4];
            byte_sums(v + i, start, start, sums);
#pragma unroll
            for (int j = 0; j < 4; j++) v[i + j] = sums[j];
        }
#else
#pragma unroll
        for (int i = 0; i < CHAINS; i += 2) {
            const unsigned pair = codebook_values<MUL1>(v[i], v[i + 1]);
            v[i] = pair, v[i + 1] = pair + n;
        }
#endif
    }
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) all ^= v[i];
    out[thread] = all;
}
