"""Tapes: what is noted, and memory that goes from one array to the next without being shared by two that live."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest

from isobit.ops import buffers, tape
from isobit.ops.tape import Arena, do, recorded


def add(x, y, out):
    np.add(x, y, out=out)


def twice(x, out):
    do(add, x, x, out)


def test_calls_are_noted_once_and_can_be_made_again():
    x, out = np.ones(3), np.zeros(3)
    with recorded(Arena()) as recorder:
        do(twice, x, out)
        do(add, x, out, out)
    assert [function for function, _ in recorder.calls] == [twice, add]
    x[:] = 5
    for function, arguments in recorder.calls:
        function(*arguments)
    assert out.tolist() == [15, 15, 15]


def test_a_call_that_fails_is_not_noted():
    with recorded(Arena()) as recorder:
        with pytest.raises(ValueError, match="broadcast"):
            do(add, np.ones(3), np.ones(2), np.zeros(3))
        do(add, np.ones(3), np.ones(3), np.zeros(3))
    assert len(recorder.calls) == 1


def test_another_thread_is_not_recorded():
    seen = []

    def other():
        do(add, np.ones(1), np.ones(1), np.zeros(1))
        seen.append(buffers.empty((2, 2)).base)
        with recorded(Arena()) as recorder:
            seen.append(recorder)

    with recorded(Arena()) as recorder:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert recorder.calls == []
    assert seen == [None, None]


def test_of_two_threads_at_a_time_one_records_all_of_its_calls(monkeypatch):
    together, noted = threading.Barrier(2, timeout=5), []

    class SlowRecorder(tape.Recorder):
        def __init__(self, arena):
            super().__init__(arena)
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.5)

    def record():
        with recorded(Arena()) as recorder:
            for _ in range(100):
                do(add, np.ones(1), np.ones(1), np.zeros(1))
                time.sleep(0)
            noted.append(None if recorder is None else len(recorder.calls))

    monkeypatch.setattr(tape, "Recorder", SlowRecorder)
    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(noted, key=str) == [100, None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_can_record_whatever_its_parent_was_about():
    with recorded(Arena()):
        child = os.fork()
        if child == 0:
            with recorded(Arena()) as recorder:
                do(add, np.ones(1), np.ones(1), np.zeros(1))
            os._exit(0 if recorder is not None and len(recorder.calls) == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_is_used_again_once_no_view_of_it_is_left():
    arena = Arena()
    first = arena.empty((4, 16), np.float32)
    view = first.reshape(-1)[3:].view(np.int32)
    del first
    second = arena.empty((4, 16), np.float32)
    assert not np.shares_memory(view, second)
    del view
    third = arena.empty((16, 4), np.float32)
    assert not np.shares_memory(second, third)
    assert len(arena.blocks) == 2
    assert third.ctypes.data % 64 == 0


def test_an_alias_shows_the_elements_and_holds_nothing():
    arena = Arena()
    array = arena.empty((4, 6), np.float32)
    array[...] = np.arange(24).reshape(4, 6)
    alias = arena.alias(array[1:, ::2])
    assert alias.tolist() == array[1:, ::2].tolist()
    assert np.shares_memory(alias, array)
    del array
    assert np.shares_memory(alias, arena.empty((4, 6), np.float32))
    own = np.zeros(3)
    assert arena.alias(own) is own


def test_arrays_of_a_recording_come_from_its_arena():
    arena = Arena()
    with recorded(arena):
        for _ in range(10):
            buffers.empty((100,))
            buffers.scratch((100,))
        held = buffers.empty((100,)), buffers.scratch((100,))
    assert len(arena.blocks) == 2
    assert not np.shares_memory(*held)
    assert buffers.empty((100,)).base is None
