"""Running a whole forward: what it takes from the host is given apart from its steps, which a device can replay."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from isobit.ops.batch import Array, Batch


@dataclass(frozen=True)
class PassInputs:
    """What a forward reads that changes from one to the next: batches, and arrays of the host or the device.

    recurring: whether forwards of these shapes are likely to come again. Of a forward that no device replays (more than
    MOST_REPLAYED_ROWS rows) an array may be given as a function that makes it when it is needed.
    """

    batches: dict[str, Batch]
    arrays: dict[str, Array] = field(default_factory=dict)
    recurring: bool = True

    def array(self, name: str) -> Array:
        """The array of that name, made now if it was not yet."""
        given = self.arrays[name]
        return given() if callable(given) else given


MOST_REPLAYED_ROWS = 64

Body = Callable[[PassInputs], Any]
T = TypeVar("T")
Before = Callable[[], None]


def nothing() -> None:
    """What most have to do before a forward."""


class EagerPasses:
    """Runs the steps as they are."""

    def run(
        self, key: Hashable, inputs: PassInputs, body: Body, replayable: bool = True, before: Before = nothing
    ) -> Any:
        """What `body` gives for the inputs: arrays.

        A later run with the same key and inputs of the same shapes may replay the steps of an earlier one, if both are
        `replayable`: the body may depend on nothing else, and leaves nothing behind but what ops write to arrays. The
        arrays given are good until the next run with the same key. before: called before the steps run one by one, when
        they may fail for want of memory; a replay takes none.
        """
        before()
        return body(inputs)

    def release(self) -> None:
        """Give up what is kept for forwards to come: nothing."""

    def cut(self) -> None:
        """Called by a body where a device may begin with what came before, while the host launches what follows."""

    def beside(self, launch: Callable[[], T]) -> Callable[[], T]:
        """Called by a body: call `launch`, whose steps a device may take while it takes the body's next ones.

        Gives a function for what `launch` gives, to be called once, before the body ends or cuts: from there on those
        steps are done. Until then nothing may be written or given up that they read, nor read or written what they
        write.
        """
        given = launch()
        return lambda: given


def with_wide_pages(inputs: PassInputs) -> PassInputs:
    """The inputs with page tables padded to the width of a recording, so that a few recordings serve all lengths."""
    batches = {name: padded(batch) for name, batch in inputs.batches.items()}
    return replace(inputs, batches=batches)


def padded(batch: Batch) -> Batch:
    """The batch with page 0 appended to each row of the page table, up to the width of a recording."""
    wanted = recorded_pages(batch)
    if batch.pages.shape[1] == wanted:
        return batch
    pages = np.zeros((batch.segments, wanted), np.int32)
    pages[:, : batch.pages.shape[1]] = batch.pages
    return replace(batch, pages=pages)


def recorded_pages(batch: Batch) -> int:
    """The width of the page tables of the recording that serves a batch: a power of two."""
    return 1 << max(batch.pages.shape[1] - 1, 0).bit_length()


def shapes(inputs: PassInputs) -> Hashable:
    """What a recording depends on, beside the values of its inputs."""
    batches = tuple(
        (name, batch.rows, batch.segments, recorded_pages(batch), batch.journal is not None, batch.journal_rows)
        for name, batch in inputs.batches.items()
    )
    arrays = tuple((name, type(array), tuple(array.shape), array.dtype) for name, array in inputs.arrays.items())
    return batches, arrays


def arrays_of(batch: Batch) -> list[np.ndarray]:
    """All arrays of a batch: slots, starts, first, pages, positions, segment_of_row and journal, if there is one."""
    arrays = [batch.slots, batch.starts, batch.first, batch.pages, batch.positions, batch.segment_of_row]
    return arrays if batch.journal is None else [*arrays, batch.journal]


def write_batch(batch: Batch, places: Sequence[np.ndarray]) -> None:
    """Copy `arrays_of(batch)` to places of their shapes; page 0 fills what is left of a wider page table."""
    for place, array in zip(places, arrays_of(batch), strict=True):
        if place.shape == array.shape:
            place[...] = array
        else:
            width = array.shape[1]
            place[:, :width], place[:, width:] = array, 0
