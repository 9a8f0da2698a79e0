"""The causal depthwise convolution that the delta rule and the n-gram embedding share: a chain over taps, then silu."""

import numpy as np
from numba import njit

from isobit.ops.batch import Batch
from isobit.ops.buffers import empty
from isobit.ops.lanes import LANES
from isobit.ops.scalar import ZERO, fma32, silu32
from isobit.ops.work import run_split


def convolve(x: np.ndarray, weight: np.ndarray, dilation: int, state: np.ndarray, batch: Batch) -> np.ndarray:
    """silu of the causal convolution of each stream's rows: float32 [R, C] -> [R, C].

    weight: float32 [taps, C], the oldest row's tap first. state: float32 [slots, dilation * (taps - 1), C], the rows
    before the segment, oldest first; afterwards the rows before the stream's next row.
    """
    out = empty(x.shape)
    blocks = -(-x.shape[1] // LANES)
    arguments = x, weight, dilation, state, batch.starts, batch.slots, out
    run_split(convolve_columns, x.size, blocks, *arguments)
    return out


@njit(nogil=True, error_model="numpy")
def add_tap(total, weight, source):
    for i in range(total.size):
        total[i] = fma32(weight[i], source[i], total[i])


@njit(nogil=True, cache=True, error_model="numpy")
def convolve_columns(x, weight, dilation, state, starts, slots, out, first_block, last_block):
    """All rows, in column blocks first_block to last_block - 1 of 32 columns each."""
    left, right = first_block * LANES, min(last_block * LANES, x.shape[1])
    taps, kept = weight.shape[0], state.shape[1]
    for segment in range(slots.size):
        start, end, slot = starts[segment], starts[segment + 1], slots[segment]
        for row in range(start, end):
            total = out[row, left:right]
            for i in range(total.size):
                total[i] = ZERO
            for tap in range(taps):
                source = row - start - (taps - 1 - tap) * dilation
                if source >= 0:
                    add_tap(total, weight[tap, left:right], x[start + source, left:right])
                else:
                    add_tap(total, weight[tap, left:right], state[slot, kept + source, left:right])
            for i in range(total.size):
                total[i] = silu32(total[i])
        keep_last_rows(x, state, slot, start, end, left, right)


@njit(nogil=True, error_model="numpy")
def keep_last_rows(x, state, slot, start, end, left, right):
    """Move the columns of the state on by the segment's rows, oldest first, so that no row is read after it changed."""
    kept = state.shape[1]
    for place in range(kept):
        source = place + end - start
        for i in range(left, right):
            state[slot, place, i] = state[slot, source, i] if source < kept else x[start + source - kept, i]
