"""The largest values of a row in order, without sorting more of them than are asked for."""

import numpy as np
from numba import njit

from isobit.ops.scalar import float_bits

DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
DIGITS = 3  # cover the 32 bits of a key
LOW_DIGIT = np.int64(BINS - 1)
ID_BITS = 31
ID_MASK = np.int64((1 << ID_BITS) - 1)


@njit(nogil=True, error_model="numpy")
def descending_ids(values, count):
    """int32 [count]: the ids of the `count` largest float32 values, descending, equal values by ascending id."""
    highest, spare = np.int64(1) << 32, np.int64(0)
    if count < len(values):
        highest, spare = _key_of_rank(values, count)
    entries = np.empty(count, np.int64)
    found = 0
    for i in range(len(values)):
        key = _descending_key(values[i])
        equal = key == highest and spare > 0
        spare -= equal
        if equal or key < highest:
            entries[found] = key << ID_BITS | i
            found += 1
    entries = _sorted_by_key(entries)
    ids = np.empty(count, np.int32)
    for rank in range(count):
        ids[rank] = entries[rank] & ID_MASK
    return ids


@njit(nogil=True, error_model="numpy")
def _descending_key(value):
    """A number from 0 to 2^32 - 1 that falls as a finite value grows; -0 and +0 share one."""
    bits = np.int64(float_bits(value + np.float32(0.0)))
    ascending = bits + (np.int64(1) << 31) if bits >= 0 else -bits - 1
    return (np.int64(1) << 32) - 1 - ascending


@njit(nogil=True, error_model="numpy")
def _key_of_rank(values, rank):
    """(the rank-th smallest key, counting from 1, how many of its equals are among the first `rank`)."""
    bins = np.empty(BINS, np.int64)
    prefix = np.int64(0)
    for digit in range(DIGITS - 1, -1, -1):
        shift = digit * DIGIT_BITS
        for i in range(BINS):
            bins[i] = 0
        for value in values:
            key = _descending_key(value) >> shift
            if key >> DIGIT_BITS == prefix:
                bins[key & LOW_DIGIT] += 1
        low = np.int64(0)
        while bins[low] < rank:
            rank -= bins[low]
            low += 1
        prefix = prefix << DIGIT_BITS | low
    return prefix, rank


@njit(nogil=True, error_model="numpy")
def _sorted_by_key(entries):
    """Entries by ascending key, in their present order where keys are equal: three passes of counting sort."""
    other = np.empty(len(entries), np.int64)
    starts = np.empty(BINS, np.int64)
    for digit in range(DIGITS):
        shift = ID_BITS + digit * DIGIT_BITS
        for i in range(BINS):
            starts[i] = 0
        for entry in entries:
            starts[(entry >> shift) & LOW_DIGIT] += 1
        total = np.int64(0)
        for value in range(BINS):
            starts[value], total = total, total + starts[value]
        for entry in entries:
            value = (entry >> shift) & LOW_DIGIT
            other[starts[value]] = entry
            starts[value] += 1
        entries, other = other, entries
    return entries
