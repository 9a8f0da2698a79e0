"""Tables of the rotary angles' cosines and sines."""

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numba import njit

from isobit.ops.scalar import sincos64
from isobit.ops.work import run_split

DIGITS = 60  # far more than a float32 needs to be rounded exactly
ANGLE_WORK = 64  # element operations that one angle costs


@lru_cache(maxsize=4)
def rotary_tables(rotary_dim: int, theta: float, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of the angles float32(position) * inv_freq, float32 [positions, rotary_dim / 2]; layers share them."""
    cosines = np.empty((positions, rotary_dim // 2), np.float32)
    sines = np.empty_like(cosines)
    inverse = inverse_frequencies(rotary_dim, theta)
    run_split(fill_tables, cosines.size * ANGLE_WORK, positions, inverse, cosines, sines)
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


@njit(nogil=True, cache=True, error_model="numpy")
def fill_tables(inverse, cosines, sines, first, last):
    """Positions first to last - 1 of the tables; the float64 functions are rounded to float32 once."""
    for position in range(first, last):
        for i in range(len(inverse)):
            sine, cosine = sincos64(np.float64(np.float32(position) * inverse[i]))
            cosines[position, i] = np.float32(cosine)
            sines[position, i] = np.float32(sine)
