"""Kept states as host arrays and back: what spilling to disk writes and reads.

The rows of a stream lie in caches; those of the MTP head lag one row behind, because its row i needs token i + 1. The
rows [first, last) of a stream are, for the cache `mtp`, rows [first - 1, last - 1): so they depend on the stream's
first `last` tokens alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from isobit.errors import IsobitError
from isobit.model.state import KeptState, StatePool, pages_for
from isobit.ops.batch import PAGE_ROWS, Array

PARTS = ("keys", "values", "index_raw", "index_pooled")
Arrays = dict[str, np.ndarray]


class StateMismatchError(IsobitError):
    """Host arrays are not the state of this model."""


@dataclass(frozen=True)
class RowPiece:
    """The cache rows of a stream's rows [first, last): `<cache>.<part>` arrays with rows, or blocks, as first axis."""

    first: int
    last: int
    arrays: Arrays


def export_recurrent(state: StatePool, kept: KeptState) -> Arrays:
    """A kept state's recurrent arrays, without the slot axis."""
    return {name: state.ops.to_host(copy)[0] for name, copy in kept.recurrent.items()}


def export_rows(state: StatePool, pages: Sequence[int], first: int, last: int) -> Arrays:
    """The cache rows of a stream's rows [first, last), copied: the `arrays` of a RowPiece."""
    arrays = {}
    for name, cache in state.caches.items():
        for part, per_page, begin, end in _ranges(state, name, first, last):
            arrays[f"{name}.{part}"] = _read_units(state, getattr(cache, part), pages, per_page, begin, end)
    return arrays


def import_kept(
    state: StatePool,
    rows: int,
    recurrent: Arrays,
    pieces: Iterable[RowPiece],
    shared: Sequence[int] = (),
) -> KeptState:
    """A kept state at row `rows` from host arrays.

    shared: the stream's first pages where they are in the pool already, finished; `pieces` cover at least what lies
    beyond them, in order. Raises StateFullError when too few pages are free, StateMismatchError for arrays that are not
    this model's; nothing is taken then, nor when `pieces` raises.
    """
    copies = {
        name: _checked(name, recurrent.get(name), pool.shape[1:], pool.dtype)[None]
        for name, pool in state.recurrent.items()
    }
    pages = [*shared, *state.take_pages(pages_for(rows) - len(shared))]
    try:
        for piece in pieces:
            _write_rows(state, pages, len(shared), piece)
    except BaseException:
        state.release_pages(pages[len(shared) :])
        raise
    state.share_pages(shared)
    return KeptState(rows, tuple(pages), {name: _own_copy(state, copy) for name, copy in copies.items()})


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


def _read_units(state: StatePool, pool: Array, pages: Sequence[int], per_page: int, begin: int, end: int) -> np.ndarray:
    first_page, last_page = begin // per_page, -(-end // per_page)
    paged = state.ops.to_host(state.ops.take_rows(pool, list(pages[first_page:last_page])))
    units = paged.reshape(-1, *paged.shape[2:])
    return units[begin - first_page * per_page : end - first_page * per_page]


def _write_rows(state: StatePool, pages: Sequence[int], skipped_pages: int, piece: RowPiece) -> None:
    for name, cache in state.caches.items():
        for part, per_page, begin, end in _ranges(state, name, piece.first, piece.last):
            pool, key = getattr(cache, part), f"{name}.{part}"
            units = _checked(key, piece.arrays.get(key), (end - begin, *pool.shape[2:]), pool.dtype)
            start = max(begin, skipped_pages * per_page)
            _write_units(state, pool, pages, per_page, start, units[start - begin :])


def _write_units(
    state: StatePool, pool: Array, pages: Sequence[int], per_page: int, begin: int, units: np.ndarray
) -> None:
    """Write units from unit `begin` on; a page that they cover in part keeps the rest."""
    while len(units):
        page, offset = divmod(begin, per_page)
        count = min(per_page - offset, len(units))
        paged = np.array(state.ops.to_host(state.ops.take_rows(pool, [pages[page]])))
        paged[0, offset : offset + count] = units[:count]
        state.ops.put_rows(pool, [pages[page]], paged)
        begin, units = begin + count, units[count:]


def _checked(name: str, array: np.ndarray | None, shape: Sequence[int], dtype) -> np.ndarray:
    found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
    if array is None or tuple(array.shape) != tuple(shape) or str(array.dtype) != str(dtype).removeprefix("torch."):
        raise StateMismatchError(f"a kept state has {found} for {name}, this model {dtype} {list(shape)}: drop it")
    return array


def _own_copy(state: StatePool, copy: np.ndarray) -> Array:
    device = state.ops.zeros(copy.shape, copy.dtype)
    state.ops.put_rows(device, [0], copy)
    return device
