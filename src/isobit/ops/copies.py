"""Copies between host and device that run beside the forwards; where both are one memory, they run at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isobit.ops.batch import Array


class Arrival:
    """When copies that were begun are done; these are."""

    def arrived(self) -> bool:
        """Whether they are done."""
        return True

    def precede(self) -> None:
        """Have the device do them before whatever this thread gives it from now on."""

    def wait(self) -> None:
        """Wait until they are done."""


ARRIVED = Arrival()


class Copies:
    """Begins copies, in the order in which they come; uploads and downloads do not wait for each other.

    failures: what `download` and an upload's work may raise for want of memory. pinning: whether `host_block` takes
    long, because the device needs memory that stays in its place.
    """

    failures: tuple[type[Exception], ...] = (MemoryError,)
    pinning = False

    def host_block(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], memory that copies run from and to at the bus's speed; safe from any thread."""
        return np.empty(nbytes, np.uint8)

    def indices(self, rows: Sequence[int]) -> Any:
        """Different row numbers as `take_rows` and `put_rows` take them best, for use where they were made."""
        return rows

    def upload(self, work: Callable[[], None], after: Arrival = ARRIVED, sources: Any = None) -> Arrival:
        """Have `work` write to arrays of the device by ops, beside the forwards and not before `after`.

        It comes after what this thread has given the device so far. sources: kept alive until then, for their memory is
        read late.
        """
        after.wait()
        work()
        return ARRIVED

    def download(self, arrays: Mapping[str, Array], places: Mapping[str, np.ndarray]) -> Arrival:
        """Copy arrays of the device, which nothing writes any more, to host arrays of the same names and shapes.

        The places hold them when they have arrived, and must stay until then.
        """
        for name, array in arrays.items():
            np.copyto(places[name], array)
        return ARRIVED
