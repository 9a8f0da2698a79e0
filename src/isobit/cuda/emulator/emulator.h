// Runs kernels of the dialect without a GPU: blocks one after another, each thread of a block a fiber.
//
// A wrong use that a GPU would not report ends the launch with an error: a lane that left before a warp collective, a
// barrier that only some threads reach, a block of an early kernel that awaits no inputs, shared memory by an offset past
// its end. Dynamic shared memory is
// poisoned before every block, and so are an early kernel's arrays but constants until a thread awaits them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __grid_constant__
#define DEVICE static inline

using int64 = long long;
using uint64 = unsigned long long;
using half_bits = unsigned short;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emulator {

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    void* stack_pointer;
    State state;
    unsigned collectives;
    dim3 thread;
};

struct Exchange { alignas(16) unsigned char bytes[2][32][64]; };

struct Region {
    unsigned char* at;
    size_t bytes;
};

extern dim3 grid, block_size, block_index;
extern Fiber* fibers;
extern Fiber* current;
extern std::vector<Exchange> exchanges;
extern unsigned char* dynamic_shared;
extern size_t dynamic_bytes;
extern const char* problem;

void pause(State state);
void await_inputs();
void run(const dim3& grid, const dim3& block, size_t shared_bytes, void (*body)(void*), void* context);
// Arrays that the next launches await, if there are any.
void set_awaited(const Region* regions, size_t count);

// So many bytes of dynamic shared memory by their offset.
inline unsigned char* shared_at(size_t offset, size_t bytes) {
    if (offset + bytes > dynamic_bytes) problem = "shared memory is used past its end";
    return dynamic_shared + offset;
}

inline unsigned rank() { return static_cast<unsigned>(current - fibers); }

// Lanes give `value` and read what any lane gave: `read(values)` sees all 32. Alternating buffers need one barrier.
template <typename T, typename Read>
inline auto exchange(const T& value, Read read) {
    static_assert(sizeof(T) <= 64, "a lane's value is too large");
    const unsigned thread = rank();
    unsigned char(*buffer)[64] = exchanges[thread / 32].bytes[current->collectives++ & 1];
    std::memcpy(buffer[thread % 32], &value, sizeof(T));
    pause(AT_WARP);
    return read([buffer](int lane) {
        T other;
        std::memcpy(&other, buffer[lane], sizeof(T));
        return other;
    });
}

template <typename... Parameters, size_t... Index>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Index...>) {
    kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[Index])...);
}

template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), const unsigned* shape, size_t shared_bytes, void** arguments) {
    auto body = [&] { call(kernel, arguments, std::index_sequence_for<Parameters...>{}); };
    using Body = decltype(body);
    run({shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, shared_bytes,
        [](void* context) { (*static_cast<Body*>(context))(); }, &body);
    return problem;
}

}  // namespace emulator

#define EMULATED_KERNEL(name)                                                                        \
    extern "C" const char* launch_##name(const unsigned* shape, size_t shared_bytes, void** arguments, \
                                         const emulator::Region* awaited, size_t awaited_count) {    \
        emulator::set_awaited(awaited, awaited_count);                                               \
        return emulator::launch(name, shape, shared_bytes, arguments);                               \
    }

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid)
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulator::dynamic_shared)

static inline void __syncthreads() { emulator::pause(emulator::AT_BLOCK); }
static inline void __syncwarp() { emulator::pause(emulator::AT_WARP); }
static inline void __threadfence() {}
DEVICE void await_inputs_alone() { emulator::await_inputs(); }
DEVICE void let_next_begin() {}
DEVICE void await_inputs() { await_inputs_alone(); }
DEVICE void fetch_line(const void*) {}

DEVICE float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double fma64(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE float sqrt32(float x) { return std::sqrt(x); }
DEVICE double sqrt64(double x) { return std::sqrt(x); }

template <typename To, typename From>
static inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &value, sizeof(To));
    return to;
}
DEVICE unsigned bits_of(float x) { return same_bits<unsigned>(x); }
DEVICE float float_of(unsigned bits) { return same_bits<float>(bits); }
DEVICE int64 bits_of64(double x) { return same_bits<int64>(x); }
DEVICE double double_of(int64 bits) { return same_bits<double>(bits); }

DEVICE half_bits nearest_half(float x) { return same_bits<half_bits>(static_cast<_Float16>(x)); }
DEVICE float float_of_half(half_bits bits) { return static_cast<float>(same_bits<_Float16>(bits)); }

// A half product and sum are exact in float64, so one rounding is left.
static inline half_bits half_of_double(double x) { return same_bits<half_bits>(static_cast<_Float16>(x)); }
DEVICE unsigned fma_half2(unsigned a, unsigned b, unsigned c) {
    unsigned d = 0;
    for (int i = 0; i < 2; i++) {
        const int at = 16 * i;
        const double product = static_cast<double>(float_of_half(a >> at)) * float_of_half(b >> at);
        d |= static_cast<unsigned>(half_of_double(product + float_of_half(c >> at))) << at;
    }
    return d;
}
DEVICE unsigned add_half2(unsigned a, unsigned b) { return fma_half2(a, 0x3c003c00u, b); }

DEVICE unsigned dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
DEVICE unsigned byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64 both = static_cast<uint64>(b) << 32 | a;
    unsigned d = 0;
    for (int i = 0; i < 4; i++) d |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return d;
}
DEVICE unsigned funnel_left(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64>(high) << 32 | low) << (shift & 31) >> 32);
}
DEVICE unsigned funnel_right(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64>(high) << 32 | low) >> (shift & 31));
}
DEVICE int popcount(unsigned x) { return __builtin_popcount(x); }
DEVICE int leading_zeros(unsigned x) { return x ? __builtin_clz(x) : 32; }
DEVICE unsigned high_product(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64>(a) * b >> 32);
}

template <typename T>
static inline T shuffle_xor(T value, int mask) {
    const int lane = emulator::rank() % 32;
    return emulator::exchange(value, [&](auto of) { return of(lane ^ mask); });
}
template <typename T>
static inline T shuffle(T value, int lane) {
    return emulator::exchange(value, [&](auto of) { return of(lane & 31); });
}
DEVICE unsigned ballot(bool predicate) {
    return emulator::exchange(predicate, [](auto of) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; lane++) bits |= static_cast<unsigned>(of(lane)) << lane;
        return bits;
    });
}

// The exact sum of a step's products and the accumulator, rounded once: not a tensor core's bits, but as few orders.
static inline void mma_16x8x16(float c[4], const unsigned a[4], const unsigned b[2]) {
    struct Operands { unsigned a[4], b[2]; };
    const int lane = emulator::rank() % 32, group = lane / 4, pair = lane % 4;
    Operands own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    emulator::exchange(own, [&](auto of) {
        double sums[4] = {c[0], c[1], c[2], c[3]};
        for (int k = 0; k < 16; k++) {
            const int shift = k % 2 * 16, quarter = k / 2 % 4, upper = k / 8;
            for (int i = 0; i < 4; i++) {
                const unsigned left = of(group * 4 + quarter).a[2 * upper + i / 2] >> shift;
                const unsigned right = of((2 * pair + i % 2) * 4 + quarter).b[upper] >> shift;
                sums[i] += static_cast<double>(float_of_half(left)) * float_of_half(right);
            }
        }
        for (int i = 0; i < 4; i++) c[i] = static_cast<float>(sums[i]);
        return 0;
    });
}

static inline void load_matrix(unsigned r[4], const void* row, bool transposed) {
    const int lane = emulator::rank() % 32;
    if (reinterpret_cast<uintptr_t>(row) % 16) emulator::problem = "a matrix row is not aligned to 16 bytes";
    emulator::exchange(row, [&](auto of) {
        for (int matrix = 0; matrix < 4; matrix++) {
            half_bits pair[2];
            for (int i = 0; i < 2; i++) {
                const int from = transposed ? 2 * (lane % 4) + i : lane / 4;
                const int column = transposed ? lane / 4 : 2 * (lane % 4) + i;
                pair[i] = static_cast<const half_bits*>(of(8 * matrix + from))[column];
            }
            r[matrix] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
        }
        return 0;
    });
    // Others may write the rows as soon as this lane goes on.
    emulator::pause(emulator::AT_WARP);
}
static inline void load_matrix_x4(unsigned r[4], const void* row) { load_matrix(r, row, false); }
static inline void load_matrix_x4_transposed(unsigned r[4], const void* row) { load_matrix(r, row, true); }

static inline void copy_async_16(void* shared, const void* global) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
        emulator::problem = "an asynchronous copy is not aligned to 16 bytes";
    std::memcpy(shared, global, 16);
}
static inline void copy_async_commit() {}
template <int PENDING>
static inline void copy_async_wait() {}
static inline uint4 load_streaming(const uint4* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16) emulator::problem = "a load is not aligned to 16 bytes";
    return *pointer;
}
DEVICE uint4 load_ahead(const uint4* pointer) { return load_streaming(pointer); }
