// Warpgroup products of Hopper: 64 outputs from registers times 32 to 160 rows of halves in shared memory.
//
// The accumulator's registers are laid out as those of mma_16x8x16, group of 8 rows after group, for each of the four
// warps' 16 outputs; so is the A operand.
#pragma once
#include "device.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Let products see what this thread has copied to shared memory.
DEVICE void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Rows of 64 halves, 128 bytes apart from an address that is a multiple of 1024, the 16-byte pieces of row r swapped
// so that piece p is at p ^ r % 8.
DEVICE uint64 wgmma_descriptor(const void* rows) {
    constexpr uint64 eight_rows = 1024 >> 4, swizzle_128 = 1;
    return (shared_address(rows) & 0x3FFFFu) >> 4 | 1ull << 16 | eight_rows << 32 | swizzle_128 << 62;
}

#define WGMMA_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_32 WGMMA_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_48 WGMMA_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_64 WGMMA_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_80 WGMMA_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_SUMS(c, i) WGMMA_FOUR(c, i), WGMMA_FOUR(c, i + 4), WGMMA_FOUR(c, i + 8), WGMMA_FOUR(c, i + 12)
#define WGMMA(rows, sums, a0, a1, a2, a3, b)                                                         \
    "{.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                                     \
    "wgmma.mma_async.sync.aligned.m64n" rows "k16.f32.f16.f16 {" sums "}, {" a0 "," a1 "," a2 "," a3 \
    "}, " b ", add, 1, 1, 0;\n}"
#define WGMMA_OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// sums [64 outputs, ROWS] += a [64, 16] times 16 inputs of the rows; ends asynchronously.
template <int ROWS>
DEVICE void wgmma(float* c, const unsigned a[4], uint64 b) {
    static_assert(ROWS == 32 || ROWS == 64 || ROWS == 96 || ROWS == 128 || ROWS == 160, "no such product");
    if constexpr (ROWS == 32)
        asm volatile(WGMMA("32", WGMMA_16, "%16", "%17", "%18", "%19", "%20")
                     : WGMMA_SUMS(c, 0) : WGMMA_OPERANDS(a, b));
    if constexpr (ROWS == 64)
        asm volatile(WGMMA("64", WGMMA_32, "%32", "%33", "%34", "%35", "%36")
                     : WGMMA_SUMS(c, 0), WGMMA_SUMS(c, 16) : WGMMA_OPERANDS(a, b));
    if constexpr (ROWS == 96)
        asm volatile(WGMMA("96", WGMMA_48, "%48", "%49", "%50", "%51", "%52")
                     : WGMMA_SUMS(c, 0), WGMMA_SUMS(c, 16), WGMMA_SUMS(c, 32) : WGMMA_OPERANDS(a, b));
    if constexpr (ROWS == 128)
        asm volatile(WGMMA("128", WGMMA_64, "%64", "%65", "%66", "%67", "%68")
                     : WGMMA_SUMS(c, 0), WGMMA_SUMS(c, 16), WGMMA_SUMS(c, 32), WGMMA_SUMS(c, 48)
                     : WGMMA_OPERANDS(a, b));
    if constexpr (ROWS == 160)
        asm volatile(WGMMA("160", WGMMA_80, "%80", "%81", "%82", "%83", "%84")
                     : WGMMA_SUMS(c, 0), WGMMA_SUMS(c, 16), WGMMA_SUMS(c, 32), WGMMA_SUMS(c, 48), WGMMA_SUMS(c, 64)
                     : WGMMA_OPERANDS(a, b));
}
