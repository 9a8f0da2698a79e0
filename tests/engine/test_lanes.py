"""Many requests at once, with drafts, kept states and priorities: every reply is the one it has alone."""

import dataclasses

import numpy as np
import pytest

from isobit.engine.drafts import Drafter
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import PromptProgress, Request, Sampling, TokenEvent
from tests.engine.listening import Listener, prompt, reply, together, wait_until

ALONE = EngineSettings(context=400, parallel=1, drafts=False, prompt_cache_gib=0, segment_rows=1)
SHARED = EngineSettings(context=400, parallel=4, segment_rows=96, decode_share=24, prompt_cache_gib=0.2)


class OracleProposer:
    """Proposes what the lane's request will really say, each token right with a probability."""

    name = "oracle"
    most = 6

    def __init__(self, replies: dict[tuple[int, ...], tuple[int, ...]], probability: float):
        self.replies = replies
        self.probability = probability
        self.random = np.random.default_rng(4)

    def propose(self, lanes, depths):
        return [self._one(lane.tokens.tolist(), depth) for lane, depth in zip(lanes, depths, strict=True)]

    def _one(self, tokens, depth):
        for start, said in self.replies.items():
            if tuple(tokens[: len(start)]) == start and tokens[len(start) :] == list(said[: len(tokens) - len(start)]):
                following = said[len(tokens) - len(start) :][:depth]
                return [t if self.random.random() < self.probability else (t + 1) % 300 for t in following]
        return []


@pytest.fixture(scope="module")
def requests(test_checkpoint):
    """Requests of many shapes, and the replies that they have alone, row by row."""
    engine = Engine(test_checkpoint, ALONE)
    shapes = [(3, 12), (150, 9), (60, 14), (1, 10), (97, 8), (230, 6)]
    made = [
        Request(
            prompt(engine, length, seed),
            count,
            Sampling(temperature=float(seed % 3 != 0), top_k=40 * (seed % 2), top_p=0.95, seed=seed),
            reuse=False,
        )
        for seed, (length, count) in enumerate(shapes)
    ]
    alone = [reply(engine, request)[0] for request in made]
    engine.close()
    return made, alone


@pytest.fixture(scope="module")
def engine(test_checkpoint):
    engine = Engine(test_checkpoint, SHARED)
    yield engine
    engine.close()


def same(finished, alone):
    return [(f.token_hash, f.logits_hash) for f in finished] == [(a.token_hash, a.logits_hash) for a in alone]


def everything_is_free(engine) -> bool:
    rounds = engine.rounds
    return rounds.state.free_slots == engine.budget.lanes and rounds.cache.free_pages(rounds.state.pages)


def test_company_changes_nothing(engine, requests):
    made, alone = requests
    for order in (made, made[::-1]):
        finished = together(engine, order)
        assert same(finished, alone if order is made else alone[::-1])
    assert everything_is_free(engine)


@pytest.mark.parametrize("probability", [1.0, 0.6, 0.0])
def test_drafts_change_nothing(engine, requests, probability, monkeypatch):
    made, alone = requests
    replies = {request.tokens: end.tokens for request, end in zip(made, alone, strict=True)}
    monkeypatch.setattr(engine.rounds, "drafter", Drafter([OracleProposer(replies, probability)]))
    for counters in engine.rounds.drafter.counters.values():
        assert counters.proposed_tokens == 0
    finished = together(engine, made * 2)
    assert same(finished, alone * 2)
    drafted, accepted = sum(f.drafted for f in finished), sum(f.accepted for f in finished)
    assert drafted > 0
    assert {1.0: accepted == drafted, 0.0: accepted == 0}.get(probability, accepted <= drafted)
    undrafted = together(engine, [dataclasses.replace(request, draft=False) for request in made])
    assert same(undrafted, alone)
    assert all(f.drafted == 0 for f in undrafted)


def test_kept_states_change_nothing_but_the_rows_computed(engine, requests):
    made, alone = requests
    reusing = [dataclasses.replace(request, reuse=True) for request in made]
    first = together(engine, reusing)
    again = together(engine, reusing)
    assert same(first, alone)
    assert same(again, alone)
    assert all(f.rows_reused == len(r.tokens) for f, r in zip(again, reusing, strict=True))
    assert all(f.rows_computed == len(f.tokens) - 1 for f in again)


def test_a_prompt_goes_on_where_it_parts_from_an_earlier_one(engine):
    base = prompt(engine, 200, 76)
    request = Request((*base[:140], *prompt(engine, 60, 77)), 6, Sampling(seed=3), keep_rows=(50, 120))
    reply(engine, Request(base, 2, keep_rows=(50, 120)))
    resumed = reply(engine, request)[0]
    expected = reply(engine, dataclasses.replace(request, reuse=False))[0]
    assert resumed.token_hash == expected.token_hash
    assert resumed.rows_reused == 120
    assert resumed.rows_computed == 80 + 5


def test_equal_prompts_at_once_are_computed_once(engine):
    tokens = prompt(engine, 300, 123)
    before = engine.status().prompt_rows
    finished = together(engine, [Request(tokens, 4, Sampling(seed=6))] * 4)
    assert len({f.token_hash for f in finished}) == 1
    assert engine.status().prompt_rows - before == 300
    assert sorted(f.rows_reused for f in finished) == [0, 300, 300, 300]


def test_replies_move_on_while_a_long_prompt_is_computed(engine):
    talker, long = Listener(), Listener()
    ticket = engine.submit(Request(prompt(engine, 5), 300, Sampling(seed=2), reuse=False, draft=False), talker)
    assert wait_until(lambda: sum(isinstance(e, TokenEvent) for e in talker.events) >= 2)
    begun = len(talker.events)
    engine.submit(Request(prompt(engine, 390, 8), 2, reuse=False), long)
    end = long.result()
    assert end.segment_rows == SHARED.decode_share
    assert len(talker.events) - begun >= 390 // SHARED.decode_share
    ticket.cancel()
    assert talker.result().reason == "cancelled"


def test_a_short_prompt_passes_a_long_one(engine):
    order = []
    long, short = Listener(), Listener()
    request = Request(prompt(engine, 395, 9), 1, segment_rows=8, reuse=False)
    engine.submit(request, lambda event: (long(event), order.append("long")))
    assert long.started.wait(60)
    engine.submit(Request(prompt(engine, 8, 9), 1, reuse=False), lambda event: (short(event), order.append("short")))
    assert short.result().reason == "length"
    assert long.result().reason == "length"
    assert order[-1] == "long"


def test_a_background_request_yields_and_goes_on_unchanged(test_checkpoint, requests):
    made, alone = requests
    engine = Engine(test_checkpoint, dataclasses.replace(SHARED, parallel=1, segment_rows=16))
    try:
        expected = reply(engine, Request(prompt(engine, 200, 31), 20, Sampling(seed=1), reuse=False))[0]
        listener = Listener()
        engine.submit(
            Request(prompt(engine, 200, 31), 20, Sampling(seed=1), priority="background", reuse=False), listener
        )
        assert listener.started.wait(60)
        urgent = reply(engine, made[2])[0]
        assert same([urgent], [alone[2]])
        assert not any(hasattr(event, "reason") for event in listener.events)
        end = listener.result()
        assert (end.token_hash, end.logits_hash) == (expected.token_hash, expected.logits_hash)
        assert end.rows_computed == 200 + 19
        progress = [event.done for event in listener.events if isinstance(event, PromptProgress)]
        assert progress == sorted(progress)
        assert everything_is_free(engine)
    finally:
        engine.close()


def test_requests_wait_for_memory_and_never_overrun_it(test_checkpoint, requests):
    made, alone = requests
    engine = Engine(test_checkpoint, dataclasses.replace(SHARED, prompt_cache_gib=0))
    engine.rounds.budget = dataclasses.replace(engine.budget, pages=7)
    engine.rounds.state._free_pages = engine.rounds.state._free_pages[:7]
    try:
        assert same(together(engine, made * 2), alone * 2)
        assert engine.rounds.state.free_pages == 7
    finally:
        engine.close()


def test_a_request_that_takes_every_page_is_served(test_checkpoint):
    engine = Engine(test_checkpoint, EngineSettings(context=90, parallel=1, prompt_cache_gib=0))
    try:
        for length in (80, 89):
            end = reply(engine, Request(prompt(engine, length)))[0]
            assert (end.reason, len(end.tokens)) == ("length", 90 - length)
    finally:
        engine.close()
