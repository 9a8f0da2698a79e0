"""Ways to compute the rows of a case: one by one, all at once, and in random batches among strangers."""

from collections.abc import Iterator

import numpy as np

from isobit.ops.contract import Case, Span

Schedule = list[list[Span]]


def serial(case: Case) -> Schedule:
    """One row a call, stream after stream."""
    return [[Span(stream, row, 1)] for stream, rows in enumerate(case.rows) for row in range(rows)]


def together(case: Case) -> Schedule:
    """All rows of all streams in one call."""
    return [[Span(stream, 0, rows) for stream, rows in enumerate(case.rows) if rows]]


def shuffled(case: Case, rng: np.random.Generator, largest: int) -> Schedule:
    """Calls of random streams in random order, each stream cut into random pieces of at most `largest` rows."""
    done = [0] * len(case.rows)
    schedule: Schedule = []
    while pending := [stream for stream, rows in enumerate(case.rows) if done[stream] < rows]:
        width = int(rng.integers(1, min(len(pending), largest) + 1))
        call = []
        for stream in rng.permutation(pending)[:width]:
            left = case.rows[stream] - done[stream]
            count = int(rng.integers(1, min(left, largest) + 1))
            call.append(Span(int(stream), done[stream], count))
            done[stream] += count
        schedule.append(call)
    return schedule


def schedules(case: Case, rng: np.random.Generator) -> Iterator[Schedule]:
    """The schedules of gate 2 beside `serial`."""
    yield together(case)
    for largest in (2, 7, 64, max(max(case.rows), len(case.rows))):
        yield shuffled(case, rng, largest)
