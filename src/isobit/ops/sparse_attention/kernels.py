"""What the attention kernels share: sizes, and rows that are normed and rotated."""

from typing import NamedTuple

import numpy as np

from isobit.ops.scalar import fma32, rsqrt32, scalar_function
from isobit.ops.sparse_attention.vectors import LANES


class Sizes(NamedTuple):
    """The whole numbers that describe one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    block: int
    kept_blocks: int
    half_rotary: int


@scalar_function
def padded(width):
    """The smallest multiple of 32 that holds `width` elements."""
    return (width + LANES - 1) // LANES * LANES


@scalar_function
def sum_of_squares(x, at, width, lanes):
    """The lane sum of x[at:][:width] squared; `lanes` is scratch, float32 [32]."""
    lanes[:] = np.float32(0.0)
    whole = width // LANES * LANES
    for start in range(at, at + whole, LANES):
        for lane in range(LANES):
            lanes[lane] = fma32(x[start + lane], x[start + lane], lanes[lane])
    for lane in range(width - whole):
        value = x[at + whole + lane]
        lanes[lane] = fma32(value, value, lanes[lane])
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@scalar_function
def norm_and_rotate(x, at, weight, eps, cosines, sines, position, out, out_at, lanes):
    """out[out_at:] = x[at:] over the weight's width, normed (weight holds 1 + w) and rotated at `position`."""
    width = len(weight)
    inverse = rsqrt32(sum_of_squares(x, at, width, lanes) / np.float32(width) + eps)
    for i in range(width):
        out[out_at + i] = (x[at + i] * inverse) * weight[i]
    half = cosines.shape[1]
    for i in range(half):
        first, second = out[out_at + i], out[out_at + half + i]
        cosine, sine = cosines[position, i], sines[position, i]
        out[out_at + i] = first * cosine - second * sine
        out[out_at + half + i] = second * cosine + first * sine
