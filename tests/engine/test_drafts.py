"""Drafts never change a reply; copies are the longest matches; depth and order follow acceptance."""

import time
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine.drafts import (
    FIRST_ACCEPTANCE,
    LONGEST_MATCH,
    PLACES_LOOKED_AT,
    CopyProposer,
    Draft,
    Drafter,
    MatchIndex,
    MtpProposer,
    Outcome,
    RunningDepth,
    accepted_tokens,
)
from isobit.engine.guard import FIRST_PLAIN, FIRST_ROUNDS
from isobit.engine.request import Sampling
from isobit.model.drafting import propose_mtp
from isobit.model.plan import Plan, Segment
from tests.engine.drafting import OracleProposer, Wanted, drafted_replies, serial_reply

LENGTH = 14


class Ticks:
    """A clock that counts how often it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(scope="module")
def requests(model):
    """A prompt that repeats itself, one that does not; greedy and sampled, across a page's edge and the budget."""
    rng = np.random.default_rng(4)
    phrase = rng.integers(0, model.config.vocab_size, 19).tolist()
    prompts = [phrase * 3 + phrase[:3], rng.integers(0, model.config.vocab_size, 58).tolist(), phrase[:2]]
    samplings = [Sampling(temperature=0.0), Sampling(seed=9), Sampling(temperature=0.4, top_k=20, seed=1 << 50)]
    return [Wanted(tuple(prompt), LENGTH, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]


@pytest.fixture(scope="module")
def serial(model, requests):
    return [serial_reply(model, wanted) for wanted in requests]


@pytest.mark.parametrize("sources", ["none", "mtp", "copies", "copies, mtp", "right", "mostly right", "wrong"])
def test_every_kind_of_draft_gives_the_serial_replies_and_states(model, requests, serial, sources):
    state = model.new_state(slots=len(requests), pages=12)
    truth = {wanted.prompt: reply.tokens for wanted, reply in zip(requests, serial, strict=True)}
    chance = {"right": 1.0, "mostly right": 0.7, "wrong": 0.0}
    if sources in chance:
        proposers = [OracleProposer(truth, chance[sources], np.random.default_rng(3))]
    else:
        every = {"copies": CopyProposer(shortest=2), "mtp": MtpProposer(model, state, most=3)}
        proposers = [every[name] for name in sources.split(", ") if name in every]
    drafter = Drafter(proposers, Ticks())
    assert drafted_replies(model, state, drafter, requests) == serial
    assert (state.free_slots, state.free_pages) == (len(requests), 12)
    counters = drafter.counters.values()
    assert all(c.proposed_tokens > 0 or c is drafter.counters.get("copies") for c in counters)
    if sources == "right":
        assert all(c.accepted_tokens == c.proposed_tokens > LENGTH for c in counters)
    if sources == "wrong":
        assert all(c.accepted_tokens == 0 for c in counters)


def test_lanes_draft_as_they_do_alone(model, requests):
    """MTP chains of several lanes at once, of unlike depth, are those of each lane by itself."""
    state = model.new_state(slots=3, pages=12)
    streams = [state.open() for _ in requests]
    for stream, wanted in zip(streams, requests, strict=True):
        model.forward(state, Plan((Segment(stream, wanted.prompt),)))
    following, depths = [5, 6, 7], [3, 1, 2]
    together = propose_mtp(model, state, streams, following, depths)
    assert [len(chain) for chain in together] == depths
    alone = [
        propose_mtp(model, state, [stream], [token], depth)[0]
        for stream, token, depth in zip(streams, following, depths, strict=True)
    ]
    assert together == alone
    assert propose_mtp(model, state, streams, following, 1) == [chain[:1] for chain in together]


def test_chains_stop_where_nothing_can_be_verified(model):
    state = model.new_state(slots=2, pages=8)
    full, empty = state.open(), state.open()
    rows = model.context - 3
    model.forward(state, Plan((Segment(full, (1,) * rows, "none"),)))
    chains = propose_mtp(model, state, [full, empty], [2, 3], 5)
    assert (len(chains[0]), chains[1]) == (2, [])
    tight = model.new_state(slots=2, pages=2)
    first, second = tight.open(), tight.open()
    for stream in (first, second):
        model.forward(tight, Plan((Segment(stream, (1,) * 63, "none"),)))
    assert [len(chain) for chain in propose_mtp(model, tight, [first, second], [2, 3], 2)] == [2, 2]
    assert propose_mtp(model, tight, [first, second], [2, 3], 3) == [[], []]


def naive_continuation(tokens: list[int], count: int, shortest: int) -> list[int]:
    """The definition: every length from the longest, every earlier place from the latest."""
    for length in range(LONGEST_MATCH, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                extended = list(tokens)
                for i in range(count):
                    extended.append(extended[end + i])
                return extended[len(tokens) :]
    return []


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=PLACES_LOOKED_AT),
    cut=st.integers(0, PLACES_LOOKED_AT),
    count=st.integers(1, 12),
    shortest=st.integers(2, 6),
)
def test_a_copy_is_the_continuation_of_the_longest_earlier_match(tokens, cut, count, shortest):
    index = MatchIndex(tokens[:cut])
    index.continuation(1)
    for token in tokens[cut:]:
        index.extend([token])
    assert index.continuation(count, shortest) == naive_continuation(tokens, count, shortest)


def test_a_long_prompt_is_searched_in_constant_time():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 500, 100_000).tolist()
    index = MatchIndex([*text, *text[700:720]])
    found = [index.continuation(3) for _ in range(30)]
    assert found[-1] == text[720:723]
    start = time.perf_counter()
    for token in text[720:1720]:
        index.extend([token])
        index.continuation(3)
    assert time.perf_counter() - start < 2.0
    assert isinstance(index.tokens, array)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=60))
def test_depth_stays_within_its_bounds(drafts):
    running = RunningDepth()
    for proposed, accepted in drafts:
        running.observe(proposed, min(accepted, proposed))
        assert 0 < running.acceptance < 1
        assert all(1 <= running.depth(most) <= most for most in (1, 3, 9))


def test_depth_follows_the_acceptance():
    good, bad = RunningDepth(), RunningDepth()
    assert good.acceptance == FIRST_ACCEPTANCE
    for _ in range(20):
        good.observe(4, 4)
        bad.observe(4, 0)
    assert good.depth(12) > RunningDepth().depth(12) >= bad.depth(12) == 1
    assert good.depth(2) == 2


@pytest.mark.parametrize(
    ("draft", "drawn", "accepted"),
    [((), [5], 0), ((1, 2), [1, 2, 3], 2), ((1, 2), [1, 9, 3], 1), ((1, 2), [9, 2, 3], 0)],
)
def test_a_draft_is_accepted_as_far_as_it_is_drawn(draft, drawn, accepted):
    assert accepted_tokens(draft, drawn) == accepted


class Fixed:
    """Proposes what it is told for each lane."""

    def __init__(self, name, proposals, most=4):
        self.name, self.proposals, self.most = name, proposals, most
        self.asked = []

    def propose(self, lanes, depths):
        self.asked.append([(id(lane), depth) for lane, depth in zip(lanes, depths, strict=True)])
        return [self.proposals.get(id(lane), []) for lane in lanes]


def lanes_of(drafter, count):
    return [drafter.open(None, [1, 2, 3], Sampling()) for _ in range(count)]


def plain_rounds(drafter, lanes):
    for _ in range(FIRST_ROUNDS + FIRST_PLAIN):
        assert drafter.propose(lanes, [9] * len(lanes)) == [Draft()] * len(lanes)
        drafter.learn([Outcome(lane, Draft(), 0) for lane in lanes], 1.0 + 0.3 * len(lanes))


def test_the_first_proposer_with_a_draft_is_taken():
    first, second = Fixed("first", {}), Fixed("second", {})
    drafter = Drafter([first, second], Ticks())
    lanes = lanes_of(drafter, 3)
    plain_rounds(drafter, lanes)
    first.proposals = {id(lanes[1]): [7]}
    second.proposals = {id(lanes[0]): [8], id(lanes[1]): [9]}
    drafts = drafter.propose(lanes, [2, 2, 0])
    assert drafts == [Draft((8,), "second"), Draft((7,), "first"), Draft()]
    assert first.asked == [[(id(lanes[0]), 2), (id(lanes[1]), 2)]]
    assert second.asked == [[(id(lanes[0]), 2)]]


def test_a_round_drafts_no_more_than_there_is_memory_for():
    source = Fixed("source", {}, most=12)
    drafter = Drafter([source], Ticks(), most_tokens=7)
    lanes = lanes_of(drafter, 3)
    plain_rounds(drafter, lanes)
    for lane in lanes:
        lane.depths["source"].acceptance = 0.999
    drafter.propose(lanes, [9, 1, 9])
    assert [depth for _, depth in source.asked[-1]] == [2, 1, 2]
    plain_rounds(drafter, lanes[:1])
    drafter.propose(lanes[:1], [9])
    assert [depth for _, depth in source.asked[-1]] == [7]
    assert drafter.propose([], []) == []


def test_drafts_that_lose_time_stop_and_others_go_on():
    """Wrong drafts of one lane stop after a few rounds; the other lane's right ones do not."""
    source = Fixed("source", {})
    drafter = Drafter([source], Ticks())
    good, bad = lanes_of(drafter, 2)
    plain_rounds(drafter, [good, bad])
    source.proposals = {id(good): [4, 5], id(bad): [4, 5]}
    drafted = {id(good): 0, id(bad): 0}
    for _ in range(60):
        drafts = drafter.propose([good, bad], [2, 2])
        outcomes = [
            Outcome(lane, draft, len(draft.tokens) if lane is good else 0)
            for lane, draft in zip([good, bad], drafts, strict=True)
        ]
        for outcome in outcomes:
            drafted[id(outcome.lane)] += bool(outcome.draft.tokens)
        drafter.learn(outcomes, 1.0 + 0.3 * sum(1 + len(draft.tokens) for draft in drafts))
    assert drafted[id(good)] > 50
    assert drafted[id(bad)] < 10
    counters = drafter.counters["source"]
    assert (counters.stops, counters.resting) == (1, 1)
    assert counters.accepted_tokens == 2 * drafted[id(good)]
    drafter.close(bad)
    assert counters.resting == 0


def test_rounds_with_prompt_rows_judge_nothing():
    source = Fixed("source", {})
    drafter = Drafter([source], Ticks())
    (lane,) = lanes_of(drafter, 1)
    plain_rounds(drafter, [lane])
    for _ in range(20):
        drafter.learn([Outcome(lane, Draft((1, 2), "source"), 0)], None)
    assert drafter.costs.typical(1, 3) is None
    assert lane.guards["source"].open
    assert lane.depths["source"].depth(4) == 1
