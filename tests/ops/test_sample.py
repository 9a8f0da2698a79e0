"""Sampling: the generator's known answers, the order, each filter, the distribution, settings out of every range."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from isobit.ops.sample import Draw, reference
from isobit.ops.sample.cpu import sample, top_logprobs
from isobit.ops.sample.order import descending_ids
from isobit.ops.sample.philox import philox
from isobit.ops.work import forced_pieces

LOGITS = np.array([1.5, -0.25, 3.0, 0.0, 3.0, -7.0, 2.25, 1.0, -1.0, 0.5, 2.0, -3.0], np.float32)


@njit
def philox_words(a, b, c, d, e, f):
    return philox(a, b, c, d, e, f)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_generator_gives_the_known_answers_of_random123(counter, key, words):
    assert reference.philox(counter, key) == words
    assert tuple(int(word) for word in philox_words(*map(np.uint64, (*counter, *key)))) == words


finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38])


@settings(max_examples=60, deadline=None)
@given(st.lists(finite_floats | few_values, min_size=1, max_size=60), st.data())
def test_order_is_descending_with_ties_to_the_lower_id(values, data):
    values = np.array(values, np.float32)
    count = data.draw(st.integers(1, len(values)))
    assert descending_ids(values, count).tolist() == reference.order(values)[:count].tolist()


def test_greedy_takes_the_largest_value_and_the_lower_id_of_equals():
    assert sample(LOGITS[None], [Draw(temperature=0)]).tokens.tolist() == [2]
    zeros = np.array([[-1.0, -0.0, 0.0, -0.0]], np.float32)
    assert sample(zeros, [Draw(temperature=0)]).tokens.tolist() == [1]


def drawn(count=20_000, seed=11, **filters):
    """How often each id of LOGITS comes in `count` positions."""
    draws = [Draw(seed=seed, position=position, **filters) for position in range(count)]
    return np.bincount(sample(np.tile(LOGITS, (count, 1)), draws).tokens, minlength=len(LOGITS))


def expected_shares(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The filtered softmax, by sorting and masking."""
    weights = np.exp((LOGITS.astype(np.float64) - LOGITS.max()) / temperature)
    ranked = reference.order(LOGITS)
    weights[ranked[top_k or len(ranked) :]] = 0
    sums_before = np.cumsum(weights[ranked]) - weights[ranked]
    weights[ranked[sums_before >= top_p * weights.sum()]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.75},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_filtered_softmax(filters):
    counts, shares = drawn(**filters), expected_shares(**filters)
    assert counts[shares == 0].sum() == 0
    kept = shares > 0
    expected = shares[kept] * counts.sum()
    chi_square, freedom = ((counts[kept] - expected) ** 2 / expected).sum(), kept.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_top_p_keeps_the_shortest_prefix_that_reaches_it():
    even = np.zeros((1, 8), np.float32)
    for top_p, kept in ((0.5, 4), (0.51, 5), (0.125, 1), (0.0, 1)):
        draws = [Draw(top_p=top_p, seed=seed) for seed in range(400)]
        assert set(sample(np.repeat(even, 400, axis=0), draws).tokens) == set(range(kept))


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((9, 50)).astype(np.float32)
    draws = [Draw(seed=int(rng.integers(2**63)), position=int(rng.integers(2**40)), top_p=0.9) for _ in range(9)]
    alone = [sample(logits[row : row + 1], [draws[row]]) for row in range(9)]
    for pieces in (1, 2, 3):
        with forced_pieces(pieces):
            together = sample(logits[::-1].copy(), draws[::-1])
        assert together.tokens[::-1].tolist() == [int(one.tokens[0]) for one in alone]
        assert together.logprob[::-1].tobytes() == np.array([one.logprob[0] for one in alone]).tobytes()
    many = {int(sample(logits[:1], [Draw(seed=seed, position=5)]).tokens[0]) for seed in range(40)}
    assert len(many) > 5


def test_the_seed_counts_by_its_low_64_bits_and_the_position_by_all_of_its():
    tokens = [int(sample(LOGITS[None], [Draw(seed=seed)]).tokens[0]) for seed in (7, 7 + 2**64, 7 - 2**64)]
    assert len(set(tokens)) == 1
    for seed, position in ((3, 2**32), (2**63 + 5, 262_143), (2**64 - 1, 1)):
        for top_p in (1.0, 0.6):
            draw = Draw(seed=seed, position=position, top_p=top_p)
            assert sample(LOGITS[None], [draw]).tokens[0] == reference.token(LOGITS, draw)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_flagged_and_disturbs_no_other_row(bad):
    rows = np.tile(LOGITS, (3, 1))
    rows[1, 7] = bad
    draws = [Draw(seed=4, position=row) for row in range(3)]
    good = sample(np.tile(LOGITS, (3, 1)), draws)
    samples = sample(rows, draws)
    assert samples.finite.tolist() == [True, False, True]
    assert samples.tokens[1] == -1
    assert np.isnan(samples.logprob[1])
    assert samples.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
    ids, logprobs = top_logprobs(rows, 2)
    assert ids.tolist() == [[2, 4], [-1, -1], [2, 4]]
    assert np.isnan(logprobs[1]).all()


@pytest.mark.parametrize(
    ("draw", "possible"),
    [
        (Draw(temperature=-1.0), {2}),
        (Draw(temperature=math.nan), {2}),
        (Draw(temperature=5e-324), {2, 4}),
        (Draw(temperature=math.inf), set(range(12))),
        (Draw(top_k=-3), set(range(12))),
        (Draw(top_k=10**30), set(range(12))),
        (Draw(top_p=-1.0), {2}),
        (Draw(top_p=math.nan), set(range(12))),
        (Draw(min_p=2.0), {2}),
        (Draw(min_p=math.nan), set(range(12))),
    ],
)
def test_settings_out_of_range_still_give_a_token(draw, possible):
    for seed in range(30):
        draw = Draw(draw.temperature, draw.top_k, draw.top_p, draw.min_p, seed, -seed)
        assert sample(LOGITS[None], [draw]).tokens[0] in possible


def test_logprobs_are_those_of_the_unmodified_logits():
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((2, 3000)) * 4).astype(np.float32)
    samples = sample(logits, [Draw(temperature=0.2, top_k=2, seed=1), Draw(seed=2)])
    for row in range(2):
        exact = reference.logprobs(logits[row])
        assert abs(samples.logprob[row] - exact[samples.tokens[row]]) < 1e-12
    ids, logprobs = top_logprobs(logits, 20)
    assert ids.dtype == np.int32
    for row in range(2):
        assert ids[row].tolist() == reference.order(logits[row])[:20].tolist()
        np.testing.assert_allclose(logprobs[row], reference.logprobs(logits[row])[ids[row]], atol=1e-12)
    best = sample(logits, [Draw(temperature=0)] * 2)
    assert best.logprob.tobytes() == logprobs[:, 0].tobytes()


def test_top_logprobs_gives_no_more_ids_than_there_are():
    ids, logprobs = top_logprobs(LOGITS[None], 50)
    assert ids.shape == logprobs.shape == (1, 12)
    assert ids[0].tolist() == reference.order(LOGITS).tolist()
    assert top_logprobs(LOGITS[None], 0)[0].shape == (1, 0)


def test_a_full_vocabulary_in_order():
    rng = np.random.default_rng(2)
    logits = np.round(rng.standard_normal((1, 248_320)) * 3, 2).astype(np.float32)
    for draw in (Draw(seed=9, position=3), Draw(seed=9, position=4, top_p=0.9), Draw(seed=9, position=5, top_k=300)):
        assert sample(logits, [draw]).tokens[0] == reference.token(logits[0], draw)
