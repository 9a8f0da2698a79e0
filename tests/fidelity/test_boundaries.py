"""Parts of the network compared one by one."""

import numpy as np
import pytest

from isobit.fidelity.boundaries import part_name, parts


def test_a_part_is_held_to_what_it_adds():
    start = np.full((4, 2, 3), 100.0, np.float32)
    end = start + 1
    off = end.copy()
    off[2] += 0.5
    embedding, mixer = parts([start, off], [start, end])
    assert (embedding.error, embedding.worst) == (0.0, 0.0)
    assert mixer.worst == pytest.approx(0.5)
    assert mixer.position == 2
    assert mixer.error == pytest.approx(0.25)


def test_each_part_starts_from_what_isobit_had():
    """An error of an earlier part does not count again."""
    start = np.zeros((3, 2, 2), np.float32)
    mine = [start, start + 2, start + 3]
    reference = [start, start + 1, start + 3]
    assert [part.error for part in parts(mine, reference)] == [0.0, 1.0, 0.0]


def test_names():
    assert [part_name(i) for i in range(4)] == [
        "the embedding",
        "the mixer of layer 0",
        "the experts of layer 0",
        "the mixer of layer 1",
    ]
