// The dialect of isobit's kernels: what a .cu file may use, on a GPU (NVRTC) and under the emulator (g++).
//
// Ordinary +, -, * and / on floats and doubles round once each (NVRTC runs with -fmad=false); a fused step is written
// fma32 or fma64. Warp collectives take all 32 lanes. The scalar functions have the bits of isobit/ops/scalar.py.
#pragma once

#ifdef EMULATED
#include "cuda/emulator/emulator.h"
#else

using int64 = long long;
using uint64 = unsigned long long;
using half_bits = unsigned short;

#define DEVICE __device__ __forceinline__
#define DYNAMIC_SHARED(type, name) \
    extern __shared__ uint4 isobit_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(isobit_dynamic_shared)

DEVICE float fma32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double fma64(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE float sqrt32(float x) { return __fsqrt_rn(x); }
DEVICE double sqrt64(double x) { return __dsqrt_rn(x); }
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }
DEVICE int64 bits_of64(double x) { return __double_as_longlong(x); }
DEVICE double double_of(int64 bits) { return __longlong_as_double(bits); }

DEVICE half_bits nearest_half(float x) {
    half_bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE float float_of_half(half_bits bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
DEVICE unsigned fma_half2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE unsigned add_half2(unsigned a, unsigned b) {
    unsigned d;
    // A product with one keeps ptxas from contracting an add with an earlier product.
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE unsigned dp4a(unsigned a, unsigned b, unsigned c) { return __dp4a(a, b, c); }
DEVICE unsigned byte_perm(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }
DEVICE unsigned funnel_left(unsigned low, unsigned high, unsigned shift) { return __funnelshift_l(low, high, shift); }
DEVICE unsigned funnel_right(unsigned low, unsigned high, unsigned shift) { return __funnelshift_r(low, high, shift); }
DEVICE int popcount(unsigned x) { return __popc(x); }
DEVICE int leading_zeros(unsigned x) { return __clz(x); }
DEVICE unsigned high_product(unsigned a, unsigned b) { return __umulhi(a, b); }

template <typename T>
DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <typename T>
DEVICE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE unsigned ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// mma.sync m16n8k16: c (16x8) += a (16x16, row major) b (16x8, column major), halves in, float32 sums.
DEVICE void mma_16x8x16(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
// Four 8x8 matrices of halves; lane i gives the address of row i % 8 of matrix i / 8, 16 bytes each.
DEVICE void load_matrix_x4(unsigned r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrix_x4_transposed(unsigned r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

DEVICE void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of the committed groups are unfinished.
template <int PENDING>
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// 16 bytes that are read once: not kept in L1.
DEVICE uint4 load_streaming(const uint4* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
    return v;
}
// The same of constants that an early kernel asks for before it awaits its inputs: the other may be moved behind that.
DEVICE uint4 load_ahead(const uint4* pointer) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
    return v;
}

// Of a kernel that is launched early: wait until the kernels before it have ended. Until then it reads nothing but what
// kernels.py calls constant or settled, and writes nothing; every block calls it. An early kernel's inputs are not
// const __restrict__: the compiler could move their loads ahead.
DEVICE void await_inputs_alone() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may begin once a thread of every block has called this, or the block has ended: after the inputs are
// there, unless the next kernel reads constants only before it awaits its own.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Both.
DEVICE void await_inputs() {
    await_inputs_alone();
    let_next_begin();
}
// Ask for what is read much later.
DEVICE void fetch_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
#endif

constexpr int WARP = 32;

template <typename T>
DEVICE T smaller(T a, T b) { return a < b ? a : b; }
template <typename T>
DEVICE T larger(T a, T b) { return a > b ? a : b; }

// The nearest half, saturating at +-65504; NaN stays NaN.
DEVICE half_bits half_of(float x) {
    float bounded = x > 65504.0f ? 65504.0f : x;
    bounded = bounded < -65504.0f ? -65504.0f : bounded;
    return nearest_half(bounded);
}
DEVICE unsigned pack_half2(half_bits low, half_bits high) {
    return static_cast<unsigned>(low) | static_cast<unsigned>(high) << 16;
}

// The last five steps of the lane sum: accumulator j lies in lane j; every lane gets the result.
DEVICE float lane_sum(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) value = value + shuffle_xor(value, mask);
    return value;
}
DEVICE double lane_sum64(double value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) value = value + shuffle_xor(value, mask);
    return value;
}

#include "cuda/functions.cuh"
