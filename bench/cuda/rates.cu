// How fast a processor issues what decoding a value takes. Macro OPERATION: which.
#include "ops/linear/trellis.cuh"

constexpr int CHAINS = 8;

// out [threads]: each thread's chains of `count` operations each.
extern "C" __global__ void __launch_bounds__(256) operations(unsigned* out, unsigned start, int count) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const OwnBytes own(threadIdx.x % WARP);
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
            const unsigned words[4] = {v[i], v[i + 1], v[i + 2], v[i + 3]}, added[4] = {start, start, start, start};
            mma_bytes_16x8x32(v + i, words, own.ones, added);
        }
#else
#pragma unroll
        for (int i = 0; i < CHAINS; i += 4) {
            unsigned pairs[2];
            codebook_values<MUL1>(v + i, own, pairs);
            v[i] = pairs[0], v[i + 1] = pairs[1], v[i + 2] = pairs[0] + n, v[i + 3] = pairs[1] + n;
        }
#endif
    }
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) all ^= v[i];
    out[thread] = all;
}
