"""The guard stops drafts that lose time, tries again ever more seldom, and goes by nothing but what it is told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.engine.guard import (
    FIRST_REST,
    JUDGED_ROUNDS,
    LONGEST_REST,
    TRIAL_ROUNDS,
    WINDOW,
    DraftCounters,
    DraftGuard,
    RoundCosts,
)


def rounds_until(guard: DraftGuard, open_: bool, saved: float, spent: float) -> int:
    """Rounds that the lane goes on before the guard is open or closed."""
    for count in range(4 * LONGEST_REST):
        if guard.open is open_:
            return count
        if guard.open:
            guard.observe(saved, spent)
        else:
            guard.rest()
    raise AssertionError("the guard never changes")


def test_drafts_that_lose_stop_after_the_trial_and_come_back_ever_later():
    counters = DraftCounters()
    guard = DraftGuard(counters)
    rests = []
    for _ in range(8):
        assert rounds_until(guard, False, saved=0.1, spent=0.2) == TRIAL_ROUNDS
        rests.append(rounds_until(guard, True, saved=0.1, spent=0.2))
    assert rests == [min(FIRST_REST << i, LONGEST_REST) for i in range(8)]
    assert (counters.stops, counters.probes, counters.resting) == (8, 8, 0)


def test_drafts_that_pay_go_on_and_shorten_the_next_rest():
    guard = DraftGuard()
    for _ in range(3):
        rounds_until(guard, False, 0.0, 1.0)
        rounds_until(guard, True, 0.0, 1.0)
    for _ in range(10 * JUDGED_ROUNDS):
        guard.observe(0.3, 0.2)
        assert guard.open
    stopped_after = rounds_until(guard, False, 0.0, 1.0)
    assert stopped_after < JUDGED_ROUNDS
    assert rounds_until(guard, True, 0.0, 1.0) == FIRST_REST


def test_a_lucky_round_among_losing_ones_does_not_keep_drafts():
    guard = DraftGuard()
    for number in range(10 * JUDGED_ROUNDS):
        if not guard.open:
            break
        guard.observe(1.0 if number % 10 == 9 else 0.0, 0.2)
    assert not guard.open


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=200))
def test_it_is_a_function_of_what_it_is_told(told):
    guards = DraftGuard(), DraftGuard()
    for saved, spent in told:
        for guard in guards:
            if guard.open:
                guard.observe(saved, spent)
            else:
                guard.rest()
        assert guards[0].open == guards[1].open
    assert guards[0].counters == guards[1].counters
    assert guards[0].counters.resting == (not guards[0].open)


def test_an_ended_lane_does_not_count_as_resting():
    counters = DraftCounters()
    guard = DraftGuard(counters)
    rounds_until(guard, False, 0.0, 1.0)
    assert counters.resting == 1
    guard.close()
    guard.close()
    assert counters.resting == 0


@pytest.mark.parametrize("row_seconds", [0.0, 0.02, 0.5])
def test_the_cost_of_a_row_is_found_among_slow_outliers(row_seconds):
    rng = np.random.default_rng(1)
    costs = RoundCosts()
    for number in range(WINDOW):
        lanes = 1 + number % 3
        rows = lanes if number % 4 == 0 else lanes + int(rng.integers(1, 8))
        outlier = 5.0 if rng.random() < 0.1 else 0.0
        costs.observe(rows, lanes, 1.0 + row_seconds * rows + 0.001 * rng.random() + outlier)
    assert costs.row_seconds == pytest.approx(row_seconds, abs=0.01)


def test_plain_rounds_are_asked_for_until_they_are_known_and_when_they_are_old():
    costs = RoundCosts()
    assert costs.row_seconds is None
    while costs.needs_plain_round:
        costs.observe(2, 2, 1.0)
    assert costs.row_seconds is None
    asked = 0
    for _ in range(10 * WINDOW):
        if costs.needs_plain_round:
            asked += 1
            costs.observe(2, 2, 1.0)
        else:
            costs.observe(6, 2, 1.4)
    assert 10 <= asked <= 30
    assert costs.row_seconds == pytest.approx(0.1)
