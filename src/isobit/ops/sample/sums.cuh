// What sampling sums and sorts by: exact sums of probabilities, and logits as whole numbers in the order of drawing.
#pragma once

constexpr int CHUNK = 2048;         // ids that one block walks through
constexpr int BINS = 2048;          // classes of logits by their distance below the largest
constexpr float BINS_A_UNIT = 64.0f;
constexpr int DRAW_FIELDS = 6;      // 8-byte words of a draw
constexpr uint64 NOTHING = 0;       // an entry that no finite logit has, before all others
constexpr uint64 NOT_FINITE = ~0ull;  // an entry that no id has, after all others

#ifdef EMULATED
template <typename T>
DEVICE T add_atomically(T* place, T value) {
    const T before = *place;
    *place += value;
    return before;
}
#else
template <typename T>
DEVICE T add_atomically(T* place, T value) { return atomicAdd(place, value); }
#endif

// A sum of values from 0 to 1, each cut to a multiple of 2^-72: of 2^-32 in `high` and 2^-72 in `low`. Exact, so that
// no order changes it, for up to 2^21 values.
struct Sum {
    unsigned count;
    uint64 high, low;
};

DEVICE Sum no_sum() { return {0u, 0ull, 0ull}; }

DEVICE Sum operator+(const Sum& a, const Sum& b) { return {a.count + b.count, a.high + b.high, a.low + b.low}; }

DEVICE Sum sum_of(double probability) {
    const double scaled = probability * 4294967296.0;
    const uint64 high = static_cast<uint64>(scaled);
    const double rest = scaled - static_cast<double>(high);
    return {1u, high, static_cast<uint64>(rest * 1099511627776.0)};
}

// The sum times 2^32, rounded once.
DEVICE double value_of(const Sum& sum) {
    const uint64 high = sum.high + (sum.low >> 40), low = sum.low & ((1ull << 40) - 1);
    return static_cast<double>(high) + static_cast<double>(low) * (1.0 / 1099511627776.0);
}

DEVICE Sum shuffled_xor(const Sum& sum, int mask) {
    return {shuffle_xor(sum.count, mask), shuffle_xor(sum.high, mask), shuffle_xor(sum.low, mask)};
}
DEVICE Sum shuffled(const Sum& sum, int lane) {
    return {shuffle(sum.count, lane), shuffle(sum.high, lane), shuffle(sum.low, lane)};
}

DEVICE bool is_finite(float value) { return absolute(value) < float_of(0x7f800000u); }

// A number that falls as a finite value grows; -0 and +0 share one.
DEVICE unsigned key_of(float value) {
    const unsigned bits = bits_of(value + 0.0f);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}
DEVICE float value_of_key(unsigned key) { return float_of(key & 0x80000000u ? key : ~key & 0x7fffffffu); }

// Entries ascend by falling logit, then by id.
DEVICE uint64 entry_of(float value, int id) {
    return static_cast<uint64>(key_of(value)) << 32 | static_cast<unsigned>(id);
}
DEVICE unsigned key_of_entry(uint64 entry) { return static_cast<unsigned>(entry >> 32); }
DEVICE int id_of_entry(uint64 entry) { return static_cast<int>(static_cast<unsigned>(entry)); }
DEVICE float value_of_entry(uint64 entry) { return value_of_key(key_of_entry(entry)); }

// The class of a logit, which never falls as the logit does. The last takes all that is far below the largest.
DEVICE int bin_of(float highest, float value, float scale) {
    const float place = (highest - value) * scale;
    return place < BINS - 1 ? static_cast<int>(place) : BINS - 1;
}
DEVICE float bin_scale(double temperature) {
    return temperature > 1.0 ? static_cast<float>(BINS_A_UNIT / temperature) : BINS_A_UNIT;
}

DEVICE double probability(float value, double highest, double temperature) {
    return exp64((static_cast<double>(value) - highest) / temperature);
}
