"""Memory of the host that kept states lie in: taken in large blocks, handed out in parts, never more than a limit."""

import logging
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from isobit.engine import memory

BLOCK_BYTES = 256 << 20
SMALLEST_BLOCK = 4096
ALIGNMENT = 64

log = logging.getLogger(__name__)


class Part:
    """A part of the memory; it is free again when no array that lies in it lives any more."""

    def __init__(self, address: int, nbytes: int, returned: "deque[tuple[int, int]]"):
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self._given, self._returned = (address, nbytes), returned

    def __del__(self) -> None:
        self._returned.append(self._given)


class HostMemory:
    """Arrays of bytes out of blocks of at most `limit_bytes` together, which are sought as they are needed.

    allocate(nbytes): a block, uint8 [nbytes]. in_background: whether a thread does that, because it takes long; then a
    part of the memory is sought before it is needed. One thread takes; arrays may die in any.
    """

    def __init__(
        self,
        allocate: Callable[[int], np.ndarray],
        limit_bytes: int,
        in_background: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ):
        self.limit_bytes = limit_bytes
        self.block_bytes = block_bytes
        self._allocate = allocate
        self._blocks: list[np.ndarray] = []
        self._starts: set[int] = set()
        self._free: list[tuple[int, int]] = []  # (address, bytes), by address
        self._returned: deque[tuple[int, int]] = deque()
        self._nbytes = 0
        self._spare = block_bytes
        self._exhausted = False
        self._worker = ThreadPoolExecutor(1, "isobit-host-memory") if in_background else None
        self._coming: Future[list[np.ndarray]] | None = None
        if in_background:
            self._seek()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes of the blocks that nothing lies in."""
        self._reclaim()
        return sum(nbytes for _, nbytes in self._free)

    @property
    def may_grow(self) -> bool:
        """Whether there will be more memory than there is now."""
        return not self._exhausted and self._next_block(self._nbytes) > 0

    def could_hold(self, sizes: Sequence[int]) -> bool:
        """Whether arrays of these sizes may fit when nothing else is there."""
        return sum(map(_rounded, sizes)) <= self.limit_bytes and max(sizes, default=0) <= self.block_bytes

    def take(self, sizes: Sequence[int]) -> list[np.ndarray] | None:
        """Arrays uint8 of these sizes, or None where they do not fit as things are."""
        self._reclaim()
        if self._worker is None:
            taken = self._fit(sizes)
            while taken is None and self.may_grow:
                self._add(self._seek_blocks(self._nbytes, 1))
                taken = self._fit(sizes)
            return taken
        if self._coming is not None and self._coming.done():
            self._add(self._coming.result())
            self._coming = None
        taken = self._fit(sizes)
        self._spare = max(self._spare, 2 * sum(map(_rounded, sizes)))
        self._seek()
        return taken

    def settle(self) -> None:
        """Wait for the memory that is being sought."""
        if self._coming is not None:
            self._coming.result()

    def close(self) -> None:
        """Seek no more memory."""
        if self._worker is not None:
            self._exhausted = True
            self._worker.shutdown(cancel_futures=True)

    def _seek(self) -> None:
        """Have the thread get blocks until there is memory to spare."""
        if self._coming is None and self.may_grow and self.free_nbytes < self._spare:
            assert self._worker is not None
            self._coming = self._worker.submit(self._seek_blocks, self._nbytes, self._spare - self.free_nbytes)

    def _seek_blocks(self, held: int, wanted: int) -> list[np.ndarray]:
        """New blocks of at least `wanted` bytes beside `held` bytes, as far as the limit and the machine allow."""
        blocks: list[np.ndarray] = []
        while wanted > 0 and (size := self._next_block(held)):
            try:
                blocks.append(self._allocate(size))
            except (RuntimeError, MemoryError) as error:
                self._exhausted = True
                log.warning(
                    "host memory for kept states stays at %s: no more can be had (%s)",
                    memory.gib(held),
                    str(error).partition("\n")[0],
                )
                break
            held, wanted = held + size, wanted - size
        return blocks

    def _next_block(self, held: int) -> int:
        """Bytes of the block that follows `held` bytes: a power of two, so that none are lost to rounding; or 0."""
        left = self.limit_bytes - held
        size = min(self.block_bytes, 1 << max(left, 0).bit_length() >> 1)
        return size if size >= SMALLEST_BLOCK else 0

    def _add(self, blocks: list[np.ndarray]) -> None:
        for block in blocks:
            self._blocks.append(block)
            self._starts.add(block.ctypes.data)
            self._nbytes += block.nbytes
            self._give_back(block.ctypes.data, block.nbytes)

    def _fit(self, sizes: Sequence[int]) -> list[np.ndarray] | None:
        parts: list[np.ndarray] = []
        for size in sizes:
            if not size:
                parts.append(np.empty(0, np.uint8))
                continue
            address = self._carve(_rounded(size))
            if address is None:
                parts.clear()
                self._reclaim()
                return None
            parts.append(np.asarray(Part(address, _rounded(size), self._returned))[:size])
        return parts

    def _carve(self, nbytes: int) -> int | None:
        """The address of the first free range of `nbytes`, now taken."""
        for i, (address, free) in enumerate(self._free):
            if free >= nbytes:
                self._free[i : i + 1] = [(address + nbytes, free - nbytes)] if free > nbytes else []
                return address
        return None

    def _reclaim(self) -> None:
        while self._returned:
            self._give_back(*self._returned.popleft())

    def _give_back(self, address: int, nbytes: int) -> None:
        """Free a range, joined with free neighbours of the same block."""
        i = bisect(self._free, (address, 0))
        if i < len(self._free) and self._free[i][0] == address + nbytes and self._free[i][0] not in self._starts:
            nbytes += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == address and address not in self._starts:
            address, before = self._free.pop(i - 1)
            nbytes += before
            i -= 1
        self._free.insert(i, (address, nbytes))


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
