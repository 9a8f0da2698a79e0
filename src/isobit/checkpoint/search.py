"""The trellis search: the tail-biting path of states whose codebook values come closest to a ring of numbers.

A ring is a tile of 256 weights, an n-gram row or a group of an embedding. Consecutive states overlap: entering
position p with b_p new bits, s_p = (s_(p-1) << b_p | new) mod 2^16, and the last state precedes the first.

The search is Viterbi's, on squared distance. With u = s_(p-1) mod 2^(16 - b_p), the bits that a state hands on, the
best predecessor is shared by all s_p with the same u; so only the least cost of each u is kept from step to step.
The path is closed by first searching a window around the seam, freely, for the u that crosses it; then the ring is
searched with that u at both ends.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from numba import njit

from isobit.checkpoint.lanes import (
    LANES,
    add_squared_distance,
    load,
    lower,
    spread,
    spread_int,
    store,
    store_bytes,
    store_interleaved,
    where_lower,
)
from isobit.checkpoint.trellis import STATES, check_width, codebook_values

STATE_BITS = 16
SEAM_WINDOW = 12  # how far the search for the seam looks to either side, in lengths of a state
PART_RINGS = 64  # at most so many are searched in one call, so that an interrupt is soon heeded
LONG_RUN = 4  # with at least so many new bits, the states that share u fill whole vectors
f32, i64 = np.float32, np.int64


def search(targets: np.ndarray, bits: float, codebook: str, threads: int = 1) -> np.ndarray:
    """The states of the closest paths: float32 [rings, n] -> uint16 [rings, n].

    n is even and n*bits at least 16. Ties go to the lower predecessor. The targets must be finite; their bits alone
    decide the result, the number of threads does not.
    """
    check_width(bits, codebook)
    count, length = targets.shape
    fresh = fresh_bits(bits)
    window = seam_window(length, fresh)
    states = np.empty((count, length), np.uint16)
    values = _value_tables(codebook, fresh)
    targets = np.ascontiguousarray(targets, np.float32)
    step = max(1, min(PART_RINGS, count // (4 * threads)))

    def search_part(first: int) -> None:
        _search_rings(targets, np.array(fresh), values, window, states, first, min(first + step, count))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(search_part, range(0, count, step)))
    return states


def fresh_bits(bits: float) -> tuple[int, int]:
    """The new bits of even and of odd positions."""
    return int(bits), int(bits + 0.5)


def seam_window(length: int, fresh: tuple[int, int]) -> int:
    """How many positions before and after the seam of a ring are searched to find what crosses it."""
    return min(length // 2, SEAM_WINDOW * -(-STATE_BITS // fresh[0]))


@lru_cache
def _value_tables(codebook: str, fresh: tuple[int, int]) -> np.ndarray:
    """The codebook in the order in which a step at an even and at an odd position reads it: float32 [2, 65536]."""
    values = codebook_values(codebook).astype(np.float32)
    here_and_next = (fresh, fresh[::-1])
    return np.stack([_in_step_order(values, here, following) for here, following in here_and_next])


def _in_step_order(values: np.ndarray, here: int, following: int) -> np.ndarray:
    old, new = 1 << following, 1 << here
    kept = STATES // (old * new)
    if here >= LONG_RUN:
        grouped = values.reshape(old, kept, new // (2 * LANES), 2 * LANES).transpose(1, 2, 0, 3)
    else:
        grouped = values.reshape(old, kept // LANES, LANES, new // 2, 2).transpose(1, 3, 0, 4, 2)
    return grouped.reshape(-1)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _advance_short(entry, leave, choice, values, target, old, new, kept, scratch):
    """One step, states (t, w, j) of old, kept and new bits, vectors along w. See `_advance`."""
    x = spread(target)
    at = 0
    for w in range(0, kept, LANES):
        for j in range(0, new, 2):
            before = load(entry, w)
            best_even = add_squared_distance(load(values, at), x, before)
            best_odd = add_squared_distance(load(values, at + LANES), x, before)
            from_even = spread_int(np.int32(0))
            from_odd = from_even
            at += 2 * LANES
            for t in range(1, old):
                before = load(entry, t * kept + w)
                this = spread_int(np.int32(t))
                even = add_squared_distance(load(values, at), x, before)
                odd = add_squared_distance(load(values, at + LANES), x, before)
                at += 2 * LANES
                from_even = where_lower(even, best_even, this, from_even)
                from_odd = where_lower(odd, best_odd, this, from_odd)
                best_even = lower(even, best_even)
                best_odd = lower(odd, best_odd)
            store_bytes(choice, j * kept + w, from_even)
            store_bytes(choice, (j + 1) * kept + w, from_odd)
            store(scratch, j * LANES, best_even)
            store(scratch, (j + 1) * LANES, best_odd)
        _transpose_lanes(scratch, leave, w * new, new)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _transpose_lanes(scratch, leave, offset, rows):
    """leave[offset + lane*rows + row] = scratch[row*8 + lane] by perfect shuffles; rows is a power of two."""
    half = rows * LANES // 2
    source = 0
    passes = rows
    while passes > 2:
        aim = 2 * half - source
        for i in range(0, half, LANES):
            store_interleaved(scratch, aim + 2 * i, load(scratch, source + i), load(scratch, source + half + i))
        source = aim
        passes //= 2
    for i in range(0, half, LANES):
        store_interleaved(leave, offset + 2 * i, load(scratch, source + i), load(scratch, source + half + i))


@njit(nogil=True, cache=True, error_model="numpy")
def _advance_long(entry, leave, choice, values, target, old, new, kept):
    """One step, states (t, w, j) of old, kept and new bits, vectors along j. See `_advance`."""
    x = spread(target)
    at = 0
    for w in range(kept):
        for j in range(0, new, 2 * LANES):
            before = spread(entry[np.uint64(w)])
            best_left = add_squared_distance(load(values, at), x, before)
            best_right = add_squared_distance(load(values, at + LANES), x, before)
            from_left = spread_int(np.int32(0))
            from_right = from_left
            at += 2 * LANES
            for t in range(1, old):
                before = spread(entry[np.uint64(t * kept + w)])
                this = spread_int(np.int32(t))
                left = add_squared_distance(load(values, at), x, before)
                right = add_squared_distance(load(values, at + LANES), x, before)
                at += 2 * LANES
                from_left = where_lower(left, best_left, this, from_left)
                from_right = where_lower(right, best_right, this, from_right)
                best_left = lower(left, best_left)
                best_right = lower(right, best_right)
            u = w * new + j
            store_bytes(choice, u, from_left)
            store_bytes(choice, u + LANES, from_right)
            store(leave, u, best_left)
            store(leave, u + LANES, best_right)


@njit(nogil=True, cache=True, error_model="numpy")
def _advance(entry, leave, choice, values, target, here, following, scratch):
    """One position: from the least cost of each u that enters it, `entry`, to that of each u that leaves it, `leave`.

    choice: uint8, the old bits of the best state for each leaving u, where `_chosen` finds them.
    """
    kept = 1 << (STATE_BITS - here - following)
    # The literal counts let LLVM unroll loops that are too short to pay for themselves.
    if here == 1 and following == 1:
        _advance_short(entry, leave, choice, values, target, i64(2), i64(2), kept, scratch)
    elif here == 1 and following == 2:
        _advance_short(entry, leave, choice, values, target, i64(4), i64(2), kept, scratch)
    elif here == 2 and following == 1:
        _advance_short(entry, leave, choice, values, target, i64(2), i64(4), kept, scratch)
    elif here == 2 and following == 2:
        _advance_short(entry, leave, choice, values, target, i64(4), i64(4), kept, scratch)
    elif here == 2 and following == 3:
        _advance_short(entry, leave, choice, values, target, i64(8), i64(4), kept, scratch)
    elif here == 3 and following == 2:
        _advance_short(entry, leave, choice, values, target, i64(4), i64(8), kept, scratch)
    elif here < LONG_RUN:
        _advance_short(entry, leave, choice, values, target, i64(1 << following), i64(1 << here), kept, scratch)
    else:
        _advance_long(entry, leave, choice, values, target, i64(1 << following), i64(1 << here), kept)


@njit(nogil=True, cache=True, error_model="numpy")
def _chosen(choice, u, here, following):
    """The best state at a position that hands on u."""
    transposed = ((u & ((1 << here) - 1)) << (STATE_BITS - here - following)) + (u >> here)
    place = u if here >= LONG_RUN else transposed
    return (np.int64(choice[place]) << (STATE_BITS - following)) | u


@njit(nogil=True, cache=True, error_model="numpy")
def _search_ring(target, fresh, values, window, entry, leave, choices, scratch, states):
    length = len(target)
    for u in range(1 << (STATE_BITS - fresh[(length - window) % 2])):
        entry[u] = f32(0)
    for step in range(2 * window):
        p = (length - window + step) % length
        _advance(entry, leave, choices[p], values[p % 2], target[p], fresh[p % 2], fresh[1 - p % 2], scratch)
        entry, leave = leave, entry
    u = 0
    for other in range(1, 1 << (STATE_BITS - fresh[window % 2])):
        if entry[other] < entry[u]:
            u = other
    for p in range(window - 1, -1, -1):
        u = _chosen(choices[p], u, fresh[p % 2], fresh[1 - p % 2]) >> fresh[p % 2]

    for other in range(1 << (STATE_BITS - fresh[0])):
        entry[other] = f32(np.inf)
    entry[u] = f32(0)
    for p in range(length):
        _advance(entry, leave, choices[p], values[p % 2], target[p], fresh[p % 2], fresh[1 - p % 2], scratch)
        entry, leave = leave, entry
    for p in range(length - 1, -1, -1):
        state = _chosen(choices[p], u, fresh[p % 2], fresh[1 - p % 2])
        states[p] = state
        u = state >> fresh[p % 2]


@njit(nogil=True, cache=True, error_model="numpy")
def _search_rings(targets, fresh, values, window, states, first, last):
    length = targets.shape[1]
    handed_on = 1 << (STATE_BITS - min(fresh[0], fresh[1]))
    entry = np.empty(handed_on, np.float32)
    leave = np.empty(handed_on, np.float32)
    choices = np.empty((length, handed_on), np.uint8)
    scratch = np.empty(4 * LANES * LANES, np.float32)
    for ring in range(first, last):
        _search_ring(targets[ring], fresh, values, window, entry, leave, choices, scratch, states[ring])
