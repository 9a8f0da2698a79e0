"""Forwards of few rows on the CPU: the first of its shapes is recorded as it runs, later ones are replayed.

Of a small forward's time, much goes into the ops' Python code; a tape goes from kernel to kernel.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from isobit.ops import tape, threads
from isobit.ops.batch import Batch
from isobit.ops.buffers import empty
from isobit.ops.passes import Before, Body, PassInputs, T, arrays_of, nothing, shapes, with_wide_pages, write_batch

MOST_ROWS = 16  # of a forward that is replayed: more rows keep the kernels busy
MOST_TAPES = 64
log = logging.getLogger(__name__)


class TapePasses:
    """Runs forwards of few rows as tapes. Replaying changes no byte: the same kernels run on the same inputs.

    Several threads may run forwards at a time, each of other states: one of them is on tape, the others step by step.
    enabled: whether anything is replayed.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.arena = tape.Arena()
        self._tapes: OrderedDict[Hashable, Tape] = OrderedDict()
        self._busy = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for forwards to come."""
        return self.arena.nbytes

    def run(
        self, key: Hashable, inputs: PassInputs, body: Body, replayable: bool = True, before: Before = nothing
    ) -> Any:
        """As `isobit.ops.passes.EagerPasses.run` says, but for the arrays given: they stay as they are."""
        small = all(batch.rows <= MOST_ROWS for batch in inputs.batches.values())
        if not (self.enabled and replayable and inputs.recurring and small) or not self._busy.acquire(blocking=False):
            before()
            return body(inputs)
        # All tapes share their memory.
        try:
            return self._on_tape(key, inputs, body, before)
        finally:
            self._busy.release()

    def release(self) -> None:
        """Give up all tapes and their memory; forwards to come are recorded anew."""
        with self._busy:
            self._give_up()

    def cut(self) -> None:
        """As `isobit.ops.passes.EagerPasses.cut` says: here nothing runs ahead."""

    def beside(self, launch: Callable[[], T]) -> Callable[[], T]:
        """As `isobit.ops.passes.EagerPasses.beside` says: here one step comes after the other."""
        given = launch()
        return lambda: given

    def _on_tape(self, key: Hashable, inputs: PassInputs, body: Body, before: Before) -> Any:
        """The outputs from a tape, which is recorded if there is none yet."""
        full_key = key, threads(), shapes(inputs)
        found = self._tapes.get(full_key)
        if found is None:
            before()
            return self._record(full_key, inputs, body)
        self._tapes.move_to_end(full_key)
        places = places_for(found.outputs)
        if places is not None:
            return found.replay(inputs, places)
        log.warning("no memory to replay a forward: it runs step by step")
        del found
        self._give_up()
        before()
        return body(inputs)

    def _give_up(self) -> None:
        self._tapes.clear()
        self.arena = tape.Arena()

    def _record(self, key: Hashable, inputs: PassInputs, body: Body) -> Any:
        static = StaticInputs(with_wide_pages(inputs))
        with tape.recorded(self.arena) as recorder:
            outputs = body(static.given)
        if recorder is not None:
            if len(self._tapes) == MOST_TAPES:
                self._tapes.popitem(last=False)
            self._tapes[key] = Tape(recorder.calls, static, outputs)
        return copied(outputs, room_for(outputs))


class StaticInputs:
    """Copies of a forward's inputs, in arrays that stay where they are."""

    def __init__(self, inputs: PassInputs):
        batches = {name: batch_of_own(batch) for name, batch in inputs.batches.items()}
        self.given = PassInputs(batches, {name: array.copy() for name, array in inputs.arrays.items()})

    def fill(self, inputs: PassInputs) -> None:
        """Put other inputs of the same shapes in their places."""
        for name, batch in inputs.batches.items():
            write_batch(batch, arrays_of(self.given.batches[name]))
        for name, array in inputs.arrays.items():
            np.copyto(self.given.arrays[name], array)


@dataclass(frozen=True)
class Tape:
    """The calls of a recorded forward, where its inputs go and where its outputs lie."""

    calls: list[tape.Call]
    inputs: StaticInputs
    outputs: Any

    def replay(self, inputs: PassInputs, places: Any) -> Any:
        """The outputs for other inputs of the same shapes, in `places`."""
        self.inputs.fill(inputs)
        for function, arguments in self.calls:
            function(*arguments)
        return copied(self.outputs, places)


def room_for(outputs: Any) -> Any:
    """Arrays like those that a forward gives: one, or several."""
    return empty(outputs.shape, outputs.dtype) if isinstance(outputs, np.ndarray) else tuple(map(room_for, outputs))


def places_for(outputs: Any) -> Any:
    """`room_for` what a forward gives, or None where there is no memory for it."""
    try:
        return room_for(outputs)
    except MemoryError:
        return None


def copied(outputs: Any, places: Any) -> Any:
    """The places, which hold what the outputs hold now."""
    if isinstance(outputs, np.ndarray):
        np.copyto(places, outputs)
    else:
        for output, place in zip(outputs, places, strict=True):
            copied(output, place)
    return places


def batch_of_own(batch: Batch) -> Batch:
    """A copy of a batch, also of the arrays that follow from the others."""
    slots, starts, first, pages = (array.copy() for array in (batch.slots, batch.starts, batch.first, batch.pages))
    journal = None if batch.journal is None else batch.journal.copy()
    own = Batch(slots, starts, first, pages, journal, batch.journal_rows)
    own.__dict__.update(positions=batch.positions.copy(), segment_of_row=batch.segment_of_row.copy())
    return own
