"""Kept states as host arrays and back: what spilling to disk writes and reads.

The rows of a stream lie in caches; those of the MTP head lag one row behind, because its row i needs token i + 1. The
rows [first, last) of a stream are, for the cache `mtp`, rows [first - 1, last - 1): so they depend on the stream's
first `last` tokens alone.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobit.errors import IsobitError
from isobit.model.state import KeptState, StatePool, pages_for
from isobit.ops.batch import PAGE_ROWS, Array
from isobit.ops.copies import ARRIVED, Arrival

PARTS = ("keys", "values", "index_raw", "index_pooled")
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]


class StateMismatchError(IsobitError):
    """Host arrays are not the state of this model."""


@dataclass(frozen=True)
class RowPiece:
    """The cache rows of a stream's rows [first, last): `<cache>.<part>` arrays with rows, or blocks, as first axis."""

    first: int
    last: int
    arrays: Arrays


def recurrent_shapes(state: StatePool) -> Shapes:
    """The shapes and dtypes of `take_recurrent`."""
    return {name: (tuple(pool.shape[1:]), _host_dtype(pool.dtype)) for name, pool in state.recurrent.items()}


def row_shapes(state: StatePool, first: int, last: int) -> Shapes:
    """The shapes and dtypes of `take_rows`."""
    shapes: Shapes = {}
    for name, cache in state.caches.items():
        for part, _, begin, end in _ranges(state, name, first, last):
            pool = getattr(cache, part)
            shapes[f"{name}.{part}"] = (end - begin, *pool.shape[2:]), _host_dtype(pool.dtype)
    return shapes


def take_recurrent(kept: KeptState) -> dict[str, Array]:
    """A kept state's recurrent arrays on the device, without the slot axis."""
    kept.arrival.precede()
    return {name: copy[0] for name, copy in kept.recurrent.items()}


def take_rows(state: StatePool, kept: KeptState, first: int, last: int) -> dict[str, Array]:
    """The cache rows of a kept state's rows [first, last), copied on the device: as the `arrays` of a RowPiece."""
    kept.arrival.precede()
    arrays, rows = {}, PoolRows(state)
    for name, cache in state.caches.items():
        for part, per_page, begin, end in _ranges(state, name, first, last):
            arrays[f"{name}.{part}"] = rows.take(getattr(cache, part), kept.pages, per_page, begin, end)
    return arrays


def export_recurrent(state: StatePool, kept: KeptState) -> Arrays:
    """A kept state's recurrent arrays on the host, without the slot axis."""
    return {name: state.ops.to_host(copy) for name, copy in take_recurrent(kept).items()}


def export_rows(state: StatePool, kept: KeptState, first: int, last: int) -> Arrays:
    """The cache rows of a kept state's rows [first, last), copied to the host: the `arrays` of a RowPiece."""
    return {name: state.ops.to_host(units) for name, units in take_rows(state, kept, first, last).items()}


def import_kept(
    state: StatePool,
    rows: int,
    recurrent: Arrays,
    pieces: Iterable[RowPiece],
    shared: Sequence[int] = (),
    after: Arrival = ARRIVED,
) -> KeptState:
    """A kept state at row `rows` from host arrays, which hold it when `after` is done; it arrives beside the forwards.

    shared: the stream's first pages where they are in the pool already, finished; `pieces` cover at least what lies
    beyond them, in order. Raises StateFullError when too few pages are free, StateMismatchError for arrays that are not
    this model's; nothing is taken then, nor when `pieces` raises.
    """
    host = {
        name: _checked(name, recurrent.get(name), pool.shape[1:], pool.dtype)[None]
        for name, pool in state.recurrent.items()
    }
    pages = [*shared, *state.take_pages(pages_for(rows) - len(shared))]
    sources = [host]
    try:
        copies = {name: state.ops.zeros(array.shape, array.dtype) for name, array in host.items()}

        def write() -> None:
            for name, array in host.items():
                state.ops.put_rows(copies[name], [0], array)
            for piece in pieces:
                _write_rows(state, pages, len(shared), piece)
                sources.append(piece.arrays)

        arrival = state.ops.copies.upload(write, after, sources)
    except BaseException:
        state.release_pages(pages[len(shared) :])
        raise
    state.share_pages(shared)
    return KeptState(rows, tuple(pages), copies, arrival)


def finished_pages(rows: int) -> int:
    """How many of the first pages no continuation of a stream at `rows` writes again, the MTP head's rows included."""
    return max(rows - 1, 0) // PAGE_ROWS


def _ranges(state: StatePool, name: str, first: int, last: int) -> list[tuple[str, int, int, int]]:
    """(part, units a page, first unit, last unit) of a cache's parts; a unit is a row, or a block of pooled keys."""
    lag = 1 if name == "mtp" else 0
    begin, end = max(first - lag, 0), max(last - lag, 0)
    block = state.index_block
    pooled = ("index_pooled", PAGE_ROWS // block, begin // block, end // block)
    return [*((part, PAGE_ROWS, begin, end) for part in PARTS[:-1]), pooled]


def _write_rows(state: StatePool, pages: Sequence[int], skipped_pages: int, piece: RowPiece) -> None:
    rows = PoolRows(state)
    for name, cache in state.caches.items():
        for part, per_page, begin, end in _ranges(state, name, piece.first, piece.last):
            pool, key = getattr(cache, part), f"{name}.{part}"
            units = _checked(key, piece.arrays.get(key), (end - begin, *pool.shape[2:]), pool.dtype)
            start = max(begin, skipped_pages * per_page)
            rows.write(pool, pages, per_page, start, units[start - begin :])


class PoolRows:
    """Units of paged pools, a row or a block each, taken and written by row numbers that many pools share."""

    def __init__(self, state: StatePool):
        self._ops = state.ops
        self._indices: dict[tuple[int, ...], Any] = {}

    def take(self, pool: Array, pages: Sequence[int], per_page: int, begin: int, end: int) -> Array:
        """A copy of units [begin, end) of a stream."""
        first_page, last_page = begin // per_page, -(-end // per_page)
        paged = self._ops.take_rows(pool, self._at(tuple(pages[first_page:last_page])))
        units = paged.reshape(-1, *paged.shape[2:])
        return units[begin - first_page * per_page : end - first_page * per_page]

    def write(self, pool: Array, pages: Sequence[int], per_page: int, begin: int, units: np.ndarray) -> None:
        """Write units from unit `begin` on; a page that they cover in part keeps the rest."""
        end = begin + len(units)
        first_whole = min(-(-begin // per_page) * per_page, end)
        last_whole = max(end // per_page * per_page, first_whole)
        if first_whole < last_whole:
            whole = units[first_whole - begin : last_whole - begin].reshape(-1, per_page, *units.shape[1:])
            self._ops.put_rows(pool, self._at(tuple(pages[first_whole // per_page : last_whole // per_page])), whole)
        for first, last in ((begin, first_whole), (last_whole, end)):
            if first < last:
                places = tuple(pages[unit // per_page] * per_page + unit % per_page for unit in range(first, last))
                flat = pool.reshape(-1, *pool.shape[2:])
                self._ops.put_rows(flat, self._at(places), units[first - begin : last - begin])

    def _at(self, rows: tuple[int, ...]) -> Any:
        if rows not in self._indices:
            self._indices[rows] = self._ops.copies.indices(rows)
        return self._indices[rows]


def _checked(name: str, array: np.ndarray | None, shape: Sequence[int], dtype: Any) -> np.ndarray:
    if array is None or array.shape != tuple(shape) or array.dtype != _host_dtype(dtype):
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise StateMismatchError(f"a kept state has {found} for {name}, this model {dtype} {list(shape)}: drop it")
    return array


@functools.cache
def _host_dtype(dtype: Any) -> np.dtype:
    """NumPy's name for a dtype of the device."""
    return np.dtype(str(dtype).removeprefix("torch."))
