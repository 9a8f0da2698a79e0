"""Work in pieces: all of it is done, by threads that an interruption or a fork leaves in order."""

import os
import signal
import threading

import numpy as np
import pytest

from isobit.ops.work import _pool, forced_pieces, run_split

PIECES = 3


def count(counts, first, last):
    counts[first:last] += 1


def split(kernel, *arguments, items=PIECES):
    with forced_pieces(PIECES):
        run_split(kernel, 0, items, *arguments)


@pytest.mark.parametrize("items", [1, 2, 3, 100])
def test_every_item_is_computed_once(items):
    counts = np.zeros(items)
    split(count, counts, items=items)
    assert counts.tolist() == [1] * items


def test_an_interrupted_call_ends_when_none_of_its_pieces_is_at_work():
    begun, finished = threading.Barrier(PIECES), []

    def interrupted(release, first, last):
        begun.wait(20)
        if first == 0:
            threading.Timer(0.2, release.set).start()
            raise KeyboardInterrupt
        release.wait(20)
        finished.append(first)

    with pytest.raises(KeyboardInterrupt):
        split(interrupted, threading.Event())
    assert sorted(finished) == [1, 2]


def test_pieces_that_have_not_begun_never_do_after_an_interruption():
    release, begun = threading.Event(), []

    def interrupted(first, last):
        begun.append(first)
        raise KeyboardInterrupt

    occupied = [_pool(PIECES - 1).submit(release.wait, 20) for _ in range(PIECES - 1)]
    with pytest.raises(KeyboardInterrupt):
        split(interrupted)
    release.set()
    assert all(task.result() for task in occupied)
    split(lambda first, last: None)
    assert begun == [0]


def test_what_a_piece_raises_is_raised():
    def failing(first, last):
        if first == PIECES - 1:
            raise MemoryError("no buffers")

    with pytest.raises(MemoryError, match="no buffers"):
        split(failing)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_works_without_the_threads_of_its_parent():
    counts = np.zeros(PIECES)
    split(count, counts)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        split(count, counts)
        os._exit(0 if counts.tolist() == [2] * PIECES else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
