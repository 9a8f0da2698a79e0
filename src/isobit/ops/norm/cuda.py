"""The RMS norm on CUDA."""

import weakref

import numpy as np
import torch

from isobit.cuda import kernels, memory

__all__ = ["norm"]

BY_ROW_COUNT, FEW_ROWS, MANY_ROWS = 0, 1, 2  # how to compute; the first is what the model uses
MOST_FEW_ROWS = 64
WARP = 32
MANY_ROWS_WARPS = 4  # a block
HELD_UNIT, MOST_HELD = 16, 96  # values a lane keeps in registers
SOURCE = "ops/norm/norm.cu"
STAGED_THREADS, MOST_STAGED = 128, 12 << 10  # of a block that stages a group; values of a group, at most
FLOAT_BYTES = 4

_placed: dict[int, torch.Tensor] = {}


def norm(x: torch.Tensor, weight: np.ndarray | torch.Tensor, eps: float, how: int = BY_ROW_COUNT) -> torch.Tensor:
    """RMS norm of each row, times 1 + weight: float32 [R, W], float32 [W] -> float32 [R, W].

    A weight on the host is copied to the device at its first use. `how` is for the contract and changes no byte.
    """
    return group_norm(x, on_device(weight), 1, eps, how)


def group_norm(x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, how: int = BY_ROW_COUNT) -> torch.Tensor:
    """RMS norm of each of the `groups` equal parts of a row: x [R, ...] of len(weight) values a row."""
    out = memory.empty(x.shape)
    width = weight.numel() // groups
    count = x.numel() // width
    if not count:
        return out
    few = how == FEW_ROWS or (how == BY_ROW_COUNT and len(x) <= MOST_FEW_ROWS)
    if few and _can_be_staged(width, x, weight, out):
        kernel = kernels.load(SOURCE, "norm_few_groups", HELD=0)
        arrays, shared = (x, kernels.Constant(weight), out), 2 * width * FLOAT_BYTES
        kernel(count, STAGED_THREADS, *arrays, width, groups, float(eps), shared=shared, early=True)
        return out
    warps = 1 if few else MANY_ROWS_WARPS
    kernel = kernels.load(SOURCE, "norm_groups", HELD=held_values(width))
    kernel(-(-count // warps), warps * WARP, x, weight, out, count, width, groups, float(eps))
    return out


def _can_be_staged(width: int, *arrays: torch.Tensor) -> bool:
    """Whether a block can hold a group and its weights, copied 16 bytes at a time."""
    return width % 4 == 0 and width <= MOST_STAGED and not any(array.data_ptr() % 16 for array in arrays)


def held_values(width: int) -> int:
    """How many values of a group of `width` a lane keeps in registers; 0 where that would be too many."""
    held = -(-width // (WARP * HELD_UNIT)) * HELD_UNIT
    return held if held <= MOST_HELD else 0


def on_device(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A constant float32 array on the device; of a host array one copy is kept for as long as the array lives."""
    if isinstance(array, torch.Tensor):
        return array
    key = id(array)
    if key not in _placed:
        _placed[key] = memory.to_device(np.asarray(array, np.float32))
        weakref.finalize(array, _placed.pop, key, None)
    return _placed[key]
