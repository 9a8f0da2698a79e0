"""The definitions of docs/arithmetic.md written out one rounding at a time, for the tests of single ops."""

import numpy as np
from numba import njit

from isobit.ops import scalar

_fma32, _exp32, _sigmoid32, _silu32 = scalar.fma32, scalar.exp32, scalar.sigmoid32, scalar.silu32
_softplus32, _rsqrt32 = scalar.softplus32, scalar.rsqrt32
f32 = np.float32


@njit(error_model="numpy")
def fma(a, b, c):
    return _fma32(a, b, c)


@njit(error_model="numpy")
def exp(x):
    return _exp32(x)


@njit(error_model="numpy")
def sigmoid(x):
    return _sigmoid32(x)


@njit(error_model="numpy")
def silu(x):
    return _silu32(x)


@njit(error_model="numpy")
def softplus(x):
    return _softplus32(x)


@njit(error_model="numpy")
def rsqrt(x):
    return _rsqrt32(x)


def chain(a, b):
    """float32 fused multiply-adds from +0, in order."""
    total = f32(0)
    for x, y in zip(a, b, strict=True):
        total = f32(fma(x, y, total))
    return total


def lane_dot(a, b):
    """The lane sum of products."""
    sums = [f32(0)] * 32
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        sums[i % 32] = f32(fma(x, y, sums[i % 32]))
    for half in (16, 8, 4, 2, 1):
        for lane in range(half):
            sums[lane] = f32(sums[lane] + sums[lane + half])
    return sums[0]


def norm(x, weight, eps):
    """The RMS norm of one row [W]."""
    inverse = f32(rsqrt(f32(f32(lane_dot(x, x) / f32(len(x))) + f32(eps))))
    return np.array([f32(f32(v * inverse) * f32(f32(1) + w)) for v, w in zip(x, weight, strict=True)], np.float32)
