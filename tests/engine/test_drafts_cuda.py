"""Drafts on a GPU: MTP chains and copies change no token, greedy or sampled, alone or beside another lane."""

from dataclasses import replace

import pytest

from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Request, Sampling
from tests.engine.listening import prompt, reply, together

LENGTH = 80
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=2.0, seed=3))


@pytest.fixture
def engine(real_gpu, make_checkpoint):
    """Of a checkpoint whose MTP head foresees most tokens."""
    settings = EngineSettings(context=200, device="cuda", parallel=2, prompt_cache_gib=0.0)
    engine = Engine(make_checkpoint("test", predictable=True), settings)
    # Drafts that take no time go on, whether they are right or not.
    engine.rounds.drafter.clock = lambda: 0.0
    yield engine
    engine.close()


def test_drafted_replies_are_those_drawn_one_by_one(engine):
    requests = [Request(prompt(engine, 5), LENGTH, sampling, draft=False) for sampling in SAMPLINGS]
    expected = [reply(engine, request)[0] for request in requests]
    assert expected[0].tokens != expected[1].tokens
    drafted = [replace(request, draft=True) for request in requests]
    alone, beside = [reply(engine, request)[0] for request in drafted], together(engine, drafted)
    for found in (alone, beside):
        assert [(end.tokens, end.logits_hash) for end in found] == [(end.tokens, end.logits_hash) for end in expected]
        assert all(end.accepted > 0 for end in found)
        assert any(end.accepted < end.drafted for end in found)
    assert all(end.drafted == 0 for end in expected)
