// Warps that take turns on one chain: each hands it to the next through shared memory.
#pragma once
#include "device.cuh"

// Of a warp that passes a barrier in shared memory: one lane arrives for all, after a __syncwarp. A checking build has
// all of them arrive, since compute-sanitizer's racecheck reports what the lanes that do not arrive wrote.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif

constexpr int MOST_TURN_WARPS = 15;  // of a block: its named barriers but the one of __syncthreads
constexpr int ARRIVALS = EVERY_LANE_ARRIVES ? WARP : 1;  // of a warp

#ifdef EMULATED
static int handed_over[MOST_TURN_WARPS + 1];
#endif

// Before the first turn, by every thread of the block.
DEVICE void begin_turns() {
#ifdef EMULATED
    if (threadIdx.x <= MOST_TURN_WARPS) handed_over[threadIdx.x] = 0;
    __syncthreads();
#endif
}

// Let the warps that wait for `barrier` (1 to 15) go on; what this warp wrote to shared memory is then to be seen.
// threads: those of this warp and of all that wait.
DEVICE void hand_over(int barrier, int threads = 2 * WARP) {
#ifdef EMULATED
    __syncwarp();
    if (threadIdx.x % WARP == 0) handed_over[barrier]++;
#else
    // PTX: a bar.arrive synchronizes with the bar.sync of its barrier, so that earlier reads and writes need no fence.
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

// Wait for the `count`th hand_over of a barrier, 1 the first; by all warps of `threads` but that one.
DEVICE void wait_for_turn(int barrier, int count, int threads = 2 * WARP) {
#ifdef EMULATED
    while (handed_over[barrier] < count) emulator::pause(emulator::READY);
    __syncwarp();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

// Turns of more warps than there are named barriers: a barrier in shared memory for each, passed once a hand over.
#ifdef EMULATED
using PassedBarrier = uint64*;
DEVICE PassedBarrier barrier_at(uint64* at) { return at; }
DEVICE PassedBarrier passed_barrier(uint64* at) { return at; }
#else
using PassedBarrier = unsigned;
DEVICE PassedBarrier barrier_at(uint64* at) { return shared_address(at); }
// The same, which stays in its register.
DEVICE PassedBarrier passed_barrier(uint64* at) { return shuffle_xor(shared_address(at), 0); }
#endif

// Before the first turn, by a warp for the barrier that it waits for; the block is then to be synchronised.
DEVICE void begin_passing(uint64* at, int lane) {
    if (lane != 0) return;
#ifdef EMULATED
    *at = 0;
#else
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(at)), "n"(ARRIVALS) : "memory");
#endif
}

// By a warp: let the one that waits go on; what this warp wrote to shared memory is then to be seen.
DEVICE void pass(PassedBarrier barrier, int lane) {
    __syncwarp();
    if (!EVERY_LANE_ARRIVES && lane != 0) return;
#ifdef EMULATED
    ++*barrier;
#else
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
#endif
}

// By one warp: wait for the `count`th pass, 1 the first, or for none. There is never one more before the wait has
// ended. Each lane waits by itself: what all lanes must have waited for takes a __syncwarp, or is a product.
DEVICE void wait_for_pass(PassedBarrier barrier, int count) {
#ifdef EMULATED
    // A GPU knows the passes by their parity only.
    const auto passes = [=] { return static_cast<int>(*barrier); };
    if (passes() + 1 < count) emulator::problem = "a warp waits for a pass before the one before it";
    while (passes() < count) emulator::pause(emulator::READY);
    if (passes() > count) emulator::problem = "a barrier is passed again before a wait for it has ended";
    __syncwarp();
#else
    const unsigned parity = (count - 1) & 1;
    int done;
    do {
        asm volatile("{\n\t.reg .pred done;\n\t"
#if __CUDA_ARCH__ >= 900
                     "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n\t"
#else
                     "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
#endif
                     "selp.b32 %0, 1, 0, done;\n\t}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
#endif
}
