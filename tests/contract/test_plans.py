"""The schedules of gate 2 are lawful: every row once and in its stream's order, in calls of the size asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isobit.contract.plans import (
    MOST_BATCH_BYTES,
    Sizes,
    batches,
    fitting,
    in_pieces,
    mixed,
    schedules,
    serial,
    together,
)
from isobit.ops.contract import Case

ROWS = st.lists(st.integers(1, 12), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**32 - 1)


def case_of(rows):
    return Case("", tuple(rows), {})


def assert_lawful(case, schedule):
    done = [0] * len(case.rows)
    for plan in schedule:
        assert plan
        assert len({span.stream for span in plan}) == len(plan)
        for span in plan:
            assert span.count > 0
            assert span.first == done[span.stream]
            done[span.stream] += span.count
    assert tuple(done) == case.rows


@given(ROWS, SEEDS, st.integers(1, 20))
def test_every_row_comes_once_and_in_order(rows, seed, size):
    case, rng = case_of(rows), np.random.default_rng(seed)
    for schedule in (serial(case), together(case), in_pieces(case, size), mixed(case, rng, size)):
        assert_lawful(case, schedule)
    for schedule in schedules(case, rng, Sizes((1, 2, 3, size), 0)):
        assert_lawful(case, schedule)


@given(ROWS, SEEDS, st.integers(1, 20))
def test_calls_have_the_size_asked_for(rows, seed, size):
    case = case_of(rows)
    assert all(plan[0].count <= size for plan in in_pieces(case, size))
    calls = [sum(span.count for span in plan) for plan in mixed(case, np.random.default_rng(seed), size)]
    assert max(calls) <= size


@given(st.integers(1, 30), SEEDS)
def test_batches_have_every_size_and_every_place(rows, seed):
    sizes = Sizes((1, 5, 40), 7)
    calls = [plan for schedule in batches(case_of([1] * rows), np.random.default_rng(seed), sizes) for plan in schedule]
    lengths = [len(plan) for plan in calls]
    assert lengths[0] == rows
    assert {1, 5, 40} <= set(lengths)
    placed = calls[-sizes.places :]
    assert {plan[place].stream for place, plan in enumerate(placed)} == {placed[0][0].stream}
    assert all(span.count == 1 and 0 <= span.stream < rows for plan in calls for span in plan)


def test_batches_are_as_large_as_their_arrays_may_be():
    rows = 16
    x = np.broadcast_to(np.float32(0), (rows, MOST_BATCH_BYTES // 4 // 100))
    case = Case("", (1,) * rows, {"x": x, "bound": np.zeros(1 << 20), "many": 4})
    assert fitting(case, Sizes((2, 99, 100, 101, 8192), 5)) == Sizes((2, 99, 100), 5)
    assert fitting(case_of([1, 1]), Sizes((8192,), 0)) == Sizes((8192,), 0)
    wide = Case("", (1,) * rows, {"x": np.broadcast_to(np.float32(0), (rows, MOST_BATCH_BYTES))})
    assert fitting(wide, Sizes((16, 17), 0)) == Sizes((16,), 0)
