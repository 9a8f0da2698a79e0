"""The row contract of journals: a state op once more, with the state after its rows as one more output."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from isobit.ops.batch import Batch
from isobit.ops.buffers import empty
from isobit.ops.cases import batch_of_plan
from isobit.ops.contract import Case, Op, Outputs, Span

LONGEST_STREAM = 16  # rows, of the cases that are journaled: a draft is no longer


class StateOp(Op, Protocol):
    """An op with one state pool, the only array of its final state, that can journal it."""

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        """What `call` gives for the plan's rows, which are the batch's; the journal is written if it is not None."""

    def states(self, case: Case) -> np.ndarray:
        """The float64 value of the state after every row, stream after stream: [rows, the shape of a slot]."""

    def states_limit(self, case: Case, states: np.ndarray) -> np.ndarray:
        """The largest allowed |state - reference|, broadcastable to the states."""


class JournaledOp:
    """A state op, two rows in three journaled: output `journal` [R, the shape of a slot], 0 in the other rows."""

    def __init__(self, op: StateOp):
        self.op = op
        self.name = f"{op.name}_journal"
        self.implementations = op.implementations

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        narrow = [case for case in self.op.cases(rng, False) if max(case.rows) <= LONGEST_STREAM][:2]
        yield from narrow
        if full:
            wide = [case for case in self.op.cases(rng, True) if max(case.rows) <= LONGEST_STREAM][-1]
            if wide.label not in {case.label for case in narrow}:
                yield wide

    def begin(self, case: Case) -> Any:
        return self.op.begin(case)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        batch = journaled_batch(plan, len(case.rows))
        (pool,) = self.op.final_state(case, state).values()
        journal = empty((batch.journal_rows, *pool.shape[1:]), pool.dtype)
        outputs = self.op.compute(implementation, case, state, plan, batch, journal)
        return {**outputs, "journal": by_row(batch, journal)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return self.op.final_state(case, state)

    def reference(self, case: Case) -> Outputs:
        states = self.op.states(case)
        return {**self.op.reference(case), "journal": np.where(expanded(journaled_rows(case), states), states, 0)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        limits = self.op.error_limit(case, reference)
        return {**limits, "journal": self.op.states_limit(case, self.op.states(case))}

    def limits(self) -> list[str]:
        return [f"journaled segments of more than {LONGEST_STREAM} rows"]


def is_journaled(stream: int, row: int) -> bool:
    """Whether the contract journals a stream's row: by the row alone, whatever call it is in."""
    return (stream + row) % 3 != 2


def journaled_rows(case: Case) -> np.ndarray:
    """bool [rows], stream after stream."""
    return np.array([is_journaled(stream, row) for stream, rows in enumerate(case.rows) for row in range(rows)])


def journaled_batch(plan: Sequence[Span], streams: int) -> Batch:
    """The plan as a batch; its journaled rows go to the journal's rows from the last to the first."""
    rows = [(span.stream, row) for span in plan for row in range(span.first, span.first + span.count)]
    chosen = np.array([is_journaled(*row) for row in rows])
    places = np.where(chosen, chosen.sum() - np.cumsum(chosen), -1).astype(np.int32)
    return replace(batch_of_plan(plan, streams), journal=places, journal_rows=int(chosen.sum()))


def by_row(batch: Batch, journal: np.ndarray) -> np.ndarray:
    """Each row's journaled state [R, ...], 0 for rows without."""
    assert batch.journal is not None
    states = np.zeros((batch.rows, *journal.shape[1:]), journal.dtype)
    rows = np.flatnonzero(batch.journal >= 0)
    states[rows] = journal[batch.journal[rows]]
    return states


def expanded(mask: np.ndarray, states: np.ndarray) -> np.ndarray:
    """The mask [rows] for states [rows, ...]."""
    return mask.reshape(-1, *[1] * (states.ndim - 1))


def last_rows(before: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What a pool of the last len(before) rows holds after each of the rows: [n, len(before), ...]."""
    history = np.concatenate([before, rows])
    return np.stack([history[row + 1 : row + 1 + len(before)] for row in range(len(rows))])
