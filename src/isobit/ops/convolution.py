"""The causal depthwise convolution: a chain over taps, then silu."""

import numpy as np
from numba import njit

from isobit.ops.batch import Batch
from isobit.ops.buffers import empty
from isobit.ops.journal import journal_arguments
from isobit.ops.lanes import LANES, lanes_load_first, lanes_store_first, lanes_zero
from isobit.ops.scalar import fma32, silu32
from isobit.ops.work import run_split


def convolve(
    x: np.ndarray,
    weight: np.ndarray,
    dilation: int,
    state: np.ndarray,
    batch: Batch,
    journal: np.ndarray | None = None,
) -> np.ndarray:
    """silu of the causal convolution of each stream's rows: float32 [R, C] -> [R, C].

    weight: float32 [taps, C], the oldest row's tap first. state: float32 [slots, dilation * (taps - 1), C], the rows
    before the segment, oldest first; afterwards the rows before the stream's next row. journal: float32 [J, the shape
    of a slot], gets the state after each row that the batch journals.
    """
    out = empty(x.shape)
    blocks = -(-x.shape[1] // LANES)
    arguments = x, weight, dilation, state, batch.starts, batch.slots, *journal_arguments(batch, journal, state), out
    run_split(convolve_columns, x.size, blocks, *arguments)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def convolve_columns(x, weight, dilation, state, starts, slots, places, journal, out, first_block, last_block):
    """All rows, in column blocks first_block to last_block - 1 of 32 columns each."""
    width = x.shape[1]
    left, right = first_block * LANES, min(last_block * LANES, width)
    taps, kept = weight.shape[0], state.shape[1]
    for segment in range(slots.size):
        start, end, slot = np.int64(starts[segment]), np.int64(starts[segment + 1]), np.int64(slots[segment])
        for row in range(start, end):
            for column in range(left, right, LANES):
                some = min(LANES, right - column)
                total = lanes_zero()
                for tap in range(taps):
                    source = row - start - (taps - 1 - tap) * dilation
                    weights = lanes_load_first(weight, tap * width + column, some)
                    if source >= 0:
                        values = lanes_load_first(x, (start + source) * width + column, some)
                    else:
                        values = lanes_load_first(state, (slot * kept + kept + source) * width + column, some)
                    total = fma32(weights, values, total)
                lanes_store_first(out, row * width + column, silu32(total), some)
        for row in range(start, end if places.size else start):
            if places[row] >= 0:
                keep_last_rows(x, state[slot], journal[places[row]], start, row + 1, left, right)
        keep_last_rows(x, state[slot], state[slot], start, end, left, right)


@njit(nogil=True, error_model="numpy")
def keep_last_rows(x, before, after, start, end, left, right):
    """Columns of the state `after` rows start to end - 1, oldest first: no row is read after it changed in place."""
    kept = before.shape[0]
    for place in range(kept):
        source = place + end - start
        for i in range(left, right):
            after[place, i] = before[source, i] if source < kept else x[start + source - kept, i]
