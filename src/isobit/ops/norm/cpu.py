"""The RMS norm on the CPU."""

import numpy as np
from numba import njit

from isobit.ops.buffers import empty
from isobit.ops.lanes import lane_dot_at
from isobit.ops.scalar import ONE, rsqrt32
from isobit.ops.work import run_split

__all__ = ["norm"]


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of each row, times 1 + weight: float32 [R, W], float32 [W] -> float32 [R, W]."""
    return group_norm(x, weight if weight.flags.writeable else weight.copy(), 1, eps)


def group_norm(x: np.ndarray, weight: np.ndarray, groups: int, eps: float) -> np.ndarray:
    """RMS norm of each of the `groups` equal parts of a row: x [R, ...] of len(weight) values a row, as one block."""
    out = empty(x.shape)
    width = len(weight) // groups
    rows = x.size // width
    arguments = x.reshape(rows, width), weight, np.float32(eps), out.reshape(rows, width)
    run_split(norm_rows, x.size, rows, *arguments)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def norm_rows(x, weight, eps, out, first, last):
    """Rows first to last - 1 of x [N, W]; row i uses the part of `weight` that starts at (i mod groups) * W."""
    width = x.shape[1]
    groups = weight.size // width
    for row in range(first, last):
        mean = lane_dot_at(x, row * width, x, row * width, width) / np.float32(width)
        inverse = rsqrt32(mean + eps)
        start = (row % groups) * width
        for i in range(width):
            out[row, i] = (x[row, i] * inverse) * (ONE + weight[start + i])
