"""Replies that go on from a state of any tier are those that are computed whole, and nobody waits for the copies."""

import dataclasses

import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.placement import MOST_HOST_CACHE, Placement
from isobit.engine.request import Request, Sampling, TokenEvent
from isobit.model.load import load_model
from isobit.ops import load_ops
from tests.engine.delayed_copies import delay_copies
from tests.engine.listening import Listener, prompt, reply

SETTINGS = EngineSettings(
    context=200, parallel=2, segment_rows=48, drafts=False, prompt_cache_gib=0.05, host_cache_gib=0.05
)


def loaded(folder, device: str = "cpu"):
    return load_model(Checkpoint(folder), load_ops(device), context=SETTINGS.context)


def compare_tiers(folder, spill, model, tiers, rows: int, more: int, reply_tokens: int) -> None:
    """Serve a prompt, then a longer one that begins like it, whose state is in another tier by then."""
    settings = dataclasses.replace(SETTINGS, device=model.ops.family)
    engine = Engine(folder, settings, model=model)
    first = Request(prompt(engine, rows), 1)
    longer = Request((*first.tokens, *prompt(engine, more, 6)), reply_tokens, Sampling(temperature=1.0, seed=3))
    expected, _ = reply(engine, longer)
    engine.close()
    for tier in tiers:
        settings = dataclasses.replace(settings, spill_dir=str(spill / tier))
        engine = Engine(folder, settings, model=model)
        cache = engine.rounds.cache
        cache.host.memory.settle()
        reply(engine, first)
        if tier in ("host", "disk"):
            cache.evict_all()
        if tier == "disk":
            cache.host.evict_while(lambda: True)
        if tier == "restart":
            engine.close()
            engine = Engine(folder, settings, model=model)
        resumed, _ = reply(engine, longer)
        assert (resumed.token_hash, resumed.logits_hash) == (expected.token_hash, expected.logits_hash)
        assert (expected.rows_reused, resumed.rows_reused) == (0, rows)
        assert resumed.rows_computed == expected.rows_computed - rows
        metrics = engine.status().cache
        assert (metrics.host_hits, metrics.restored) == (tier == "host", tier in ("disk", "restart"))
        engine.close()


@pytest.mark.parametrize("delayed", [False, True])
def test_a_reply_is_the_same_after_each_tier(test_checkpoint, tmp_path, delayed):
    model = loaded(test_checkpoint)
    if delayed:
        delay_copies(model)
    tiers = ("device", "host", "disk", "restart")
    compare_tiers(test_checkpoint, tmp_path, model, tiers, rows=70, more=9, reply_tokens=6)


@pytest.mark.usefixtures("emulated_cuda")
def test_a_reply_of_the_cuda_device_is_the_same_after_each_tier(test_checkpoint, tmp_path):
    model = loaded(test_checkpoint, "cuda")
    compare_tiers(test_checkpoint, tmp_path, model, ("host", "disk"), rows=3, more=1, reply_tokens=2)


@pytest.mark.usefixtures("real_gpu")
def test_a_reply_of_a_gpu_is_the_same_after_each_tier(test_checkpoint, tmp_path):
    model = loaded(test_checkpoint, "cuda")
    tiers = ("device", "host", "disk", "restart")
    compare_tiers(test_checkpoint, tmp_path, model, tiers, rows=70, more=9, reply_tokens=6)


def test_other_lanes_go_on_while_a_state_arrives(test_checkpoint):
    model = loaded(test_checkpoint)
    copies = delay_copies(model)
    engine = Engine(test_checkpoint, dataclasses.replace(SETTINGS, prompt_cache_gib=0.0), model=model)
    resumed = Request((*prompt(engine, 70), 5, 6), 4, Sampling(seed=1), draft=False)
    running = Request(prompt(engine, 20, 9), 40, Sampling(temperature=1.0, seed=2))
    expected = [reply(engine, request)[0] for request in (resumed, running)]
    engine.close()
    engine = Engine(test_checkpoint, SETTINGS, model=model)
    reply(engine, Request(resumed.tokens[:70], 1))
    engine.rounds.cache.evict_all()
    late, course = Listener(), []

    def on_late(event):
        course.append(("late", type(event)))
        late(event)

    def on_running(event):
        course.append(("running", type(event)))
        tokens = sum(who == "running" and kind is TokenEvent for who, kind in course)
        if tokens == 3 and isinstance(event, TokenEvent):
            engine.submit(resumed, on_late)
        if tokens == 12:
            copies.pass_time(99, 99)
        listener(event)

    listener = Listener()
    engine.submit(running, on_running)
    ends = [late.result(), listener.result()]
    assert [end.token_hash for end in ends] == [end.token_hash for end in expected]
    assert ends[0].rows_reused == 70
    began = course.index(("late", TokenEvent))
    assert 12 <= course[:began].count(("running", TokenEvent)) <= 14
    assert course.index(("late", type(ends[0]))) < course.index(("running", type(ends[1])))
    engine.close()


def test_a_lane_that_is_cancelled_while_its_state_arrives_ends(test_checkpoint):
    model = loaded(test_checkpoint)
    delay_copies(model)
    engine = Engine(test_checkpoint, dataclasses.replace(SETTINGS, parallel=1), model=model)
    request = Request((*prompt(engine, 70), 5, 6), 4)
    expected, _ = reply(engine, request)
    for cancelled in (True, False):
        engine.rounds.cache.evict_all()
        listener = Listener()
        ticket = engine.submit(request, listener)
        if cancelled:
            ticket.cancel()
        end = listener.result()
        assert end.reason == "cancelled" if cancelled else end.token_hash == expected.token_hash
    assert engine.rounds.state.free_slots == 1
    engine.close()
    assert engine.rounds.state.free_pages == engine.rounds.state.pages


@pytest.mark.parametrize(("asked", "on_cpu"), [(None, 0), (0.0, 0), (1.5, 3 << 29)])
def test_a_cpu_keeps_nothing_twice_unless_it_is_told_to(asked, on_cpu):
    assert Placement("cpu").host_cache_bytes(asked) == on_cpu
    assert Placement("cpu").within_limit(on_cpu) == on_cpu


@pytest.mark.parametrize(("free", "taken"), [(8 << 30, 2 << 30), (1 << 40, MOST_HOST_CACHE)])
def test_a_gpu_takes_a_share_of_the_free_host_memory(monkeypatch, free, taken):
    monkeypatch.setattr(Placement, "_on_host", False)
    monkeypatch.setattr("isobit.engine.memory.available", lambda: free)
    assert Placement("cuda").host_cache_bytes(None) == taken
    assert Placement("cuda").within_limit(taken) == 0
