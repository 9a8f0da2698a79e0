"""Running a whole forward: what it takes from the host is given apart from its steps, which a device can replay."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

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


def with_wide_pages(inputs: PassInputs) -> PassInputs:
    """The inputs with page tables padded to a power of two of pages, so that a few recordings serve all lengths."""
    batches = {name: padded(batch) for name, batch in inputs.batches.items()}
    return replace(inputs, batches=batches)


def padded(batch: Batch) -> Batch:
    """The batch with page 0 appended to each row of the page table, up to a power of two."""
    width = batch.pages.shape[1]
    wanted = 1 << max(width - 1, 0).bit_length()
    if width == wanted:
        return batch
    pages = np.zeros((batch.segments, wanted), np.int32)
    pages[:, :width] = batch.pages
    return replace(batch, pages=pages)


def shapes(inputs: PassInputs) -> Hashable:
    """What a recording depends on, beside the values of its inputs."""
    batches = tuple(
        (name, batch.rows, batch.segments, batch.pages.shape[1], batch.journal is not None, batch.journal_rows)
        for name, batch in inputs.batches.items()
    )
    return batches, tuple((name, tuple(array.shape), str(array.dtype)) for name, array in inputs.arrays.items())
