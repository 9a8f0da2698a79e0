// Drawing tokens from logits [rows, width]: the largest of each row, exact sums of probabilities, then the draw.
//
// Three kernels in a row share `best` and the other arrays of a chunk's findings. THREADS: of the last one's blocks.
#include "device.cuh"
#include "ops/sample/sums.cuh"

constexpr int CHUNK_THREADS = 256;
constexpr int THREAD_VALUES = CHUNK / CHUNK_THREADS;

struct Draw {
    double temperature, top_p, min_p;
    int64 top_k;
    uint64 seed, position;
};

DEVICE Draw draw_of_row(const int64* draws, int row) {
    if (!draws) return {1.0, 1.0, 0.0, 0, 0ull, 0ull};
    const int64* words = draws + static_cast<int64>(row) * DRAW_FIELDS;
    return {double_of(words[0]), double_of(words[1]), double_of(words[2]), words[3], static_cast<uint64>(words[4]),
            static_cast<uint64>(words[5])};
}

DEVICE uint64 smallest_in_warp(uint64 entry) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) entry = smaller(entry, shuffle_xor(entry, mask));
    return entry;
}
DEVICE uint64 largest_in_warp(uint64 entry) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) entry = larger(entry, shuffle_xor(entry, mask));
    return entry;
}
DEVICE Sum total_of_warp(Sum sum) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) sum = sum + shuffled_xor(sum, mask);
    return sum;
}

// The row's first entry, NOT_FINITE if a logit is not finite; every thread of the block gets it.
DEVICE uint64 best_of_row(const uint64* best, int chunks, uint64* shared) {
    if (threadIdx.x < WARP) {
        uint64 found = NOT_FINITE;
        bool finite = true;
        for (int i = threadIdx.x; i < chunks; i += WARP) {
            found = smaller(found, best[i]);
            finite = finite && best[i] != NOT_FINITE;
        }
        found = smallest_in_warp(found);
        const bool all_finite = ballot(finite) == 0xffffffffu;
        if (!threadIdx.x) *shared = all_finite ? found : NOT_FINITE;
    }
    __syncthreads();
    return *shared;
}

// best [rows, chunks]: each chunk's first entry. Empties the bins of the row: counts, highs, lows [rows, BINS].
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
find_best(const float* __restrict__ logits, int width, uint64* __restrict__ best, unsigned* __restrict__ counts,
          uint64* __restrict__ highs, uint64* __restrict__ lows) {
    __shared__ uint64 of_warp[CHUNK_THREADS / WARP];
    const int chunk = blockIdx.x, chunks = gridDim.x;
    const int64 row = blockIdx.y;
    const float* values = logits + row * width;
    for (int bin = chunk * CHUNK_THREADS + threadIdx.x; bin < BINS; bin += chunks * CHUNK_THREADS) {
        counts[row * BINS + bin] = 0u;
        highs[row * BINS + bin] = lows[row * BINS + bin] = 0ull;
    }
    uint64 found = NOT_FINITE;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < THREAD_VALUES; i++) {
        const int id = chunk * CHUNK + i * CHUNK_THREADS + threadIdx.x;
        const float value = id < width ? values[id] : -float_of(0x7f7fffffu);
        finite = finite && is_finite(value);
        if (id < width) found = smaller(found, entry_of(value, id));
    }
    found = smallest_in_warp(found);
    const bool all_finite = ballot(finite) == 0xffffffffu;
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = all_finite ? found : NOT_FINITE;
    __syncthreads();
    if (threadIdx.x) return;
    bool good = true;
    found = NOT_FINITE;
    for (int i = 0; i < CHUNK_THREADS / WARP; i++) {
        // A warp past the width has found nothing, and that is no fault.
        const bool empty = chunk * CHUNK + i * WARP >= width;
        good = good && (empty || of_warp[i] != NOT_FINITE);
        found = smaller(found, of_warp[i]);
    }
    best[row * chunks + chunk] = good ? found : NOT_FINITE;
}

// totals [rows, chunks, 2]: high and low of the sum of exp(logit - largest). For rows that are not drawn greedily also
// the bins' sums of exp((logit - largest) / temperature), masks [rows, chunks, BINS / 32] of the bins that a chunk has
// values in, and above [rows, chunks]: its last entry that min_p does not rule out.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sum_chunks(const float* __restrict__ logits, int width, const int64* __restrict__ draws,
           const uint64* __restrict__ best, uint64* __restrict__ totals, unsigned* __restrict__ counts,
           uint64* __restrict__ highs, uint64* __restrict__ lows, unsigned* __restrict__ masks,
           uint64* __restrict__ above) {
    __shared__ uint64 shared_best, last_of_warp[CHUNK_THREADS / WARP];
    __shared__ Sum of_warp[CHUNK_THREADS / WARP];
    __shared__ unsigned bin_counts[BINS];
    __shared__ uint64 bin_highs[BINS], bin_lows[BINS];
    const int chunk = blockIdx.x, chunks = gridDim.x;
    const int64 row = blockIdx.y;
    const float* values = logits + row * width;
    const uint64 first = best_of_row(best + row * chunks, chunks, &shared_best);
    if (first == NOT_FINITE) return;
    const float highest = value_of_entry(first);
    const Draw draw = draw_of_row(draws, blockIdx.y);
    const bool drawn = draw.temperature > 0.0;
    const float scale = bin_scale(draw.temperature);
    if (drawn)
        for (int bin = threadIdx.x; bin < BINS; bin += CHUNK_THREADS) {
            bin_counts[bin] = 0u;
            bin_highs[bin] = bin_lows[bin] = 0ull;
        }
    __syncthreads();
    Sum total = no_sum();
    uint64 last = NOTHING;
    for (int i = 0; i < THREAD_VALUES; i++) {
        const int id = chunk * CHUNK + i * CHUNK_THREADS + threadIdx.x;
        if (id >= width) break;
        const float value = values[id];
        double p = probability(value, highest, 1.0);
        total = total + sum_of(p);
        if (!drawn) continue;
        if (draw.temperature != 1.0) p = probability(value, highest, draw.temperature);
        if (!(p < draw.min_p)) last = larger(last, entry_of(value, id));
        const int bin = bin_of(highest, value, scale);
        const Sum part = sum_of(p);
        add_atomically(&bin_counts[bin], 1u);
        add_atomically(&bin_highs[bin], part.high);
        add_atomically(&bin_lows[bin], part.low);
    }
    total = total_of_warp(total);
    last = largest_in_warp(last);
    if (threadIdx.x % WARP == 0) {
        of_warp[threadIdx.x / WARP] = total;
        last_of_warp[threadIdx.x / WARP] = last;
    }
    __syncthreads();
    if (!threadIdx.x) {
        for (int i = 1; i < CHUNK_THREADS / WARP; i++) {
            total = total + of_warp[i];
            last = larger(last, last_of_warp[i]);
        }
        totals[(row * chunks + chunk) * 2] = total.high;
        totals[(row * chunks + chunk) * 2 + 1] = total.low;
        above[row * chunks + chunk] = last;
    }
    if (!drawn) return;
    for (int bin = threadIdx.x; bin < BINS; bin += CHUNK_THREADS) {
        const unsigned count = bin_counts[bin];
        if (count) {
            add_atomically(&counts[row * BINS + bin], count);
            add_atomically(&highs[row * BINS + bin], bin_highs[bin]);
            add_atomically(&lows[row * BINS + bin], bin_lows[bin]);
        }
        const unsigned mask = ballot(count > 0);
        if (bin % WARP == 0) masks[(row * chunks + chunk) * (BINS / 32) + bin / 32] = mask;
    }
}

#ifdef THREADS
constexpr int WARPS = THREADS / WARP;
constexpr int BINS_A_THREAD = BINS / THREADS;
constexpr int MOST_SORTED = 2048;
constexpr int MOST_CHUNKS = 1024;
constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS;

// Where a search for a rank ends: at the first whose sums, its own value included, are past a limit, or at an entry.
enum Kind { COUNT_REACHES, SUM_REACHES, SUM_EXCEEDS, ENTRY_REACHED };
struct Search {
    Kind kind;
    double limit;
    uint64 entry;
};

DEVICE bool is_past(const Search& search, const Sum& sum) {
    if (!sum.count) return false;
    if (search.kind == COUNT_REACHES) return sum.count >= search.limit;
    return search.kind == SUM_REACHES ? value_of(sum) >= search.limit : value_of(sum) > search.limit;
}

// A rank: its entry, and the sums up to it, its own value included.
struct Rank {
    uint64 entry;
    Sum sum;
};

// What the block of a row shares.
struct Room {
    uint64 entries[MOST_SORTED];
    unsigned digit_counts[DIGITS];
    uint64 digit_highs[DIGITS], digit_lows[DIGITS];
    Sum of_warp[WARPS];
    int chunk_list[MOST_CHUNKS];
    int listed, gathered, place;
    Sum before;
    Rank found;
    uint64 best;
};

struct Row {
    const float* values;
    int width, chunks;
    const unsigned* masks;
    float highest, scale;
    double temperature;
};

// Some of a row's values: those of one bin whose keys begin like `key` in its first `bits`; bits 0: all of the bin.
struct Part {
    int bin, bits;
    unsigned key;
};

DEVICE bool is_within(const Part& part, const Row& row, float value) {
    if (bin_of(row.highest, value, row.scale) != part.bin) return false;
    return !part.bits || key_of(value) >> (32 - part.bits) == part.key >> (32 - part.bits);
}

// The sum of what the threads before this one give; `all` gets the sum of all.
DEVICE Sum sum_before(const Sum& own, Room& room, Sum& all) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Sum running = own;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const Sum other = shuffled(running, lane - step);
        if (lane >= step) running = running + other;
    }
    __syncthreads();
    if (lane == WARP - 1) room.of_warp[warp] = running;
    const Sum earlier = shuffled(running, lane - 1);
    __syncthreads();
    Sum before = no_sum();
    all = no_sum();
    for (int i = 0; i < WARPS; i++) {
        if (i == warp) before = all;
        all = all + room.of_warp[i];
    }
    return lane ? before + earlier : before;
}

// The chunks that have values in bins first to last, in no order.
DEVICE void list_chunks(const Row& row, int first, int last, Room& room) {
    __syncthreads();
    if (!threadIdx.x) room.listed = 0;
    __syncthreads();
    for (int chunk = threadIdx.x; chunk < row.chunks; chunk += THREADS) {
        const unsigned* masks = row.masks + static_cast<int64>(chunk) * (BINS / 32);
        bool has = false;
        if (first == last) has = masks[first / 32] >> first % 32 & 1u;
        else
            for (int word = first / 32; word <= last / 32; word++) has = has || masks[word];
        if (has) room.chunk_list[add_atomically(&room.listed, 1)] = chunk;
    }
    __syncthreads();
}

// Put the entries of a part's values, or all entries up to `last`, into the room, sorted; they must fit.
template <typename Wanted>
DEVICE int gather_sorted(const Row& row, Room& room, Wanted wanted) {
    if (!threadIdx.x) room.gathered = 0;
    __syncthreads();
    for (int i = threadIdx.x / WARP; i < room.listed; i += WARPS) {
        const int first = room.chunk_list[i] * CHUNK + threadIdx.x % WARP;
#pragma unroll 16
        for (int step = 0; step < CHUNK / WARP; step++) {
            const int id = first + step * WARP;
            if (id < row.width && wanted(row.values[id], id))
                room.entries[add_atomically(&room.gathered, 1)] = entry_of(row.values[id], id);
        }
    }
    __syncthreads();
    const int count = room.gathered;
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) room.entries[i] = NOT_FINITE;
    for (int run = 2; run <= size; run *= 2)
        for (int distance = run / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
                const uint64 a = room.entries[low], b = room.entries[high];
                if ((a > b) == !(low & run)) {
                    room.entries[low] = b;
                    room.entries[high] = a;
                }
            }
        }
    __syncthreads();
    return count;
}

// The first of the sorted entries that ends the search; the last if none does. before: the sums of all earlier ranks.
DEVICE Rank rank_among_sorted(const Search& search, const Row& row, const Sum& before, int count, Room& room) {
    Sum reached = before;
    for (int base = 0; base < count; base += THREADS) {
        const int i = base + threadIdx.x;
        const uint64 entry = i < count ? room.entries[i] : NOT_FINITE;
        const Sum own = i < count ? sum_of(probability(value_of_entry(entry), row.highest, row.temperature)) : no_sum();
        Sum all;
        const Sum earlier = reached + sum_before(own, room, all);
        const Sum up_to = earlier + own;
        const bool past = search.kind == ENTRY_REACHED ? entry == search.entry : is_past(search, up_to);
        const bool ends = past && !(search.kind != ENTRY_REACHED && is_past(search, earlier));
        const bool none_ends = search.kind != ENTRY_REACHED && i == count - 1 && !past;
        if (i < count && (ends || none_ends)) room.found = {entry, up_to};
        reached = reached + all;
    }
    __syncthreads();
    return room.found;
}

// The rank that ends the search among values that all share one key, by ascending id.
DEVICE Rank rank_among_equals(const Search& search, const Row& row, const Part& part, const Sum& before, int count,
                              Room& room) {
    const Sum one = sum_of(probability(value_of_key(part.key), row.highest, row.temperature));
    unsigned low = 1, high = count;
    if (search.kind != ENTRY_REACHED)
        while (low < high) {
            const unsigned middle = (low + high) / 2;
            const Sum sum = before + Sum{middle, one.high * middle, one.low * middle};
            if (is_past(search, sum)) high = middle;
            else low = middle + 1;
        }
    unsigned seen = 0;
    for (int base = 0; base < row.width; base += THREADS) {
        const int id = base + threadIdx.x;
        const bool equal = id < row.width && key_of(row.values[id]) == part.key;
        Sum all;
        const unsigned place = seen + sum_before({equal, 0ull, 0ull}, room, all).count + 1;
        const bool ends = search.kind == ENTRY_REACHED ? entry_of(value_of_key(part.key), id) == search.entry
                                                       : place == low;
        if (equal && ends)
            room.found = {entry_of(row.values[id], id), before + Sum{place, one.high * place, one.low * place}};
        seen += all.count;
    }
    __syncthreads();
    return room.found;
}

// One more digit of the keys within a part: narrow it to the digit in which the search ends.
DEVICE int narrow(const Search& search, const Row& row, Part& part, Sum& before, Room& room) {
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
        room.digit_counts[digit] = 0u;
        room.digit_highs[digit] = room.digit_lows[digit] = 0ull;
    }
    __syncthreads();
    const int shift = 32 - DIGIT_BITS - part.bits;
    for (int i = threadIdx.x / WARP; i < room.listed; i += WARPS) {
        const int first = room.chunk_list[i] * CHUNK + threadIdx.x % WARP;
        for (int step = 0; step < CHUNK / WARP; step++) {
            const int id = first + step * WARP;
            if (id >= row.width || !is_within(part, row, row.values[id])) continue;
            const Sum own = sum_of(probability(row.values[id], row.highest, row.temperature));
            const int digit = key_of(row.values[id]) >> shift & (DIGITS - 1);
            add_atomically(&room.digit_counts[digit], 1u);
            add_atomically(&room.digit_highs[digit], own.high);
            add_atomically(&room.digit_lows[digit], own.low);
        }
    }
    __syncthreads();
    if (!threadIdx.x) {
        int last = 0;
        const int wanted = key_of_entry(search.entry) >> shift & (DIGITS - 1);
        Sum running = before;
        for (int digit = 0; digit < DIGITS; digit++) {
            const Sum own = {room.digit_counts[digit], room.digit_highs[digit], room.digit_lows[digit]};
            if (own.count) {
                room.before = running;
                last = digit;
                if (search.kind == ENTRY_REACHED ? digit == wanted : is_past(search, running + own)) break;
            }
            running = running + own;
        }
        room.place = last;
    }
    __syncthreads();
    before = room.before;
    part.key |= static_cast<unsigned>(room.place) << shift;
    part.bits += DIGIT_BITS;
    return room.digit_counts[room.place];
}

// This thread's bins of a row, and the sum of all bins before them.
struct Bins {
    Sum sums[BINS_A_THREAD];
    Sum before;
};

// The rank that ends the search; the last of all ranks if none does.
DEVICE Rank find_rank(const Search& search, const Row& row, const Bins& bins, Room& room) {
    const int wanted = bin_of(row.highest, value_of_entry(search.entry), row.scale);
    __syncthreads();
    if (!threadIdx.x) room.place = -1;
    __syncthreads();
    // Without a limit that is passed the search ends in the last bin that has values.
    Sum before = bins.before;
#pragma unroll
    for (int i = 0; i < BINS_A_THREAD; i++) {
        const int bin = threadIdx.x * BINS_A_THREAD + i;
        const Sum up_to = before + bins.sums[i];
        const bool last = up_to.count == static_cast<unsigned>(row.width);
        const bool ends = search.kind == ENTRY_REACHED ? bin == wanted : is_past(search, up_to) || last;
        const bool ended = search.kind != ENTRY_REACHED && is_past(search, before);
        if (bins.sums[i].count && ends && !ended) {
            room.place = bin;
            room.before = before;
            room.gathered = bins.sums[i].count;
        }
        before = up_to;
    }
    __syncthreads();
    Part part = {room.place, 0, 0u};
    before = room.before;
    int count = room.gathered;
    list_chunks(row, part.bin, part.bin, room);
    while (count > MOST_SORTED && part.bits < 32) count = narrow(search, row, part, before, room);
    if (count > MOST_SORTED) return rank_among_equals(search, row, part, before, count, room);
    count = gather_sorted(row, room, [&](float value, int id) { return is_within(part, row, value); });
    return rank_among_sorted(search, row, before, count, room);
}

DEVICE Bins bins_of_row(const unsigned* counts, const uint64* highs, const uint64* lows, int64 row, Room& room,
                        Sum& all) {
    Bins bins;
    Sum own = no_sum();
#pragma unroll
    for (int i = 0; i < BINS_A_THREAD; i++) {
        const int64 at = row * BINS + threadIdx.x * BINS_A_THREAD + i;
        bins.sums[i] = {counts[at], highs[at], lows[at]};
        own = own + bins.sums[i];
    }
    bins.before = sum_before(own, room, all);
    return bins;
}

// Every thread gets the sum of exp(logit - largest), times 2^32.
DEVICE double total_of_row(const uint64* totals, int chunks, Room& room) {
    Sum own = no_sum(), all;
    for (int i = threadIdx.x; i < chunks; i += THREADS) own = own + Sum{0u, totals[2 * i], totals[2 * i + 1]};
    sum_before(own, room, all);
    return value_of(all);
}

DEVICE uint64 last_above(const uint64* above, int chunks, Room& room) {
    uint64 last = NOTHING;
    for (int i = threadIdx.x; i < chunks; i += THREADS) last = larger(last, above[i]);
    last = largest_in_warp(last);
    __syncthreads();
    if (threadIdx.x % WARP == 0) room.of_warp[threadIdx.x / WARP].high = last;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) last = larger(last, room.of_warp[i].high);
    return last;
}

// Philox4x32-10 (Salmon et al., SC 2011), and of its first two words the upper 53 bits as a number from 0 to 1.
DEVICE double uniform_number(uint64 seed, uint64 position) {
    unsigned first = static_cast<unsigned>(position), second = static_cast<unsigned>(position >> 32);
    unsigned third = 0u, fourth = 0u;
    unsigned first_key = static_cast<unsigned>(seed), second_key = static_cast<unsigned>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const unsigned high_first = high_product(0xD2511F53u, first), low_first = 0xD2511F53u * first;
        const unsigned high_third = high_product(0xCD9E8D57u, third), low_third = 0xCD9E8D57u * third;
        first = high_third ^ second ^ first_key;
        second = low_third;
        third = high_first ^ fourth ^ second_key;
        fourth = low_first;
        first_key += 0x9E3779B9u;
        second_key += 0xBB67AE85u;
    }
    return static_cast<double>((static_cast<uint64>(second) << 32 | first) >> 11) * (1.0 / 9007199254740992.0);
}

// The filters and the draw, each a search for the rank at which what is kept ends.
DEVICE uint64 drawn_entry(const Draw& draw, const Row& row, uint64 first, const Bins& bins, const Sum& all,
                          uint64 last_likely, Room& room) {
    enum Step { TOP_K, TOP_P, MIN_P, DRAW, STEPS };
    Rank kept = {NOT_FINITE, all};
    if (last_likely == NOTHING) return first;
    for (int step = TOP_K; step < STEPS; step++) {
        Search search = {COUNT_REACHES, static_cast<double>(draw.top_k), first};
        if (step == TOP_K && !(draw.top_k > 0 && draw.top_k < row.width)) continue;
        if (step == TOP_P) {
            if (!(draw.top_p < 1.0)) continue;
            search = {SUM_REACHES, draw.top_p * value_of(kept.sum), first};
        }
        if (step == MIN_P) {
            if (!(draw.min_p > 0.0 && last_likely < kept.entry)) continue;
            search = {ENTRY_REACHED, 0.0, last_likely};
        }
        if (step == DRAW) {
            const double uniform = uniform_number(draw.seed, draw.position);
            search = {SUM_EXCEEDS, uniform * value_of(kept.sum), first};
        }
        const Rank found = find_rank(search, row, bins, room);
        kept = found.entry < kept.entry ? found : kept;
    }
    return kept.entry;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
draw_tokens(const float* __restrict__ logits, int width, int chunks, const int64* __restrict__ draws,
            const uint64* __restrict__ best, const uint64* __restrict__ totals, const unsigned* __restrict__ counts,
            const uint64* __restrict__ highs, const uint64* __restrict__ lows, const unsigned* __restrict__ masks,
            const uint64* __restrict__ above, int* __restrict__ tokens, double* __restrict__ logprobs,
            unsigned char* __restrict__ finite) {
    __shared__ Room room;
    const int64 row = blockIdx.x;
    const uint64 first = best_of_row(best + row * chunks, chunks, &room.best);
    if (first == NOT_FINITE) {
        if (!threadIdx.x) {
            tokens[row] = -1;
            logprobs[row] = double_of(0x7ff8000000000000ll);
            finite[row] = 0;
        }
        return;
    }
    const Draw draw = draw_of_row(draws, blockIdx.x);
    const double total = total_of_row(totals + row * chunks * 2, chunks, room);
    uint64 drawn = first;
    if (draw.temperature > 0.0) {
        const float highest = value_of_entry(first);
        const Row values = {logits + row * width, width, chunks, masks + row * chunks * (BINS / 32), highest,
                            bin_scale(draw.temperature), draw.temperature};
        Sum all;
        const Bins bins = bins_of_row(counts, highs, lows, row, room, all);
        const uint64 likely = last_above(above + row * chunks, chunks, room);
        drawn = drawn_entry(draw, values, first, bins, all, likely, room);
    }
    if (threadIdx.x) return;
    tokens[row] = id_of_entry(drawn);
    const double above_none = static_cast<double>(value_of_entry(drawn)) - static_cast<double>(value_of_entry(first));
    logprobs[row] = above_none - log64(total * (1.0 / 4294967296.0));
    finite[row] = 1;
}

// ids and logprobs [rows, count], count at most MOST_SORTED and width: the most likely, best first.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
most_likely(const float* __restrict__ logits, int width, int chunks, int count, const uint64* __restrict__ best,
            const uint64* __restrict__ totals, const unsigned* __restrict__ counts, const uint64* __restrict__ highs,
            const uint64* __restrict__ lows, const unsigned* __restrict__ masks, int* __restrict__ ids,
            double* __restrict__ logprobs) {
    __shared__ Room room;
    const int64 row = blockIdx.x;
    const uint64 first = best_of_row(best + row * chunks, chunks, &room.best);
    if (first == NOT_FINITE) {
        for (int rank = threadIdx.x; rank < count; rank += THREADS) {
            ids[row * count + rank] = -1;
            logprobs[row * count + rank] = double_of(0x7ff8000000000000ll);
        }
        return;
    }
    const double total = total_of_row(totals + row * chunks * 2, chunks, room);
    const double lost = log64(total * (1.0 / 4294967296.0)), highest = value_of_entry(first);
    const Row values = {logits + row * width, width, chunks, masks + row * chunks * (BINS / 32),
                        value_of_entry(first), bin_scale(1.0), 1.0};
    Sum all;
    const Bins bins = bins_of_row(counts, highs, lows, row, room, all);
    const uint64 last = find_rank({COUNT_REACHES, static_cast<double>(count), first}, values, bins, room).entry;
    list_chunks(values, 0, bin_of(values.highest, value_of_entry(last), values.scale), room);
    gather_sorted(values, room, [&](float value, int id) { return entry_of(value, id) <= last; });
    for (int rank = threadIdx.x; rank < count; rank += THREADS) {
        ids[row * count + rank] = id_of_entry(room.entries[rank]);
        logprobs[row * count + rank] = static_cast<double>(value_of_entry(room.entries[rank])) - highest - lost;
    }
}
#endif
