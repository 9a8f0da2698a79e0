// The trellis search of search.py with its bits: one block searches RINGS rings at a time.
//
// EVEN, ODD: the new bits of even and odd positions, EVEN <= ODD. THREADS: of a block; TOGETHER: rings that a thread
// advances at once; BUFFERS: 2 if shared memory holds the costs of two positions, else 1; TABLE_IN_SHARED: whether it
// holds the codebook's 65,536 halves.
#include "device.cuh"

constexpr int STATE_BITS = 16;
constexpr int WARPS = THREADS / WARP;
constexpr int RUN = 8;  // consecutive u that a thread takes at once
constexpr int COSTS = 1 << (STATE_BITS - EVEN);
constexpr int LEAST_RUNS = (1 << (STATE_BITS - ODD)) / RUN;
constexpr int TEAM = LEAST_RUNS < THREADS ? LEAST_RUNS : THREADS;  // threads that share rings
constexpr int RINGS = THREADS / TEAM * TOGETHER;
constexpr bool APART = ODD <= 6;  // the two halves of a run's costs lie apart, so that no bank is stored to twice
constexpr int HALF_COSTS = APART ? COSTS / 2 + 16 : COSTS / 2;
constexpr int RING_COSTS = 2 * HALF_COSTS;
constexpr int MOST_MARKED = 4;  // with so many old bits, a note holds a mark for every old value
constexpr int NOTES = EVEN == 4 ? 2 * COSTS : COSTS;  // bytes
constexpr int MARKS = 32;
constexpr int MOST_GUESSED = 5;  // old bits that a warp's lanes can number
constexpr unsigned UNREACHABLE = 0x7f800000;  // the bits of infinity

// The notes of a position and ring: for each leaving u the old value of its best state, or marks of old values.
DEVICE unsigned char* notes_of(unsigned char* notes, int position, int ring) {
    return notes + (static_cast<int64>(position) * RINGS + ring) * NOTES;
}

DEVICE unsigned read_note(const unsigned char* notes, int u, int following) {
    return following == 4 ? reinterpret_cast<const unsigned short*>(notes)[u] : notes[u];
}

// Where the cost of u lies among a ring's.
DEVICE int place_of(int u) { return APART ? u / RUN * (RUN / 2) + u % (RUN / 2) + (u / 4 % 2) * HALF_COSTS : u; }

// The old value with the last mark; marks were shifted in from the right, `count` of them.
DEVICE unsigned last_marked(unsigned marks, unsigned count) {
    return count - WARP + leading_zeros(marks & (0u - marks));
}

template <int COUNT>
DEVICE void load_costs(float entry[COUNT], const float* costs) {
    if constexpr (COUNT == 4) {
        const float4 four = *reinterpret_cast<const float4*>(costs);
        entry[0] = four.x, entry[1] = four.y, entry[2] = four.z, entry[3] = four.w;
    } else if constexpr (COUNT == 2) {
        const float2 two = *reinterpret_cast<const float2*>(costs);
        entry[0] = two.x, entry[1] = two.y;
    } else {
        entry[0] = *costs;
    }
}

DEVICE void unpack_values(float values[RUN], uint4 packed) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < RUN; i++) values[i] = float_of_half(static_cast<half_bits>(words[i / 2] >> 16 * (i % 2)));
}

// Tries the states with old value t: lowers the least costs of a run of leaving u, and shifts a mark in where it did.
template <int HERE, int FOLLOWING>
DEVICE void try_states(float least[TOGETHER][RUN], unsigned marks[TOGETHER][RUN], int t, bool is_first,
                       const uint4* table, const float* costs, const float targets[TOGETHER], int run) {
    constexpr int LEAVING = 1 << (STATE_BITS - FOLLOWING), KEPT = LEAVING >> HERE;
    constexpr int ENTRIES = HERE < 3 ? RUN >> HERE : 1, ENTRY_STRIDE = APART ? KEPT / 2 : KEPT;
    const float* entries = costs + place_of(run * RUN >> HERE) + t * ENTRY_STRIDE;
    float values[RUN];
    unpack_values(values, table[t * (LEAVING / RUN) + run]);
#pragma unroll
    for (int ring = 0; ring < TOGETHER; ring++) {
        float entry[ENTRIES];
        load_costs<ENTRIES>(entry, entries + ring * RING_COSTS);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            const float distance = values[i] - targets[ring];
            const float cost = fma32(distance, distance, entry[HERE < 3 ? i >> HERE : 0]);
            // The difference's sign is the comparison; of two infinities it does not matter.
            const unsigned is_lower = bits_of(cost - least[ring][i]);
            marks[ring][i] = is_first ? 1 : funnel_left(is_lower, marks[ring][i], 1);
            least[ring][i] = is_first ? cost : fminf(cost, least[ring][i]);
        }
    }
}

template <int FOLLOWING>
DEVICE void write_notes(unsigned char* notes, int run, const unsigned noted[RUN]) {
    unsigned words[RUN / 2];
#pragma unroll
    for (int i = 0; i < RUN / 2; i++)
        words[i] = byte_perm(noted[2 * i], noted[2 * i + 1], FOLLOWING == 4 ? 0x5410 : 0x0040);
    if constexpr (FOLLOWING == 4)
        reinterpret_cast<uint4*>(notes)[run] = make_uint4(words[0], words[1], words[2], words[3]);
    else
        reinterpret_cast<uint2*>(notes)[run] =
            make_uint2(byte_perm(words[0], words[1], 0x5410), byte_perm(words[2], words[3], 0x5410));
}

// What a thread knows of its team's rings.
struct Team {
    unsigned char* notes;
    const uint4* table;
    float* costs;                    // of the team's first ring, at the position that comes
    float* spare;                    // where those of the position after it go
    const float* targets[TOGETHER];  // of each ring
    int ring, member, length;
};

// The least cost of each of a run of leaving u; notes the old bits that gave it.
template <int HERE, int FOLLOWING>
DEVICE void search_run(float least[TOGETHER][RUN], const Team& team, int position, const float targets[TOGETHER],
                       int run) {
    constexpr int OLD = 1 << FOLLOWING;
    unsigned noted[TOGETHER][RUN];
    if constexpr (FOLLOWING <= MOST_MARKED) {
        constexpr int UNROLLED = FOLLOWING == 4 ? 5 : OLD - 1;
        try_states<HERE, FOLLOWING>(least, noted, 0, true, team.table, team.costs, targets, run);
#pragma unroll UNROLLED
        for (int t = 1; t < OLD; t++)
            try_states<HERE, FOLLOWING>(least, noted, t, false, team.table, team.costs, targets, run);
    } else {
        constexpr int BATCH = OLD < MARKS ? OLD : MARKS;
#pragma unroll
        for (int i = 0; i < TOGETHER * RUN; i++) {
            least[i / RUN][i % RUN] = float_of(UNREACHABLE);
            noted[i / RUN][i % RUN] = 0;
        }
#pragma unroll 1
        for (int batch = 0; batch < OLD; batch += BATCH) {
            unsigned marks[TOGETHER][RUN];
#pragma unroll
            for (int i = 0; i < TOGETHER * RUN; i++) marks[i / RUN][i % RUN] = 0;
#pragma unroll 8
            for (int t = 0; t < BATCH; t++)
                try_states<HERE, FOLLOWING>(least, marks, batch + t, false, team.table, team.costs, targets, run);
#pragma unroll
            for (int i = 0; i < TOGETHER * RUN; i++)
                if (marks[i / RUN][i % RUN])
                    noted[i / RUN][i % RUN] = batch + last_marked(marks[i / RUN][i % RUN], BATCH);
        }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
        write_notes<FOLLOWING>(notes_of(team.notes, position, team.ring + i), run, noted[i]);
}

DEVICE void store_costs(float* costs, int run, const float least[TOGETHER][RUN]) {
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
        float* to = costs + i * RING_COSTS + place_of(run * RUN);
        *reinterpret_cast<float4*>(to) = make_float4(least[i][0], least[i][1], least[i][2], least[i][3]);
        to += APART ? HALF_COSTS : RUN / 2;
        *reinterpret_cast<float4*>(to) = make_float4(least[i][4], least[i][5], least[i][6], least[i][7]);
    }
}

// One position of the team's rings: from the least cost of each u that enters it to that of each u that leaves it.
template <int HERE, int FOLLOWING>
DEVICE void advance(const Team& team, int position, const float targets[TOGETHER]) {
    constexpr int RUNS = (1 << (STATE_BITS - FOLLOWING)) / RUN, SHARE = RUNS / TEAM;
    float least[SHARE][TOGETHER][RUN];
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        search_run<HERE, FOLLOWING>(least[i], team, position, targets, team.member + i * TEAM);
        if (BUFFERS == 2) store_costs(team.spare, team.member + i * TEAM, least[i]);
    }
    __syncthreads();
    if (BUFFERS == 2) return;
#pragma unroll
    for (int i = 0; i < SHARE; i++) store_costs(team.spare, team.member + i * TEAM, least[i]);
    __syncthreads();
}

DEVICE int fresh_bits(int position) { return position % 2 ? ODD : EVEN; }

DEVICE void advance_all(Team& team, int first, int count) {
    float targets[TOGETHER];
    for (int i = 0; i < TOGETHER; i++) targets[i] = team.targets[i][first];
    for (int step = 0, position = first; step < count; step++) {
        const int following = position + 1 < team.length ? position + 1 : 0;
        float next[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) next[i] = team.targets[i][following];
        if (EVEN == ODD || position % 2 == 0)
            advance<EVEN, ODD>(team, position, targets);
        else
            advance<ODD, EVEN>(team, position, targets);
        float* const stored = team.spare;
        team.spare = team.costs;
        team.costs = stored;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) targets[i] = next[i];
        position = following;
    }
}

// The u of least cost of each of the team's rings, the lowest of equal ones.
DEVICE void find_least(const Team& team, int count, int* found) {
    __shared__ uint64 of_warp[TOGETHER][WARPS];
    const int thread = threadIdx.x, first_warp = (thread - team.member) / WARP;
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
        uint64 least = ~0ull;
        for (int u = team.member; u < count; u += TEAM) {
            const uint64 key = static_cast<uint64>(bits_of(team.costs[i * RING_COSTS + place_of(u)])) << 32 | u;
            least = smaller(least, key);
        }
        for (int mask = WARP / 2; mask > 0; mask >>= 1) least = smaller(least, shuffle_xor(least, mask));
        of_warp[i][thread / WARP] = least;
    }
    __syncthreads();
    if (team.member < TOGETHER) {
        uint64 least = ~0ull;
        for (int warp = 0; warp < TEAM / WARP; warp++) least = smaller(least, of_warp[team.member][first_warp + warp]);
        found[team.ring + team.member] = static_cast<int>(least);
    }
    __syncthreads();
}

DEVICE int noted_state(unsigned note, int u, int following) {
    const unsigned old = following <= MOST_MARKED ? last_marked(note, 1u << following) : note;
    return static_cast<int>(old << (STATE_BITS - following)) | u;
}

// A warp walks a ring's best path back from position `last`, which hands on u; returns the u that enters position 0.
DEVICE int walk_back(unsigned char* notes, int ring, int last, int u, unsigned short* states) {
    const int lane = threadIdx.x % WARP;
    int position = last;
    while (position >= 0) {
        const int here = fresh_bits(position), following = fresh_bits(position + 1), before = fresh_bits(position - 1);
        const bool guesses = ODD <= MOST_GUESSED && position > 0;
        unsigned guessed = 0;
        // Both notes are on their way at once: the second one for each state that the first may name.
        if (guesses && lane < 1 << following) {
            const int before_it = (lane << (STATE_BITS - following) | u) >> here;
            guessed = read_note(notes_of(notes, position - 1, ring), before_it, here);
        }
        const int state = noted_state(read_note(notes_of(notes, position, ring), u, following), u, following);
        if (states && lane == 0) states[position] = static_cast<unsigned short>(state);
        u = state >> here;
        position--;
        if (!guesses) continue;
        const int earlier = noted_state(shuffle(guessed, state >> (STATE_BITS - following)), u, here);
        if (states && lane == 0) states[position] = static_cast<unsigned short>(earlier);
        u = earlier >> before;
        position--;
    }
    return u;
}

DEVICE void fill_costs(const Team& team, float value) {
    for (int i = 0; i < TOGETHER; i++)
        for (int at = team.member; at < RING_COSTS; at += TEAM) team.costs[i * RING_COSTS + at] = value;
}

// targets [rings, length] finite, table: the codebook's halves by state, workspace: bytes [gridDim.x, length, RINGS,
// NOTES], states uint16 [rings, length].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
search_rings(const float* targets, const uint4* table, unsigned char* workspace, unsigned short* states, int rings,
             int length, int window) {
    DYNAMIC_SHARED(float, costs);
    __shared__ int seams[RINGS];
    uint4* kept_table = reinterpret_cast<uint4*>(costs + BUFFERS * RINGS * RING_COSTS);
    const int thread = threadIdx.x;
    Team team;
    team.notes = workspace + static_cast<int64>(blockIdx.x) * length * RINGS * NOTES;
    team.table = TABLE_IN_SHARED ? kept_table : table;
    team.ring = thread / TEAM * TOGETHER;
    team.member = thread % TEAM;
    team.costs = costs + team.ring * RING_COSTS;
    team.spare = team.costs + (BUFFERS - 1) * RINGS * RING_COSTS;
    team.length = length;
    if (TABLE_IN_SHARED)
        for (int i = thread; i < (1 << STATE_BITS) / RUN; i += THREADS) kept_table[i] = table[i];

    for (int first = blockIdx.x * RINGS; first < rings; first += gridDim.x * RINGS) {
        for (int i = 0; i < TOGETHER; i++)
            team.targets[i] = targets + static_cast<int64>(smaller(first + team.ring + i, rings - 1)) * length;

        fill_costs(team, 0.0f);
        __syncthreads();
        advance_all(team, (length - window) % length, 2 * window);
        find_least(team, 1 << (STATE_BITS - fresh_bits(window)), seams);
        for (int ring = thread / WARP; ring < RINGS; ring += WARPS) {
            const int seam = walk_back(team.notes, ring, window - 1, seams[ring], nullptr);
            __syncwarp();
            if (thread % WARP == 0) seams[ring] = seam;
        }
        fill_costs(team, float_of(UNREACHABLE));
        __syncthreads();
        if (team.member < TOGETHER)
            team.costs[team.member * RING_COSTS + place_of(seams[team.ring + team.member])] = 0.0f;
        __syncthreads();
        advance_all(team, 0, length);
        for (int ring = thread / WARP; ring < RINGS; ring += WARPS)
            if (first + ring < rings) {
                unsigned short* of_ring = states + static_cast<int64>(first + ring) * length;
                walk_back(team.notes, ring, length - 1, seams[ring], of_ring);
            }
        __syncthreads();
    }
}
