"""The promise, on the model: logits and state do not depend on the cut, the company, restores or threads."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.contract.gates import on_threads
from isobit.model.plan import Plan, Segment
from tests.model.runs import run, serially

LENGTH = 150
EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def prompt(model, seed: int, length: int = LENGTH) -> list[int]:
    """Random ids with end tokens among them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, length)
    tokens[rng.integers(0, length, length // 16)] = model.config.ple_end_token
    return tokens.tolist()


@pytest.fixture(scope="module")
def oracle(model):
    """Prompts with the serial logits and the serial state's digest at every row."""
    return [(tokens, *serially(model, tokens)) for tokens in (prompt(model, seed) for seed in range(3))]


def test_the_prompt_is_past_the_selection_budget(model):
    assert 2 * model.config.indexer_budget < LENGTH


@EXAMPLES
@given(which=st.integers(0, 2), cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6), threaded=st.booleans())
def test_any_cut_gives_the_serial_bytes(model, oracle, which, cuts, threaded):
    tokens, logits, digests = oracle[which]
    with on_threads(2 if threaded else 1):
        state = model.new_state(slots=1, pages=16)
        stream = state.open()
        assert run(model, state, stream, tokens, cuts).tobytes() == logits.tobytes()
        assert state.digest(stream) == digests[-1]


@EXAMPLES
@given(which=st.integers(0, 2), row=st.integers(1, LENGTH - 1), deep=st.booleans())
def test_a_kept_state_restores_at_any_row(model, oracle, which, row, deep):
    tokens, logits, digests = oracle[which]
    state = model.new_state(slots=2, pages=32)
    first = state.open()
    run(model, state, first, tokens[:row], () if deep else range(0, row, 7))
    assert state.digest(first) == digests[row - 1]
    kept = state.save(first)
    run(model, state, first, tokens[row:])
    second = state.restore(kept)
    assert state.digest(second) == digests[row - 1]
    assert run(model, state, second, tokens[row:]).tobytes() == logits[row:].tobytes()
    assert state.digest(second) == state.digest(first) == digests[-1]


@EXAMPLES
@given(data=st.data())
def test_company_does_not_matter(model, oracle, data):
    """Streams at different positions, in plans of random segments, beside each other."""
    state = model.new_state(slots=3, pages=16)
    streams = [state.open() for _ in oracle]
    done = [0, 0, 0]
    logits = [[], [], []]
    while any(count < LENGTH for count in done):
        pending = [i for i in range(3) if done[i] < LENGTH]
        chosen = data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=1))
        sizes = [min(data.draw(st.sampled_from([1, 3, 40, 90])), LENGTH - done[i]) for i in chosen]
        cut = [oracle[i][0][done[i] : done[i] + n] for i, n in zip(chosen, sizes, strict=True)]
        plan = Plan(tuple(Segment(streams[i], tuple(c), "all") for i, c in zip(chosen, cut, strict=True)))
        rows = model.forward(state, plan)
        begin = 0
        for i, n in zip(chosen, sizes, strict=True):
            logits[i].append(rows[begin : begin + n])
            begin, done[i] = begin + n, done[i] + n
    for i, (_, expected, digests) in enumerate(oracle):
        assert np.concatenate(logits[i]).tobytes() == expected.tobytes()
        assert state.digest(streams[i]) == digests[-1]


def test_a_rewound_stream_goes_on_as_if_nothing_had_been_tried(model, oracle):
    tokens, logits, digests = oracle[0]
    state = model.new_state(slots=1, pages=32)
    stream = state.open()
    run(model, state, stream, tokens[:70])
    kept = state.save(stream)
    run(model, state, stream, oracle[1][0][:20])
    state.rewind(stream, kept)
    assert state.digest(stream) == digests[69]
    assert run(model, state, stream, tokens[70:], (71, 80)).tobytes() == logits[70:].tobytes()
    state.drop(kept)
    state.close(stream)
    assert (state.free_slots, state.free_pages) == (1, 32)
