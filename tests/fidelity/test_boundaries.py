"""Parts of the network compared one by one."""

import numpy as np
import pytest

from isobit.fidelity.boundaries import parts


def test_a_part_is_held_to_what_it_adds():
    start = np.full((4, 2, 3), 100.0, np.float32)
    end = start + 1
    off = end.copy()
    off[2] += 0.5
    embedding, mixer = parts(["embedding", "mixer"], [start, off], [start, end])
    assert (embedding.error, embedding.worst) == (0.0, 0.0)
    assert mixer.worst == pytest.approx(0.5)
    assert mixer.position == 2
    assert mixer.error == pytest.approx(0.25)


def test_each_part_starts_from_what_isobit_had():
    """An error of an earlier part does not count again."""
    start = np.zeros((3, 2, 2), np.float32)
    mine = [start, start + 2, start + 3]
    reference = [start, start + 1, start + 3]
    assert [part.error for part in parts(list("abc"), mine, reference)] == [0.0, 1.0, 0.0]


def test_what_is_read_is_held_to_itself():
    streams = np.full((2, 2, 2), 1000.0, np.float32)
    read = np.ones((2, 4), np.float32)
    mine = [streams, read * np.float32(1.25), streams + 1]
    reference = [streams, read, streams + 1]
    assert [part.error for part in parts(list("abc"), mine, reference)] == [0.0, 0.25, 0.0]
