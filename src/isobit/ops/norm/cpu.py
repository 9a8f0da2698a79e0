"""The RMS norm on the CPU."""

import numpy as np
from numba import njit

from isobit.ops.buffers import empty, flat
from isobit.ops.lanes import LANES, lane_dot_at, lanes_load_first, lanes_store_first
from isobit.ops.scalar import ONE, rsqrt32, scalar_function
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
    run_split(norm_rows, x.size, rows, flat(x), weight, width, np.float32(eps), flat(out))
    return out


@scalar_function
def scale_at(x, x_at, inverse, weight, weight_at, count, out, out_at):
    """out = (x * inverse) * (1 + weight) for `count` elements from flat offsets of C-contiguous float32 arrays."""
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        factor = ONE + lanes_load_first(weight, weight_at + i, some)
        lanes_store_first(out, out_at + i, (lanes_load_first(x, x_at + i, some) * inverse) * factor, some)


@scalar_function
def inverse_rms_at(x, at, width, eps):
    """1 / sqrt(mean of squares + eps) of `width` elements from flat offset `at`."""
    return rsqrt32(lane_dot_at(x, at, x, at, width) / np.float32(width) + eps)


@njit(nogil=True, cache=True, error_model="numpy")
def norm_rows(x, weight, width, eps, out, first, last):
    """Rows first to last - 1 of x [N, W], given flat; row i's part of `weight` starts at (i mod groups) * W."""
    groups = weight.size // width
    for row in range(first, last):
        at = row * width
        scale_at(x, at, inverse_rms_at(x, at, width, eps), weight, (row % groups) * width, width, out, at)
