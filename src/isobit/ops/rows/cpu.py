"""Row movement on the CPU."""

from collections.abc import Callable, Sequence

import numpy as np

from isobit.ops.batch import Batch
from isobit.ops.buffers import empty
from isobit.ops.journal import journal_arguments
from isobit.ops.tape import do

__all__ = ["download", "fill_rows", "put_rows", "shift_rows", "split_columns", "take_rows", "to_host", "zeros"]

Indices = np.ndarray | Sequence[int]


def zeros(shape: tuple[int, ...], dtype) -> np.ndarray:
    """A zeroed array of the device; the memory is only committed when it is written."""
    return np.zeros(shape, dtype)


def to_host(x: np.ndarray) -> np.ndarray:
    """x as a NumPy array."""
    return x


def download(x: np.ndarray) -> Callable[[], np.ndarray]:
    """A function that gives x as a NumPy array, to be called once; on a device x is copied meanwhile, as it now is."""
    return lambda: x


def take_rows(x: np.ndarray, indices: Indices) -> np.ndarray:
    """A copy of rows `indices` of x: [len(indices), ...]."""
    out = empty((len(indices), *x.shape[1:]), x.dtype)
    do(_copy_rows, x, indices, out)
    return out


def _copy_rows(x: np.ndarray, indices: Indices, out: np.ndarray) -> None:
    for i, index in enumerate(indices):
        out[i] = x[index]


def put_rows(x: np.ndarray, indices: Indices, values: np.ndarray) -> None:
    """Write values[i] to row indices[i] of x, in place."""
    for i, index in enumerate(indices):
        x[index] = values[i]


def fill_rows(x: np.ndarray, indices: Indices, value) -> None:
    """Write `value` to every element of rows `indices` of x, in place."""
    for index in indices:
        x[index] = value


def shift_rows(x: np.ndarray, last: np.ndarray, batch: Batch, journal: np.ndarray | None = None) -> np.ndarray:
    """Each row's predecessor in its stream: [R, ...] -> [R, ...].

    The first row of a segment gets last[slot]; afterwards last[slot] holds the segment's last row. journal: [J, ...],
    the pool's value after each row that the batch journals.
    """
    out = empty(x.shape, x.dtype)
    do(_shift, x, last, batch.starts, batch.slots, *journal_arguments(batch, journal, last), out)
    return out


def _shift(x, last, starts, slots, places, journal, out) -> None:
    for segment, slot in enumerate(slots):
        start, end = starts[segment], starts[segment + 1]
        out[start] = last[slot]
        if end > start + 1:
            out[start + 1 : end] = x[start : end - 1]
        last[slot] = x[end - 1]
    for row, place in enumerate(places):
        if place >= 0:
            journal[place] = x[row]


def split_columns(x: np.ndarray, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of the columns before `column` and from it on: [R, N] -> [R, column], [R, N - column]."""
    left, right = empty((len(x), column), x.dtype), empty((len(x), x.shape[1] - column), x.dtype)
    do(np.copyto, left, x[:, :column])
    do(np.copyto, right, x[:, column:])
    return left, right
