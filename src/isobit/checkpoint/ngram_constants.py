"""The constants of an n-gram layer as Hugging Face derives them from the config: head sizes and hash multipliers.

A checkpoint stores them, and readers take them from there; only what writes a checkpoint derives them.
"""

import math

GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
LAYER_STEP = 10007  # between the seeds of two n-gram layers


def head_sizes(base: int, heads: int, ordinal: int = 0) -> list[int]:
    """The table rows of each head of the `ordinal`-th n-gram layer: the next primes from `base` on."""
    primes: list[int] = []
    candidate = base
    while len(primes) < (ordinal + 1) * heads:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes[ordinal * heads :]


def multipliers(vocab_size: int, order: int, seed: int, ordinal: int = 0) -> list[int]:
    """The odd hash multiplier of each of the `order` positions, for the `ordinal`-th n-gram layer."""
    half_bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    base = seed + LAYER_STEP * ordinal
    return [2 * (_splitmix64(base + (position + 1) * GAMMA) % half_bound) + 1 for position in range(order)]


def _is_prime(value: int) -> bool:
    if value < 4 or value % 2 == 0:
        return value in (2, 3)
    return all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


def _splitmix64(state: int) -> int:
    mixed = (state + GAMMA) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)
