"""Row movement on CUDA. Arrays of whole numbers stay on the host, and so does what moves their rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.cuda.batch import placed
from isobit.ops.batch import Batch
from isobit.ops.rows import cpu

__all__ = ["download", "fill_rows", "put_rows", "shift_rows", "split_columns", "take_rows", "to_host", "zeros"]

Rows = torch.Tensor | np.ndarray
Indices = torch.Tensor | np.ndarray | Sequence[int]

SOURCE = "ops/rows/rows.cu"
THREADS = 256
FEW_INDICES = 4  # are copied one by one, without an index array on the device


def zeros(shape: tuple[int, ...], dtype: Any) -> Rows:
    """A zeroed array: of floats on the device, of whole numbers on the host."""
    if not isinstance(dtype, torch.dtype):
        if np.dtype(dtype).kind != "f":
            return cpu.zeros(shape, dtype)
        dtype = getattr(torch, np.dtype(dtype).name)
    return memory.zeros(shape, dtype)


def to_host(x: Rows) -> np.ndarray:
    """x as a NumPy array, after the device has finished it."""
    return x if isinstance(x, np.ndarray) else memory.to_host(x)


def download(x: Rows) -> Callable[[], np.ndarray]:
    """A function that gives x as it now is in the stream's order, as a NumPy array; to be called once.

    The host does not wait before that, and x may be written to again at once.
    """
    return (lambda: x) if isinstance(x, np.ndarray) else memory.Download(x).result


def take_rows(x: Rows, indices: Indices) -> Rows:
    """A copy of rows `indices` of x: [len(indices), ...].

    Raises IndexError for an index on the host that is outside the rows; indices on the device are int64 and not looked
    at.
    """
    if isinstance(x, np.ndarray):
        return cpu.take_rows(x, _host_indices(indices))
    out = memory.empty((len(indices), *x.shape[1:]), x.dtype)
    if not isinstance(indices, torch.Tensor):
        checked = _checked(indices, len(x))
        if len(checked) <= FEW_INDICES:
            for i, index in enumerate(checked):
                out[i].copy_(x[index])
            return out
        indices = _on_device(checked)
    torch.index_select(x, 0, indices, out=out)
    return out


def put_rows(x: Rows, indices: Indices, values: Rows) -> None:
    """Write values[i] to row indices[i] of x, in place; of equal indices the last counts. Values may lie on the host.

    Raises IndexError for an index on the host that is outside the rows; indices on the device are int64, differ from
    each other and are not looked at.
    """
    if isinstance(x, np.ndarray):
        cpu.put_rows(x, _host_indices(indices), to_host(values))
        return
    if isinstance(values, np.ndarray):
        values = memory.to_device(values)
    if not isinstance(indices, torch.Tensor):
        last = {index: i for i, index in enumerate(_checked(indices, len(x)))}
        if len(last) <= FEW_INDICES:
            for index, i in last.items():
                x[index].copy_(values[i])
            return
        if len(last) < len(indices):
            values = torch.index_select(values, 0, _on_device(list(last.values())))
        indices = _on_device(list(last))
    x.index_copy_(0, indices, values)


def fill_rows(x: Rows, indices: Indices, value: Any) -> None:
    """Write `value` to every element of rows `indices` of x, in place. Raises IndexError as `take_rows` does."""
    if isinstance(x, np.ndarray):
        cpu.fill_rows(x, _host_indices(indices), value)
        return
    if not isinstance(indices, torch.Tensor):
        checked = _checked(indices, len(x))
        if len(checked) <= FEW_INDICES:
            for index in checked:
                x[index].fill_(float(value))
            return
        indices = _on_device(checked)
    x.index_fill_(0, indices, float(value))


def shift_rows(x: Rows, last: Rows, batch: Batch, journal: Rows | None = None) -> Rows:
    """Each row's predecessor in its stream: [R, ...] -> [R, ...].

    The first row of a segment gets last[slot]; afterwards last[slot] holds the segment's last row. journal: [J, ...],
    the pool's value after each row that the batch journals. On the device elements are of 4 bytes.
    """
    if isinstance(x, np.ndarray):
        return cpu.shift_rows(x, to_host(last), batch, None if journal is None else to_host(journal))
    out = memory.empty(x.shape, x.dtype)
    rows, at = len(x), placed(batch)
    if not out.numel():
        return out
    places = None if journal is None else at.journal
    arrays = (x, last, out) if places is None else (x, last, out, journal)
    kernel, width = _of_units("shift", x.numel() // rows, *arrays)
    target = None if places is None else journal
    grid = -(-width // THREADS), rows
    kernel(grid, THREADS, x, last, out, width, at.slots, at.starts, at.segment_of_row, places, target)
    return out


def split_columns(x: Rows, column: int) -> tuple[Rows, Rows]:
    """The columns before `column` and from it on: [R, N] -> [R, column], [R, N - column]; on the device parts of x."""
    if isinstance(x, np.ndarray):
        return cpu.split_columns(x, column)
    return x[:, :column], x[:, column:]


def _of_units(name: str, width: int, *arrays: torch.Tensor) -> tuple[kernels.Kernel, int]:
    """The kernel for rows of `width` 4-byte elements, and their width in its units: of 16 bytes where all fit."""
    if any(array.element_size() != 4 for array in arrays):
        raise ValueError(f"{name}: elements are {[array.dtype for array in arrays]}, expected of 4 bytes")
    whole = width % 4 == 0 and not any(array.data_ptr() % 16 for array in arrays)
    return kernels.load(SOURCE, name, UNIT=16 if whole else 4), width // 4 if whole else width


def _checked(indices: Any, rows: int) -> list[int]:
    checked = [int(index) for index in indices]
    for index in checked:
        if not 0 <= index < rows:
            raise IndexError(f"index {index} is outside an array of {rows} rows")
    return checked


def _host_indices(indices: Indices) -> Any:
    return memory.to_host(indices) if isinstance(indices, torch.Tensor) else indices


def _on_device(indices: list[int]) -> torch.Tensor:
    return memory.to_device(np.array(indices, np.int64))
