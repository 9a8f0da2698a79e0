"""What the attention kernels share: sizes, and rows that are normed and rotated."""

from typing import NamedTuple

import numpy as np
from numba import njit

from isobit.ops.lanes import LANES, lane_dot_at
from isobit.ops.scalar import rsqrt32, scalar_function

NEGATIVE_ZERO = np.float32(-0.0)


class Sizes(NamedTuple):
    """The whole numbers that describe one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    block: int
    kept_blocks: int


@scalar_function
def padded(width):
    """The smallest multiple of 32 that holds `width` elements."""
    return (width + LANES - 1) // LANES * LANES


@scalar_function
def filled(count, value):
    """A new float32 array of `count` elements, all `value`."""
    array = np.empty(count, np.float32)
    for i in range(count):
        array[i] = value
    return array


@njit(nogil=True, error_model="numpy")
def norm_and_rotate(x, at, weight, eps, cosines, sines, position, out, out_at):
    """out[out_at:] = x[at:] over the weight's width, normed (weight holds 1 + w) and rotated at `position`."""
    width = len(weight)
    inverse = rsqrt32(lane_dot_at(x, at, x, at, width) / np.float32(width) + eps)
    for i in range(width):
        out[out_at + i] = (x[at + i] * inverse) * weight[i]
    half = cosines.shape[1]
    for i in range(half):
        first, second = out[out_at + i], out[out_at + half + i]
        cosine, sine = cosines[position, i], sines[position, i]
        out[out_at + i] = first * cosine - second * sine
        out[out_at + half + i] = second * cosine + first * sine
