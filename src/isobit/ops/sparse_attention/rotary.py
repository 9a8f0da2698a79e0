"""Tables of the rotary angles' cosines and sines."""

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numba import njit, prange

from isobit.ops import threads
from isobit.ops.scalar import sincos64

DIGITS = 60  # far more than a float32 needs to be rounded exactly


@lru_cache(maxsize=4)
def rotary_tables(rotary_dim: int, theta: float, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float32 [positions, rotary_dim / 2], of the angles float32(position) * inv_freq; layers share them."""
    cosines = np.empty((positions, rotary_dim // 2), np.float32)
    sines = np.empty_like(cosines)
    _fill_tables(threads(), inverse_frequencies(rotary_dim, theta), cosines, sines)
    return cosines, sines


def inverse_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """float32 [rotary_dim / 2]: theta^(-2i / rotary_dim), rounded exactly."""
    with localcontext() as context:
        context.prec = DIGITS
        values = [Decimal(theta) ** (Decimal(-2 * i) / Decimal(rotary_dim)) for i in range(rotary_dim // 2)]
        return np.array([_nearest_float32(value) for value in values], dtype=np.float32)


def _nearest_float32(value: Decimal) -> np.float32:
    near = np.float32(float(value))
    candidates = (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf)))
    return min(candidates, key=lambda candidate: abs(Decimal(float(candidate)) - value))


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def _fill_tables(parts, inverse, cosines, sines):
    for part in prange(parts):
        for position in range(part, cosines.shape[0], parts):
            for i in range(len(inverse)):
                sine, cosine = sincos64(np.float64(np.float32(position) * inverse[i]))
                cosines[position, i] = np.float32(cosine)
                sines[position, i] = np.float32(sine)
