// Code for each trellis format that the layers have; macros as in layers.cuh.
#pragma once
#include "ops/experts/layers.cuh"
#include "ops/linear/trellis.cuh"

template <int CODEBOOK, int TWICE>
struct Format {
    static constexpr int codebook = CODEBOOK, twice = TWICE;
    static constexpr int number = 32 * CODEBOOK + TWICE;
    static constexpr int widths =
        CODEBOOK == THREE_INST ? THREE_INST_WIDTHS : CODEBOOK == MCG ? MCG_WIDTHS : MUL1_WIDTHS;
    static constexpr bool present = (widths >> TWICE & 1) != 0;
};

template <typename F, typename Use>
DEVICE void use_format(int format, Use& use) {
    if constexpr (F::present)
        if (format == F::number) use(F{});
}

template <int CODEBOOK, typename Use>
DEVICE void use_widths(int format, Use& use) {
    use_format<Format<CODEBOOK, 2>>(format, use);
    use_format<Format<CODEBOOK, 3>>(format, use);
    use_format<Format<CODEBOOK, 4>>(format, use);
    use_format<Format<CODEBOOK, 5>>(format, use);
    use_format<Format<CODEBOOK, 6>>(format, use);
    use_format<Format<CODEBOOK, 7>>(format, use);
    use_format<Format<CODEBOOK, 8>>(format, use);
    use_format<Format<CODEBOOK, 10>>(format, use);
    use_format<Format<CODEBOOK, 12>>(format, use);
    use_format<Format<CODEBOOK, 14>>(format, use);
    use_format<Format<CODEBOOK, 16>>(format, use);
}

// Call `use` with the Format of that number, of those that the layers have.
template <typename Use>
DEVICE void with_format(int format, Use use) {
    use_widths<THREE_INST>(format, use);
    use_widths<MCG>(format, use);
    use_widths<MUL1>(format, use);
}

DEVICE constexpr int most_twice() {
    int most = 0;
    for (int twice = 2; twice <= 16; twice++)
        if ((THREE_INST_WIDTHS | MCG_WIDTHS | MUL1_WIDTHS) >> twice & 1) most = twice;
    return most;
}
