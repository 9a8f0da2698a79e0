"""The step of docs/arithmetic.md, 16 products of halves added to a float32 sum, as the emulator or Hopper adds them."""

import numpy as np
import pytest

from isobit.cuda import memory

STEP = 16
HOPPER = 9  # major compute capability
KEPT_BITS = 25  # behind the point of the largest term
LEAST_EXPONENT = -14  # of a half


def need_known_steps() -> None:
    """Skip the test on a GPU whose sums were not compared with these."""
    if not memory.is_emulated() and memory.architecture()[0] != HOPPER:
        found = ".".join(map(str, memory.architecture()))
        pytest.skip(f"how tensor cores add is defined here for capability 9.0, this GPU has {found}")


def step(sums: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """sums [m, n] plus left [m, 16] times right [16, n], all float32 and the factors halves: float32 [m, n]."""
    return (_rounded_once if memory.is_emulated() else _aligned_and_cut)(sums, left, right)


def in_steps(left: np.ndarray, right: np.ndarray, sums: np.ndarray | None = None) -> np.ndarray:
    """left [m, k] times right [k, n] as steps over ascending k, added to sums [m, n] or to +0."""
    sums = np.zeros((len(left), right.shape[1]), np.float32) if sums is None else sums
    short = -len(right) % STEP
    left, right = np.pad(left, ((0, 0), (0, short))), np.pad(right, ((0, short), (0, 0)))
    for first in range(0, len(right), STEP):
        sums = step(sums, left[:, first : first + STEP], right[first : first + STEP])
    return sums


def _rounded_once(sums: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """As the emulator adds: in float64, rounded to float32."""
    wide = sums.astype(np.float64)
    for i in range(STEP):
        wide = wide + left[:, i : i + 1].astype(np.float64) * right[i].astype(np.float64)
    return wide.astype(np.float32)


def _aligned_and_cut(sums: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """As Hopper adds: terms cut off KEPT_BITS behind the largest one's point, their exact sum cut to float32.

    A product's point is where its factors' exponents put it, though the product may be 2 or more in front of it.
    """
    products = left.astype(np.float64)[:, :, None] * right.astype(np.float64)[None]
    terms = np.concatenate([products, sums.astype(np.float64)[:, None]], axis=1)
    of_products = _half_exponents(left)[:, :, None] + _half_exponents(right)[None]
    exponents = np.concatenate([of_products, _exponents(sums)[:, None]], axis=1)
    unit = np.exp2(KEPT_BITS - np.where(terms == 0, np.min(exponents), exponents).max(axis=1, keepdims=True))
    exact = np.trunc(terms * unit).sum(axis=1) / unit[:, 0]
    return _cut_to_float32(exact)


def _half_exponents(x: np.ndarray) -> np.ndarray:
    return np.maximum(_exponents(x), LEAST_EXPONENT)


def _exponents(x: np.ndarray) -> np.ndarray:
    """e of |x| = 1.f * 2^e."""
    return np.frexp(x.astype(np.float64))[1] - 1


def _cut_to_float32(wide: np.ndarray) -> np.ndarray:
    """The nearest float32 towards 0."""
    near = wide.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(wide), np.nextafter(near, np.float32(0)), near)
