"""The guard stops drafts that lose time, tries again ever more seldom, and goes by nothing but what it is told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.engine.guard import (
    FIRST_PLAIN,
    FIRST_REST,
    FIRST_ROUNDS,
    JUDGED_ROUNDS,
    LATER_TRIAL_LOSS,
    LONGEST_FIRST_REST,
    LONGEST_REST,
    PLAIN_EVERY,
    TELLING_ROUNDS,
    TRIAL_LOSS,
    TRIAL_ROUNDS,
    DraftCounters,
    DraftGuard,
    RoundCosts,
)


def rounds_until(guard: DraftGuard, open_: bool, accepted: int, lost: float) -> int:
    """Rounds that the lane goes on before the guard is open or closed."""
    for count in range(4 * LONGEST_REST):
        if guard.open is open_:
            return count
        if guard.open:
            guard.observe(accepted, lost)
        else:
            guard.rest()
    raise AssertionError("the guard never changes")


def test_drafts_that_lose_stop_soon_and_come_back_ever_later():
    counters = DraftCounters()
    guard = DraftGuard(counters)
    rests = []
    for _ in range(8):
        assert rounds_until(guard, False, accepted=0, lost=1.5) * 1.5 <= TRIAL_LOSS + 1.5
        rests.append(rounds_until(guard, True, accepted=0, lost=1.5))
    assert rests == [min(FIRST_REST << i, LONGEST_REST) for i in range(8)]
    assert (counters.stops, counters.probes, counters.resting) == (8, 8, 0)


def test_a_trial_after_one_that_failed_may_cost_less():
    guard = DraftGuard()
    for allowed in (TRIAL_LOSS, LATER_TRIAL_LOSS, LATER_TRIAL_LOSS):
        assert rounds_until(guard, False, accepted=0, lost=0.3) == int(allowed / 0.3) + 1
        rounds_until(guard, True, accepted=0, lost=0.3)


def test_drafts_that_lose_little_stop_after_the_trial():
    assert rounds_until(DraftGuard(), False, accepted=1, lost=1.1) == TRIAL_ROUNDS


def test_drafts_that_pay_go_on_and_shorten_the_next_rest():
    guard = DraftGuard()
    for _ in range(3):
        rounds_until(guard, False, 0, 1.0)
        rounds_until(guard, True, 0, 1.0)
    for _ in range(10 * JUDGED_ROUNDS):
        guard.observe(2, 1.5)
        assert guard.open
    assert rounds_until(guard, False, 0, 1.0) < JUDGED_ROUNDS
    assert rounds_until(guard, True, 0, 1.0) == FIRST_REST


def test_a_lucky_round_among_losing_ones_does_not_keep_drafts():
    guard = DraftGuard()
    for number in range(10 * JUDGED_ROUNDS):
        if not guard.open:
            break
        guard.observe(3 if number % 10 == 0 else 0, 0.5)
    assert not guard.open


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 4)), max_size=200))
def test_it_is_a_function_of_what_it_is_told(told):
    guards = DraftGuard(), DraftGuard()
    for accepted, lost in told:
        for guard in guards:
            if guard.open:
                guard.observe(accepted, lost)
            else:
                guard.rest()
        assert guards[0].open == guards[1].open
    assert guards[0].counters == guards[1].counters
    assert guards[0].counters.resting == (not guards[0].open)


def test_an_ended_lane_does_not_count_as_resting():
    counters = DraftCounters()
    guard = DraftGuard(counters)
    rounds_until(guard, False, 0, 1.0)
    assert counters.resting == 1
    guard.close()
    guard.close()
    assert counters.resting == 0


def test_a_lane_goes_on_with_the_rest_of_the_one_before():
    first, counters = DraftGuard(), DraftCounters()
    rounds_until(first, False, 0, 1.0)
    for _ in range(FIRST_REST - 5):
        first.rest()
    second = DraftGuard(counters, first.rests)
    assert not second.open
    assert counters.resting == 1
    assert rounds_until(second, True, 0, 1.0) == 5
    rounds_until(second, False, 0, 1.0)
    assert rounds_until(second, True, 0, 1.0) == 2 * FIRST_REST
    assert counters.resting == 0


def test_a_lane_rests_only_so_long_at_first():
    first = DraftGuard()
    for _ in range(6):
        rounds_until(first, False, 0, 1.0)
        rounds_until(first, True, 0, 1.0)
    rounds_until(first, False, 0, 1.0)
    assert rounds_until(DraftGuard(None, first.rests), True, 0, 1.0) == LONGEST_FIRST_REST


def test_drafts_that_pay_are_begun_with_at_once():
    first = DraftGuard()
    for _ in range(JUDGED_ROUNDS):
        first.observe(2, 1.0)
    assert DraftGuard(None, first.rests).open


def test_what_drafts_cost_is_told_in_tokens_and_not_moved_by_slow_outliers():
    rng = np.random.default_rng(1)
    costs = RoundCosts()
    for number in range(60):
        outlier = 5.0 if number % 5 == 0 else 0.0
        costs.observe(2, 2, 1.0 + 0.001 * rng.random() + outlier)
        costs.observe(2, 8, 1.5 + 0.001 * rng.random() + outlier)
        costs.observe(1, 1, 0.7)
    assert costs.lost_tokens(2, 8) == pytest.approx(2 * 0.5, abs=0.01)
    assert costs.lost_tokens(2, 7) is None
    assert costs.lost_tokens(1, 8) is None
    assert costs.lost_tokens(1, 1) == 0


def test_the_first_rounds_of_a_kind_tell_nothing():
    costs = RoundCosts()
    for _ in range(FIRST_ROUNDS):
        costs.observe(1, 1, 9.0)
        costs.observe(1, 2, 9.0)
    costs.observe(1, 1, 1.0)
    for _ in range(TELLING_ROUNDS):
        assert costs.lost_tokens(1, 2) is None
        costs.observe(1, 2, 1.5)
    assert costs.lost_tokens(1, 2) == 0.5


def test_plain_rounds_are_asked_for_until_they_are_known_and_when_they_are_old():
    costs = RoundCosts()
    for _ in range(FIRST_ROUNDS + FIRST_PLAIN):
        assert costs.needs_plain_round(2)
        costs.observe(2, 2, 1.0)
    asked = 0
    for _ in range(10 * (PLAIN_EVERY + 1)):
        asked += costs.needs_plain_round(2)
        costs.observe(2, 2 if costs.needs_plain_round(2) else 6, 1.0)
    assert asked == 10
    assert costs.needs_plain_round(3)
