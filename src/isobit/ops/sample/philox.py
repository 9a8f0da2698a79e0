"""The counter generator Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011)."""

import numpy as np

from isobit.ops.scalar import scalar_function

ROUNDS = 10
WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
FIRST_FACTOR, SECOND_FACTOR = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
FIRST_STEP, SECOND_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
UNIT = 2.0**-53


@scalar_function
def philox(first, second, third, fourth, first_key, second_key):
    """Four output words from a counter of four words and a key of two; each word is the low half of a uint64."""
    for _ in range(ROUNDS):
        left, right = FIRST_FACTOR * first, SECOND_FACTOR * third
        first, second, third, fourth = (
            (right >> HALF) ^ second ^ first_key,
            right & WORD,
            (left >> HALF) ^ fourth ^ second_key,
            left & WORD,
        )
        first_key, second_key = (first_key + FIRST_STEP) & WORD, (second_key + SECOND_STEP) & WORD
    return first, second, third, fourth


@scalar_function
def uniform(seed, position):
    """u in [0, 1): the upper 53 bits of the output words (second, first) for a 64-bit key and counter, times 2^-53."""
    zero = np.uint64(0)
    first, second, _, _ = philox(position & WORD, position >> HALF, zero, zero, seed & WORD, seed >> HALF)
    return np.float64(((second << HALF) | first) >> np.uint64(11)) * UNIT
