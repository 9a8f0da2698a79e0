// Dynamic shared memory by byte offsets, which stay in registers, and the trellis words that are staged there.
#pragma once
#include "device.cuh"
#include "ops/linear/trellis.cuh"

DEVICE unsigned offset_of(const void* shared) {
#ifdef EMULATED
    return static_cast<unsigned>(static_cast<const unsigned char*>(shared) - emulator::dynamic_shared);
#else
    return kept(shared_address(shared));
#endif
}
template <int AHEAD>
DEVICE unsigned word_at(unsigned offset) {
#ifdef EMULATED
    return *reinterpret_cast<const unsigned*>(emulator::shared_at(offset + AHEAD, 4));
#else
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(word) : "r"(offset), "n"(AHEAD));
    return word;
#endif
}
template <int AHEAD>
DEVICE uint4 four_at(unsigned offset) {
#ifdef EMULATED
    return *reinterpret_cast<const uint4*>(emulator::shared_at(offset + AHEAD, 16));
#else
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4+%5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(offset), "n"(AHEAD));
    return v;
#endif
}
DEVICE void stage_piece(unsigned offset, const uint4* global) {
#ifdef EMULATED
    copy_async_16(emulator::shared_at(offset, 16), global);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(offset), "l"(global) : "memory");
#endif
}
// The same without a branch.
DEVICE void stage_piece_if(bool is_staged, unsigned offset, const uint4* global) {
#ifdef EMULATED
    if (is_staged) stage_piece(offset, global);
#else
    asm volatile("{\n\t.reg .pred is_staged;\n\tsetp.ne.u32 is_staged, %2, 0;\n\t"
                 "@is_staged cp.async.cg.shared.global [%0], [%1], 16;\n\t}"
                 ::"r"(offset), "l"(global), "r"(static_cast<unsigned>(is_staged)) : "memory");
#endif
}
DEVICE void store_four(unsigned offset, const float c[4]) {
#ifdef EMULATED
    *reinterpret_cast<float4*>(emulator::shared_at(offset, 16)) = make_float4(c[0], c[1], c[2], c[3]);
#else
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(offset), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3])
                 : "memory");
#endif
}

// Where a lane finds the words of its window, of the first tile that is staged.
template <int twice>
struct LaneWords {
    unsigned first, second, third;

    __device__ __forceinline__ LaneWords(const unsigned* stages, const LanePlace<twice>& place)
        : first(offset_of(stages + place.first)), second(offset_of(stages + place.second)),
          third(Window<twice>::by_ends ? 0 : offset_of(stages + place.third)) {}

    template <int NUMBER>
    __device__ __forceinline__ Window<twice> window(unsigned stage, unsigned shift) const {
        constexpr int ahead = NUMBER * tile_words(twice) * 4;
        const unsigned last = Window<twice>::by_ends ? 0 : word_at<ahead>(third + stage);
        return {word_at<ahead>(first + stage), word_at<ahead>(second + stage), last, shift};
    }
};
