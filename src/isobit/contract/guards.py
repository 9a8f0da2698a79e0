"""Memory that tells what was done to it: poisoned outputs and lent inputs between guard zones."""

import numpy as np

from isobit.ops import buffers, cases

GUARD = 256  # bytes before and after each guarded array


class GuardedMemory:
    """A context in which ops get their outputs poisoned, and outputs, states and inputs stand between guard zones."""

    def __init__(self, poison: int):
        self.poison = poison
        self._given: list[tuple[np.ndarray, bytes]] = []
        self._memory: list[tuple[np.ndarray, np.ndarray]] = []

    def __enter__(self) -> "GuardedMemory":
        self._allocator = buffers.set_allocator(self._allocate)
        self._lender = cases.set_lender(self._lend)
        return self

    def __exit__(self, *_: object) -> None:
        buffers.set_allocator(self._allocator)
        cases.set_lender(self._lender)

    def _allocate(self, shape, dtype=np.float32) -> np.ndarray:
        shape = tuple(int(n) for n in np.atleast_1d(shape))
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(size + 2 * GUARD, self.poison, np.uint8)
        array = raw[GUARD : GUARD + size].view(dtype).reshape(shape)
        self._memory.append((raw, array))
        return array

    def _lend(self, array: np.ndarray) -> np.ndarray:
        lent = self._allocate(array.shape, array.dtype)
        lent[...] = array
        self._given.append((lent, lent.tobytes()))
        return lent

    def problem(self) -> str | None:
        """What was written that should not have been, in one line, or None."""
        for raw, array in self._memory:
            for zone, where in ((raw[:GUARD], "before"), (raw[GUARD + array.nbytes :], "past the end of")):
                if (zone != self.poison).any():
                    return f"wrote {where} an array of {array.dtype}{list(array.shape)}"
        for lent, before in self._given:
            if lent.tobytes() != before:
                return f"changed an input of {lent.dtype}{list(lent.shape)}"
        return None
