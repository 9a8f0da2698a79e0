"""What the ops' contract cases are made of: rows of every awkward kind, and plans turned into batches."""

from collections.abc import Callable, Sequence

import numpy as np

from isobit.ops.batch import Batch
from isobit.ops.buffers import empty
from isobit.ops.contract import Span

UNIT = 2.0**-24  # the largest relative error of one float32 rounding
SMALLEST = 2.0**-149
KINDS = ("random", "large", "tiny", "subnormal", "cancelling", "equal", "zero", "one hot")
ALL_KINDS = (*KINDS, "infinite", "one NaN")


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


_lend: Callable[[np.ndarray], np.ndarray] = _as_it_is


def given(array: np.ndarray) -> np.ndarray:
    """An input of a call. The contract may lend it from guarded memory, and then looks whether it was changed."""
    return _lend(array)


def in_place(array: np.ndarray) -> np.ndarray:
    """A copy that a call may change, from where op outputs come from: guarded by the contract, but not watched."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def set_lender(lend: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Replace what `given` does; returns the previous. For the contract's hygiene gate only."""
    global _lend
    previous, _lend = _lend, lend
    return previous


def rows_of_kinds(
    rng: np.random.Generator, count: int, *shape: int, largest: float = 1e15, kinds: Sequence[str] = KINDS
) -> np.ndarray:
    """float32 [count, *shape], row i of kind `kinds[i mod len(kinds)]`; `largest`: the size of the large ones."""
    rows = rng.standard_normal((count, *shape)).astype(np.float32)
    for row, values in enumerate(rows.reshape(count, -1)):
        kind = kinds[row % len(kinds)]
        if kind == "large":
            values *= np.float32(largest)
        elif kind == "tiny":
            values *= np.float32(1e-20)
        elif kind == "subnormal":
            values *= np.float32(1e-40)
        elif kind == "cancelling":
            values[1::2] = -values[: values.size // 2 * 2 : 2]
        elif kind == "equal":
            values[:] = values[0]
        elif kind == "zero":
            values[:] = np.float32(0.0)
            values[1::2] = np.float32(-0.0)
        elif kind == "one hot":
            values[:-1] = np.float32(0.0)
        elif kind == "infinite":
            values[:: max(1, values.size // 2)] *= np.float32(np.inf)
        elif kind == "one NaN":
            values[values.size // 3] = np.float32(np.nan)
    return rows


def streams_of_kinds(
    rng: np.random.Generator, lengths: Sequence[int], *shape: int, largest: float = 1e15
) -> list[np.ndarray]:
    """`rows_of_kinds` for each stream, shuffled; a stream of two rows is all NaN: a stranger that must not leak."""
    streams = [rows_of_kinds(rng, rows, *shape, largest=largest)[rng.permutation(rows)] for rows in lengths]
    return [np.full_like(rows, np.nan) if len(rows) == 2 else rows for rows in streams]


def stream_lengths(number: int, full: bool) -> tuple[int, ...]:
    """Rows of each stream in an op's case `number`: case 1 has one stream that is longer than any batch checked."""
    return (1027 if full else 130, 3) if number == 1 else (1, 2, 5, 13)


def stream_of_row(plan: Sequence[Span]) -> np.ndarray:
    """int [R], the case stream of every row of the plan: for stateless ops, the row itself."""
    return np.repeat([span.stream for span in plan], [span.count for span in plan])


def rows_of_plan(plan: Sequence[Span], streams: Sequence[np.ndarray]) -> np.ndarray:
    """The plan's rows of per-stream inputs [n, ...], in the plan's order."""
    return np.concatenate([streams[span.stream][span.first : span.first + span.count] for span in plan])


def batch_of_plan(plan: Sequence[Span], streams: int) -> Batch:
    """The plan as a batch without pages; stream i has slot streams - i of streams + 1: slot 0 is a stranger's."""
    return Batch(
        slots=np.array([streams - span.stream for span in plan], np.int32),
        starts=np.cumsum([0] + [span.count for span in plan], dtype=np.int32),
        first=np.array([span.first for span in plan], np.int32),
        pages=np.zeros((len(plan), 1), np.int32),
    )


def pool_of_streams(states: Sequence[np.ndarray]) -> np.ndarray:
    """The pool for `batch_of_plan`: each stream's state in its slot, and slot 0 a stranger's: NaN, or 1 in integers."""
    stranger = np.full_like(states[0], np.nan if states[0].dtype.kind == "f" else 1)
    return in_place(np.stack([stranger, *reversed(states)]))
