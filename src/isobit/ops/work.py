"""How a kernel's work is divided among threads: by its size alone, and never so that a bit depends on it."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock

from isobit.ops import environment, threads
from isobit.ops.tape import do

SERIAL_WORK = 1 << 17  # element operations that one core finishes before others would have started

_forced_pieces: int | None = None


def run_split(kernel: Callable[..., None], work: int, count: int, *arguments) -> None:
    """Run `kernel(*arguments, first, last)` over all of `count` items, in one part a thread if the work is worth it.

    work: about how many element operations it is. The kernel must release the GIL, and items must not share outputs.
    """
    if not count:
        return
    pieces = min(_forced_pieces or (threads() if work > SERIAL_WORK else 1), count)
    if pieces <= 1:
        do(kernel, *arguments, 0, count)
    else:
        do(_run_pieces, kernel, pieces, count, *arguments)


def _run_pieces(kernel: Callable[..., None], pieces: int, count: int, *arguments) -> None:
    bounds = [piece * count // pieces for piece in range(pieces + 1)]
    shared = _SharedPieces(kernel, arguments, pieces)
    try:
        others = [_pool(pieces - 1).submit(shared.run, i, bounds[i], bounds[i + 1]) for i in range(1, pieces)]
        kernel(*arguments, bounds[0], bounds[1])
        for other in others:
            other.result()
    except BaseException:
        shared.end()
        raise


class _SharedPieces:
    """The pieces of one call, for other threads to run. After Ctrl-C, the arrays may soon be another call's."""

    def __init__(self, kernel: Callable[..., None], arguments: tuple, pieces: int):
        self._kernel, self._arguments = kernel, arguments
        self._at_work = [Lock() for _ in range(pieces)]
        self._over = False

    def run(self, piece: int, first: int, last: int) -> None:
        """Compute a piece, unless the call is over."""
        with self._at_work[piece]:
            if not self._over:
                self._kernel(*self._arguments, first, last)

    def end(self) -> None:
        """Wait for the pieces that are at work; no other will begin."""
        self._over = True
        for lock in self._at_work:
            with lock:
                pass


def pieces_are_forced() -> bool:
    """Whether work is to be cut up whatever its size."""
    return _forced_pieces is not None


@contextmanager
def forced_pieces(pieces: int) -> Iterator[None]:
    """Cut every kernel's work into so many pieces, whatever its size. For the contract only."""
    global _forced_pieces
    previous, _forced_pieces = _forced_pieces, pieces
    try:
        yield
    finally:
        _forced_pieces = previous


@lru_cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="isobit-kernel", initializer=environment.set_default)


if hasattr(os, "register_at_fork"):
    # A fork has the pool, but not its threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
