"""The engine: one request at a time through the real model, whatever the prefill, the memory or the interruptions."""

import os
import shutil
import threading
import time

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.lane import logits_hash, token_hash
from isobit.engine.placement import Placement
from isobit.engine.request import Finished, PromptProgress, Request, Sampling, TokenEvent
from isobit.errors import IsobitError, QueueFullError, RequestError
from isobit.model.load import load_model
from isobit.ops import load_ops
from tests.engine.listening import Listener, prompt, reply, wait_until


@pytest.fixture(scope="module")
def engine(test_checkpoint):
    engine = Engine(test_checkpoint, EngineSettings(context=400, queue=3))
    yield engine
    engine.close()


def test_every_prefill_gives_the_same_reply(engine):
    tokens = prompt(engine, 200)
    sampling = Sampling(temperature=1.0, seed=1 << 60)
    variants = [("serial", None), ("batched", None), ("deep", None), ("deep", 17), ("deep", 199), ("serial", 200)]
    finished = [
        reply(engine, Request(tokens, 12, sampling, prefill=m, segment_rows=n, reuse=False))[0] for m, n in variants
    ]
    assert len({f.token_hash for f in finished}) == 1
    assert len({f.logits_hash for f in finished}) == 1
    assert [f.segment_rows for f in finished] == [1, 64, 200, 17, 199, 200]
    assert all(f.rows_computed == 200 + 11 and f.rows_reused == 0 and f.reason == "length" for f in finished)


def test_events_tell_the_reply_in_order(engine):
    finished, events = reply(engine, Request(prompt(engine, 50), 5, Sampling(seed=3), logprobs=4))
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert tuple(event.token for event in tokens) == finished.tokens
    assert finished.token_hash == token_hash(finished.tokens)
    assert all(len(t.alternatives) == 4 and t.logprob < 0 for t in tokens)
    assert all(dict(t.alternatives).get(t.token, t.logprob) == t.logprob for t in tokens)
    progress = [event for event in events if isinstance(event, PromptProgress)]
    assert progress[-1] == PromptProgress(50, 50)
    assert isinstance(events[-1], Finished)


def test_seed_and_position_key_the_draws(engine):
    tokens = prompt(engine, 40)
    one, two = (reply(engine, Request(tokens, 8, Sampling(seed=seed)))[0].tokens for seed in (1, 2))
    assert one != two
    # The first reply token fed as part of the prompt: the next draw is at the same position, so it is the same.
    assert reply(engine, Request((*tokens, one[0]), 7, Sampling(seed=1)))[0].tokens == one[1:]


def test_a_stop_token_and_the_context_end_a_reply(engine):
    tokens = prompt(engine, 30)
    free = reply(engine, Request(tokens, 6, Sampling(seed=9)))[0]
    stopped = reply(engine, Request(tokens, 6, Sampling(seed=9), stop_tokens=frozenset({free.tokens[2]})))[0]
    first = free.tokens.index(free.tokens[2])
    assert (stopped.tokens, stopped.reason) == (free.tokens[: first + 1], "stop")
    full = reply(engine, Request(prompt(engine, 395), None, Sampling(seed=9)))[0]
    assert (len(full.tokens), full.reason) == (5, "length")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((), "empty"), ((1, 2, 10**6), "1000000"), ((1,) * 400, "400 tokens")],
)
def test_what_can_never_be_served_is_refused_at_once(engine, tokens, message):
    with pytest.raises(RequestError, match=message):
        engine.submit(Request(tokens), Listener())


def test_cancelling_ends_within_a_segment_and_leaves_others_alone(engine):
    slow = [Listener(), Listener()]
    tickets = [engine.submit(Request(prompt(engine, 390), None, prefill="serial"), listener) for listener in slow]
    after = Listener()
    engine.submit(Request(prompt(engine, 20), 3, Sampling(seed=4)), after)
    assert slow[0].started.wait(60)
    tickets[1].cancel()
    tickets[0].cancel()
    ends = [listener.result() for listener in slow]
    assert [end.reason for end in ends] == ["cancelled", "cancelled"]
    assert ends[0].rows_computed < 390
    assert ends[1].rows_computed == 0
    assert after.result().tokens == reply(engine, Request(prompt(engine, 20), 3, Sampling(seed=4)))[0].tokens
    status = engine.status()
    assert (status.running, status.queued) == (0, 0)
    assert engine.rounds.state.free_slots == engine.budget.lanes
    assert engine.rounds.cache.free_pages(engine.rounds.state.pages)


def test_closing_ends_what_is_just_being_started(test_checkpoint, monkeypatch):
    engine = Engine(test_checkpoint, EngineSettings(context=2000, parallel=1))
    listener, begun, go_on, start = Listener(), threading.Event(), threading.Event(), engine.rounds.start

    def start_when_told(ticket):
        begun.set()
        assert go_on.wait(60)
        start(ticket)

    monkeypatch.setattr(engine.rounds, "start", start_when_told)
    engine.submit(Request(prompt(engine, 3), None, Sampling(seed=1)), listener)
    assert begun.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert wait_until(lambda: engine._closing)
    go_on.set()
    closing.join(60)
    assert listener.result().reason == "cancelled"


def test_the_queue_is_bounded(engine):
    held = [engine.submit(Request(prompt(engine, 390), None, prefill="serial"), Listener())]
    assert wait_until(lambda: engine.status().running == 1)
    held += [engine.submit(Request(prompt(engine, 5), 1), Listener()) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        engine.submit(Request(prompt(engine, 5), 1), Listener())
    last = Listener()
    for ticket in held:
        ticket.cancel()
    assert wait_until(lambda: engine.status().queued == engine.status().running == 0)
    engine.submit(Request(prompt(engine, 5), 1), last)
    assert last.result().reason == "length"


def test_a_failing_forward_ends_its_request_and_no_other(engine, monkeypatch):
    tokens = prompt(engine, 20)
    expected = reply(engine, Request(tokens, 3, Sampling(seed=4)))[0]

    def broken(*arguments):
        raise ValueError("no such row")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "draw", broken)
        failed = reply(engine, Request(tokens, 3))[0]
    assert (failed.reason, failed.error) == ("error", "ValueError: no such row")
    assert reply(engine, Request(tokens, 3, Sampling(seed=4)))[0].tokens == expected.tokens


def test_a_listener_that_fails_does_not_stop_the_engine(engine):
    def fails(event):
        raise RuntimeError("gone")

    engine.submit(Request(prompt(engine, 10), 2), fails)
    assert reply(engine, Request(prompt(engine, 10), 2))[0].reason == "length"


def test_a_logit_that_is_not_finite_ends_the_request(engine, monkeypatch):
    logits = type(engine.model).logits

    def poisoned(model, streams, mixer):
        values = logits(model, streams, mixer)
        values[:, 7] = np.inf
        return values

    monkeypatch.setattr(type(engine.model), "logits", poisoned)
    finished = reply(engine, Request(prompt(engine, 10), 2, reuse=False))[0]
    assert finished.reason == "error"
    assert "not finite" in finished.error


def test_less_memory_means_smaller_segments_and_the_same_reply(engine, test_checkpoint, monkeypatch):
    request = Request(prompt(engine, 300), 4, Sampling(seed=8), reuse=False)
    expected, _ = reply(engine, request)
    available = engine.model.workspace_bytes(40)
    monkeypatch.setattr(Placement, "can_allocate", lambda self, count: count <= available)
    finished, _ = reply(engine, request)
    assert (finished.token_hash, finished.logits_hash) == (expected.token_hash, expected.logits_hash)
    assert finished.segment_rows < 300
    assert f"segments of {finished.segment_rows} rows, not 300" in finished.notice


def test_a_memory_limit_is_kept_or_refused_with_the_numbers(test_checkpoint):
    with pytest.raises(IsobitError, match=r"memory limit is 10\.2 MiB.*raise --memory-gib"):
        Engine(test_checkpoint, EngineSettings(context=400, memory_gib=0.01))


def test_the_checkpoints_folder_is_no_place_to_spill_to(test_checkpoint):
    with pytest.raises(IsobitError, match="--spill-dir is the checkpoint's own folder"):
        Engine(test_checkpoint, EngineSettings(context=100, parallel=1, spill_dir=str(test_checkpoint)))


def test_hashes_are_of_little_endian_bytes():
    assert token_hash((1, 2)) == "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"
    one = np.array([1.0], np.float32)
    assert logits_hash(one) == logits_hash(one.astype(">f4"))


def test_kept_states_on_disk_are_of_no_use_once_the_checkpoint_was_edited(test_checkpoint, tmp_path, caplog):
    folder, tokens = tmp_path / "checkpoint", tuple(range(1, 90))
    shutil.copytree(test_checkpoint, folder)
    settings = EngineSettings(context=200, parallel=1, spill_dir=str(tmp_path / "spill"))

    def rows_reused() -> int:
        engine = Engine(folder, settings)
        try:
            return reply(engine, Request(tokens, 1))[0].rows_reused
        finally:
            engine.close()

    assert [rows_reused(), rows_reused()] == [0, 89]
    edited = folder / "model.safetensors"
    os.utime(edited, ns=(edited.stat().st_atime_ns, edited.stat().st_mtime_ns + 1))
    assert rows_reused() == 0
    assert "of another checkpoint" in caplog.text


@pytest.mark.parametrize("error", [None, MemoryError("no room")])
def test_an_idle_engine_prepares_logprobs_once_and_serves_on(test_checkpoint, monkeypatch, error):
    monkeypatch.setattr("isobit.engine.engine.IDLE_SECONDS", 0.05)
    model = load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=64)
    top_logprobs, calls, prepared = model.ops.top_logprobs, [], threading.Event()

    def counted(logits, count):
        calls.append((logits.shape, threading.current_thread().name))
        prepared.set()
        if error is not None and len(calls) == 1:
            raise error
        return top_logprobs(logits, count)

    model.ops.top_logprobs = counted
    engine = Engine(test_checkpoint, EngineSettings(context=64, device="cpu"), model=model)
    try:
        assert prepared.wait(10)
        finished, _ = reply(engine, Request((1, 2, 3), 2, Sampling(seed=1)))
        assert finished.error is None
        time.sleep(0.2)
        assert calls == [((1, engine.config.vocab_size), "isobit-engine")]
        assert reply(engine, Request((1, 2, 3), 2, Sampling(seed=1), logprobs=1))[0].tokens == finished.tokens
        assert len(calls) == 3
    finally:
        engine.close()


def test_an_engine_that_gets_work_at_once_prepares_nothing_before(test_checkpoint, monkeypatch):
    monkeypatch.setattr("isobit.engine.engine.IDLE_SECONDS", 60.0)
    model = load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=64)
    model.ops.top_logprobs = lambda logits, count: pytest.fail("prepared")
    engine = Engine(test_checkpoint, EngineSettings(context=64, device="cpu"), model=model)
    assert reply(engine, Request((1, 2, 3), 2))[0].error is None
    engine.close()
