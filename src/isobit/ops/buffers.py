"""Where CPU ops get their output arrays; the contract swaps the allocator for poisoned, guarded buffers."""

from collections.abc import Callable

import numpy as np

from isobit.ops import tape

_allocate: Callable[..., np.ndarray] = np.empty


def empty(shape, dtype=np.float32) -> np.ndarray:
    """An uninitialised output array of `shape` and `dtype`; the op that asked for it must write every element."""
    recorder = tape.recording()
    return _allocate(shape, dtype) if recorder is None else recorder.arena.empty(shape, dtype)


def scratch(shape, dtype=np.float32) -> np.ndarray:
    """An uninitialised array for an op's own use, of which it may leave elements unwritten."""
    recorder = tape.recording()
    return np.empty(shape, dtype) if recorder is None else recorder.arena.empty(shape, dtype)


def flat(array: np.ndarray) -> np.ndarray:
    """All elements of a C-contiguous array, in place, [n]; ValueError for another layout.

    A helper that takes flat arrays is compiled once for arrays of any number of dimensions.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not C-contiguous")
    return array.reshape(-1)


def set_allocator(allocate: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Replace the allocator of op outputs; returns the previous one. For the contract's hygiene gate only."""
    global _allocate
    previous, _allocate = _allocate, allocate
    return previous
