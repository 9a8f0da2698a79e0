"""Which differing choices are near ties, and which are none at all."""

import numpy as np
import pytest

from isobit.fidelity.choices import LayerChoices, Place, all_forced, best, differing, malformed, roots


def recording(*rows: tuple[list[float], list[int]]) -> dict:
    """Of one router that chose, by force, the given ids."""
    layer = LayerChoices()
    for scores, chosen in rows:
        layer.add(np.array(scores), best(np.array(scores), len(chosen)), np.array(chosen, np.int64))
    return {("router", 0): layer}


def test_best_breaks_ties_to_the_lower_id():
    assert best(np.array([0.0, -0.0, 1.0, 0.0]), 2).tolist() == [0, 2]
    assert best(np.array([3.0, 1.0, 3.0]), 1).tolist() == [0]


def test_a_swap_within_the_measured_error_is_a_near_tie():
    mine = recording(([0.5, 0.49], [0]), ([1.0, 2.0], [1]))
    reference = recording(([0.499, 0.501], [0]), ([1.0, 2.0], [1]))
    (root,) = roots(mine, reference)
    assert root.place == Place("router", 0, 0)
    assert (root.taken, root.dropped) == ((0,), (1,))
    assert root.margin == pytest.approx(0.002, abs=1e-6)
    assert root.error == pytest.approx(0.022, abs=1e-6)
    assert root.is_near_tie


def test_a_swap_above_the_measured_error_is_none():
    mine = recording(
        ([0.50, 0.40], [1]),
    )
    reference = recording(
        ([0.501, 0.401], [1]),
    )
    (root,) = roots(mine, reference)
    assert root.margin == pytest.approx(0.1, abs=1e-6)
    assert not root.is_near_tie


def test_the_margin_is_that_of_the_worst_taken_against_the_best_dropped():
    scores = [5.0, 4.0, 3.0, 2.0]
    (root,) = roots(recording((scores, [2, 3])), recording((scores, [2, 3])))
    assert (root.dropped, root.taken, root.margin) == ((0, 1), (2, 3), 3.0)


def test_differing_lists_places_by_position():
    mine = recording(([1, 0], [0]), ([1, 0], [1]), ([1, 0], [1]))
    other = recording(([1, 0], [0]), ([1, 0], [0]), ([1, 0], [0]))
    assert [place.position for place in differing(mine, other)] == [1, 2]
    assert set(all_forced(mine)) == {Place("router", 0, position) for position in range(3)}


@pytest.mark.parametrize("chosen", [[0], [0, 0], [0, 2], [-1, 0], [0, 1, 1]])
def test_malformed(chosen):
    assert malformed(recording(([1.0, 2.0], chosen)), {"router": 2}) == [Place("router", 0, 0)]


def test_fewer_candidates_than_wanted_are_all_chosen():
    assert malformed(recording(([1.0], [0]), ([], [])), {"router": 2}) == []
