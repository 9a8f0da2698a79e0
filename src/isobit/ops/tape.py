"""Tapes: what the ops of a small forward call, in order, to be called again without the ops around it.

Ops reach their kernels through `do`, and get their arrays from `buffers`. While a tape is recorded, `do` notes each
call, and arrays come from an arena, whose memory goes from one array to the next as it does without a tape. A call that
is noted may depend on nothing but its arguments, and an op's Python code on nothing but the shapes of its inputs.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import numpy as np

SMALLEST_BLOCK = 256
CACHE_LINE = 64

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_recorder: "Recorder | None" = None
_one_recorder = Lock()


def do(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function that leaves its results in arrays, and note the call where a tape is recorded."""
    recorder = recording()
    if recorder is None:
        function(*arguments)
    else:
        recorder.call(function, arguments)


def recording() -> "Recorder | None":
    """What records the calls of this thread, if anything does."""
    recorder = _recorder
    return recorder if recorder is not None and recorder.thread == get_ident() else None


class Arena:
    """Memory for the arrays of tapes that are never replayed at the same time."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}
        self._free: dict[int, list[bytearray]] = {}
        self._owners: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._blocks.values()))

    @property
    def blocks(self) -> tuple[bytearray, ...]:
        return tuple(self._blocks.values())

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """An uninitialised array; its memory is free again when nothing in Python refers to it or a view of it."""
        size = max(SMALLEST_BLOCK, _power_of_two(int(np.prod(shape)) * np.dtype(dtype).itemsize))
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new_block(size)
        # A view of a view holds the first of them, whose own base is no array: that one.
        owner = np.ndarray(shape, dtype, buffer=block, offset=_aligned_start(block))
        self._owners[id(block)] = weakref.ref(owner, lambda _: free.append(block))
        return owner

    def alias(self, array: np.ndarray) -> np.ndarray:
        """The same elements, without keeping the memory from the next array; another array as it is."""
        owner = array.base if isinstance(array.base, np.ndarray) else array
        block = owner.base
        if not isinstance(block, bytearray) or id(block) not in self._blocks:
            return array
        offset = _aligned_start(block) + _address(array) - _address(owner)
        return np.ndarray(array.shape, array.dtype, buffer=block, offset=offset, strides=array.strides)

    def _new_block(self, size: int) -> bytearray:
        block = bytearray(size + CACHE_LINE)
        self._blocks[id(block)] = block
        return block


class Recorder:
    """Writes down the calls of one thread."""

    def __init__(self, arena: Arena):
        self.arena, self.thread = arena, get_ident()
        self.calls: list[Call] = []
        self._inside = False

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Make a call and note it, but not what it calls in turn."""
        if self._inside:
            function(*arguments)
            return
        self._inside = True
        try:
            function(*arguments)
        finally:
            self._inside = False
        aliases = (self.arena.alias(x) if isinstance(x, np.ndarray) else x for x in arguments)
        self.calls.append((function, tuple(aliases)))


@contextmanager
def recorded(arena: Arena) -> Iterator[Recorder | None]:
    """Record the calls of this thread, or nothing while another thread's are recorded."""
    global _recorder
    lock = _one_recorder
    if not lock.acquire(blocking=False):
        yield None
        return
    try:
        _recorder = recorder = Recorder(arena)
        yield recorder
    finally:
        _recorder = None
        lock.release()


def _forget_recorder() -> None:
    """A fork has no thread that will end what its parent's recorded."""
    global _recorder, _one_recorder
    _recorder, _one_recorder = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_recorder)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _aligned_start(block: bytearray) -> int:
    """Where the first cache line of a block begins."""
    return -_address(np.frombuffer(block, np.uint8)) % CACHE_LINE


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
