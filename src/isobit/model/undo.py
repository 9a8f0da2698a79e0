"""Taking a forward back: the recurrent state of its streams as it was, when it fails in the middle.

A forward overwrites recurrent state layer by layer. Its key-value rows lie beyond the streams' rows, where the next
forward writes them anew; so they need no copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from isobit.errors import IsobitError
from isobit.model.state import StatePool, Stream


class StateLostError(IsobitError):
    """A forward failed when it could not be taken back: the state of its streams is no longer known."""


class Undo:
    """What the streams of one forward have in the recurrent pools, copied before it is written over."""

    def __init__(self, state: StatePool, streams: Sequence[Stream]):
        self._state = state
        self._slots = [stream.slot for stream in streams]
        self._held: set[str] = set()
        self._running = False

    def hold(self, names: Iterable[str]) -> None:
        """Copy the pools of these names; they must be as they were before the forward."""
        for name in names:
            self._state.hold(name, self._slots)
            self._held.add(name)

    def hold_rest(self) -> None:
        """Copy the pools that are not held yet; from now on any of them may be written."""
        self.hold(name for name in self._state.recurrent if name not in self._held)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the forward's steps run: all of them can be taken back if `hold_rest` was called before the first."""
        self._running = True
        yield
        self._running = False

    @contextmanager
    def on_failure(self) -> Iterator[None]:
        """Take back what was done within if it fails. Raises StateLostError in its place where that is impossible."""
        try:
            yield
        except BaseException as error:
            if self._running and len(self._held) < len(self._state.recurrent):
                raise StateLostError(
                    f"a replayed forward failed ({type(error).__name__}: {error}): send the request again"
                ) from error
            for name in self._held:
                self._state.put_back(name, self._slots)
            raise
