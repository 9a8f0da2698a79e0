"""Small forwards that are replayed give the bytes of the same forwards step by step."""

import threading

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.model.drafting import propose_mtp
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import load_ops, set_threads, threads
from isobit.ops.sample import Draw

STREAMS = 3
STEPS = 240


@pytest.fixture(scope="module")
def models(make_checkpoint):
    """The same model twice: step by step, and replayed."""
    checkpoint = Checkpoint(make_checkpoint("test"))
    loaded = [load_model(checkpoint, load_ops("cpu"), context=1024) for _ in range(2)]
    loaded[0].ops.passes.enabled = False
    return loaded


@pytest.fixture(params=[1, 2])
def thread_count(request):
    before = threads()
    set_threads(request.param)
    yield
    set_threads(before)


def test_replayed_forwards_drafts_and_states_are_the_same_bytes(models, thread_count):
    rng = np.random.default_rng(7)
    states = [model.new_state(STREAMS, 40) for model in models]
    streams = [[state.open() for _ in range(STREAMS)] for state in states]
    for step in range(STEPS):
        chosen = sorted(rng.choice(STREAMS, rng.integers(1, STREAMS + 1), replace=False).tolist())
        segments = [a_segment(rng, step) for _ in chosen]
        draws = [a_draw(rng) for tokens, wanted, _ in segments for _ in range(len(tokens) if wanted == "all" else 1)]
        results = [
            model.draw(state, Plan(tuple(Segment(own[i], *s) for i, s in zip(chosen, segments, strict=True))), draws)
            for model, state, own in zip(models, states, streams, strict=True)
        ]
        found = [[x.tobytes() for x in (logits, *samples.arrays)] for logits, samples in results]
        assert found[0] == found[1]
        for i, (tokens, _, journal) in zip(chosen, segments, strict=True):
            if journal:
                kept = int(rng.integers(1, len(tokens) + 1))
                for state, own in zip(states, streams, strict=True):
                    state.settle(own[i], kept)
        if step % 3 == 0:
            drafts = [
                propose_mtp(model, state, [own[i] for i in chosen], [step % 50] * len(chosen), 3)
                for model, state, own in zip(models, states, streams, strict=True)
            ]
            assert drafts[0] == drafts[1]
        poison(models[1])
    for i in range(STREAMS):
        assert states[0].digest(streams[0][i]) == states[1].digest(streams[1][i])
    tapes = models[1].ops.passes._tapes.values()
    assert len(tapes) > 10
    assert {batch.journal_rows > 0 for tape in tapes for batch in tape.inputs.given.batches.values()} == {True, False}


def a_segment(rng, step):
    """A prompt's rows at first, then one row or a verify window."""
    count = 20 if step < 2 else int(rng.choice([1, 1, 2]))
    tokens = tuple(rng.integers(0, 300, count).tolist())
    return tokens, "all" if count == 2 else "last", count == 2


def a_draw(rng):
    temperature, top_k = float(rng.choice([0.0, 0.7, 1.0])), int(rng.choice([0, 5]))
    return Draw(temperature, top_k, 0.9, 0.01, seed=int(rng.integers(2**40)), position=int(rng.integers(1000)))


def test_each_row_of_logits_needs_a_draw(models):
    state = models[0].new_state(1, 4)
    with pytest.raises(ValueError, match="2 draws for 1 rows of logits"):
        models[0].draw(state, Plan((Segment(state.open(), (1, 2)),)), [Draw(), Draw()])


def poison(model):
    """Overwrite what the last forward left in memory that the next one must not read before it has written it."""
    for block in model.ops.passes.arena.blocks:
        block[:] = b"\xff" * len(block)


def test_outputs_stay_as_they_are(models):
    model = models[1]
    state = model.new_state(1, 4)
    stream = state.open()
    outputs = [model.forward(state, Plan((Segment(stream, (token,)),))) for token in (1, 2, 3, 4)]
    kept = [output.tobytes() for output in outputs]
    model.forward(state, Plan((Segment(stream, (5,)),)))
    assert [output.tobytes() for output in outputs] == kept


def test_forwards_that_hardly_come_again_are_not_recorded(models):
    model = models[1]
    state = model.new_state(1, 4)
    stream = state.open()
    before = len(model.ops.passes._tapes)
    for _ in range(3):
        model.forward(state, Plan((Segment(stream, (1,) * 17),)))
        model.forward(state, Plan((Segment(stream, (2,)),), recurring=False))
    assert len(model.ops.passes._tapes) == before


def test_a_state_is_never_replayed_with_the_tape_of_another(models):
    digests = []
    for model in models:
        for _ in range(5):
            state = model.new_state(1, 4)
            stream = state.open()
            for token in (1, 2, 3):
                model.forward(state, Plan((Segment(stream, (token,)),)))
        digests.append(state.digest(stream))
    assert digests[0] == digests[1]


def test_threads_that_share_a_model_do_not_disturb_each_other(models):
    count, rows = 3, 60

    def go_on(model, state, stream, seed, digests):
        tokens = np.random.default_rng(seed).integers(0, 300, rows).tolist()
        for token in tokens:
            model.forward(state, Plan((Segment(stream, (token,)),)))
        digests[seed] = state.digest(stream)

    found = []
    for model, together in ((models[0], False), (models[1], True)):
        states = [model.new_state(1, 4) for _ in range(count)]
        digests: dict[int, str] = {}
        threads = [
            threading.Thread(target=go_on, args=(model, state, state.open(), seed, digests))
            for seed, state in enumerate(states)
        ]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        found.append(digests)
    assert found[0] == found[1]
    assert len(set(found[1].values())) == count
