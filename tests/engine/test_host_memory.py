"""The host memory of kept states: parts that never overlap, a limit that holds, memory that is free again."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine.host_memory import ALIGNMENT, SMALLEST_BLOCK, HostMemory

BLOCK = 4 * SMALLEST_BLOCK


def empty(nbytes):
    return np.empty(nbytes, np.uint8)


def filled(part, value):
    """A view of the part, all of one value."""
    part[...] = value
    return part.view(np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(0, 5 * BLOCK),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, BLOCK + 1), min_size=1, max_size=4), st.integers(0, 3)), max_size=20
    ),
)
def test_parts_are_apart_within_the_limit_and_free_again(limit, steps):
    memory = HostMemory(empty, limit, block_bytes=BLOCK)
    held: list[tuple[np.ndarray, int]] = []
    for number, (sizes, dropped) in enumerate(steps):
        parts = memory.take(sizes)
        if parts is not None:
            assert [part.nbytes for part in parts] == sizes
            held.extend((filled(part, number), number) for part in parts)
        del parts
        del held[:dropped]
        assert all((part == value).all() for part, value in held)
        taken = sum(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part, _ in held)
        assert memory.nbytes - memory.free_nbytes == taken
        assert memory.nbytes <= limit
    held.clear()
    assert memory.free_nbytes == memory.nbytes
    blocks = [BLOCK] * (memory.nbytes // BLOCK)
    assert memory.take(blocks) is not None


def test_what_lies_in_a_view_stays():
    memory = HostMemory(empty, BLOCK, block_bytes=BLOCK)
    (part,) = memory.take([256])
    view = part.view(np.float32).reshape(8, 8)[2:3]
    del part
    assert memory.free_nbytes == BLOCK - 256
    del view
    assert memory.free_nbytes == BLOCK


def test_blocks_are_not_joined_for_one_array():
    memory = HostMemory(empty, 2 * BLOCK, block_bytes=BLOCK)
    assert memory.take([BLOCK, BLOCK]) is not None
    assert memory.take([BLOCK + 1]) is None
    assert memory.nbytes == 2 * BLOCK


def test_memory_comes_before_it_is_needed_and_nobody_waits_for_it():
    gate, asked = threading.Semaphore(0), []

    def slow(nbytes):
        asked.append(nbytes)
        assert gate.acquire(timeout=60)
        return empty(nbytes)

    memory = HostMemory(slow, 3 * BLOCK, in_background=True, block_bytes=BLOCK)
    assert memory.take([100]) is None
    assert memory.may_grow
    gate.release()
    memory.settle()
    parts = memory.take([100])
    assert parts is not None
    gate.release(2)
    memory.settle()
    assert memory.take([BLOCK]) is not None
    memory.settle()
    memory.take([1])
    memory.settle()
    memory.take([1])
    assert (asked, memory.nbytes, memory.may_grow) == ([BLOCK] * 3, 3 * BLOCK, False)
    memory.close()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("cudaErrorMemoryAllocation: out of memory\nmore")])
def test_a_machine_that_has_no_more_sets_the_limit(in_background, error, caplog):
    def one_block(nbytes):
        if memory_given:
            raise error
        memory_given.append(nbytes)
        return empty(nbytes)

    memory_given: list[int] = []
    memory = HostMemory(one_block, 9 * BLOCK, in_background, BLOCK)
    for _ in range(4):
        memory.take([BLOCK, BLOCK])
        memory.settle()
    assert (memory.nbytes, memory.may_grow) == (BLOCK, False)
    assert memory.take([BLOCK]) is not None
    assert len([record for record in caplog.records if "no more can be had" in record.message]) == 1
    assert "\n" not in caplog.records[0].message
    memory.close()
