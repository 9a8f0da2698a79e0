"""What to do when memory runs out in a round: smaller rounds with the same bytes, remembered for a while."""

import time
from collections.abc import Callable

from isobit.settings import BATCHED_ROWS

REMEMBERED_SECONDS = 60.0
OUT_OF_MEMORY = "out_of_memory"  # the code of an error that a smaller load would not have had


def fewer_rows(rows: int) -> int:
    """The next smaller segment to try: half of it, the batched pass at least, then one row."""
    return max(BATCHED_ROWS, rows // 2) if rows > BATCHED_ROWS else 1


class Shortage:
    """What memory was too short for. After REMEMBERED_SECONDS without more of it, larger rounds are tried again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until = 0.0
        self._rows: int | None = None
        self._apart = False

    @property
    def rows(self) -> int | None:
        """The most prompt rows of a forward, or None for no limit."""
        self._forget()
        return self._rows

    @property
    def apart(self) -> bool:
        """Whether each lane gets a forward of its own."""
        self._forget()
        return self._apart

    def limit_rows(self, rows: int) -> None:
        """Memory was there for fewer prompt rows than tried: go on with so many."""
        self._rows = rows
        self._until = self._clock() + REMEMBERED_SECONDS

    def part(self) -> None:
        """Memory was not there for all lanes in one forward."""
        self._apart = True
        self._until = self._clock() + REMEMBERED_SECONDS

    def _forget(self) -> None:
        if self._clock() >= self._until:
            self._rows, self._apart = None, False
