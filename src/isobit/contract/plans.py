"""Ways to compute the rows of a case: one by one, all at once, and in batches of every size among strangers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from isobit.ops.contract import Case, Span

Schedule = list[list[Span]]


@dataclass(frozen=True)
class Sizes:
    """The batches to run: of `rows` rows each, and one row put in every place of a batch of `places` rows."""

    rows: tuple[int, ...]
    places: int

    def also(self, rows: tuple[int, ...]) -> "Sizes":
        """These, and batches of other sizes."""
        return replace(self, rows=(*self.rows, *rows))


EVERY_EDGE = (*range(1, 18), *range(31, 34), *range(63, 66), *range(127, 130))
WIDE_SIZES = Sizes((2, 9, 17), 0)
QUICK_SIZES = Sizes((2, 3, 4, 7, 8, 9, 12, 13, 16, 17, 33, 64, 65, 129), 17)
SIZES = Sizes(EVERY_EDGE, 17)
DEVICE_SIZES = (2048, 4095, 4096, 4097, 8192)  # rows of a prompt's segments, as one call has them on a GPU
MOST_BATCH_BYTES = 1 << 30
FULL_SIZES = Sizes((*EVERY_EDGE, *range(255, 258), *range(511, 514), *range(1023, 1026)), 33)


def fitting(case: Case, sizes: Sizes) -> Sizes:
    """The sizes whose batches of the case's rows have no array of more than MOST_BATCH_BYTES; its own rows always."""
    count = len(case.rows)
    arrays = (x for x in case.inputs.values() if isinstance(x, np.ndarray) and x.ndim and len(x) == count)
    most = MOST_BATCH_BYTES * count // max((x.nbytes for x in arrays), default=1)
    return replace(sizes, rows=tuple(size for size in sizes.rows if size <= max(most, count)))


def serial(case: Case) -> Schedule:
    """One row a call, stream after stream."""
    return [[Span(stream, row, 1)] for stream, rows in enumerate(case.rows) for row in range(rows)]


def together(case: Case) -> Schedule:
    """All rows of all streams in one call."""
    return [[Span(stream, 0, rows) for stream, rows in enumerate(case.rows) if rows]]


def in_pieces(case: Case, size: int) -> Schedule:
    """Every stream by itself, in calls of `size` rows; its last call may be smaller."""
    return [
        [Span(stream, first, min(size, rows - first))]
        for stream, rows in enumerate(case.rows)
        for first in range(0, rows, size)
    ]


def mixed(case: Case, rng: np.random.Generator, size: int) -> Schedule:
    """Calls of `size` rows, fewer at the end: pieces of random streams, in random order."""
    done = [0] * len(case.rows)
    schedule: Schedule = []
    while pending := [stream for stream, rows in enumerate(case.rows) if done[stream] < rows]:
        call, room = [], size
        for stream in rng.permutation(pending):
            if room == 0:
                break
            left = case.rows[stream] - done[stream]
            count = int(rng.integers(1, min(left, room) + 1))
            call.append(Span(int(stream), done[stream], count))
            done[stream] += count
            room -= count
        schedule.append(call)
    return schedule


def schedules(case: Case, rng: np.random.Generator, sizes: Sizes) -> Iterator[Schedule]:
    """Schedules of streams that move on: all at once, and for each size alone in pieces and among strangers."""
    yield together(case)
    longest, all_rows = max(case.rows), sum(case.rows)
    for size in sizes.rows:
        if size < longest:
            yield in_pieces(case, size)
        if size < all_rows:
            yield mixed(case, rng, size)
    yield mixed(case, rng, all_rows)


def batches(case: Case, rng: np.random.Generator, sizes: Sizes) -> Iterator[Schedule]:
    """Schedules for rows without state: batches of each size, rows repeated at will; some row in every place."""
    rows = len(case.rows)
    yield together(case)
    for size in sizes.rows:
        yield [_of_rows(rng.integers(0, rows, size))]
        yield [_of_rows(np.arange(size) % rows)]
    row = int(rng.integers(rows))
    for place in range(sizes.places):
        chosen = rng.integers(0, rows, sizes.places)
        chosen[place] = row
        yield [_of_rows(chosen)]


def _of_rows(rows: Sequence[int] | np.ndarray) -> list[Span]:
    return [Span(int(row), 0, 1) for row in rows]
