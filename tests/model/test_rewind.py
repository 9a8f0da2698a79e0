"""Keeping only the first rows of a forward: the stream goes on as if the others had never been computed."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.model.drafting import propose_mtp
from isobit.model.plan import Plan, Segment
from isobit.ops import set_threads, threads
from tests.model.runs import run, serially

LENGTH = 100
STRANGERS = 2


@pytest.fixture(scope="module")
def oracle(model):
    """Token sequences with the serial logits and the serial state's digest at every row."""
    rng = np.random.default_rng(11)
    sequences = rng.integers(0, model.config.vocab_size, (1 + STRANGERS, LENGTH))
    sequences[:, ::9] = model.config.ple_end_token
    return [(tokens, *serially(model, tokens)) for tokens in sequences.tolist()]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_that_were_given_up_leave_no_trace(model, oracle, data):
    """Windows of any size with any number of true tokens first, repeated, beside strangers that do other things."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    before = threads()
    set_threads(data.draw(st.integers(1, 2)))
    try:
        state = model.new_state(slots=1 + STRANGERS, pages=16)
        streams = [state.open() for _ in oracle]
        while any(stream.rows < LENGTH for stream in streams):
            pending = [i for i, stream in enumerate(streams) if stream.rows < LENGTH]
            chosen = data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=1))
            kept, segments = {}, []
            for i in chosen:
                left = LENGTH - streams[i].rows
                kept[i] = min(left, data.draw(st.sampled_from([1, 2, 4, 30])))
                wrong = data.draw(st.sampled_from([0, 1, 3, 20]))
                true = oracle[i][0][streams[i].rows : streams[i].rows + kept[i]]
                tokens = (*true, *rng.integers(0, model.config.vocab_size, wrong).tolist())
                segments.append(Segment(streams[i], tokens, "all", journal=wrong > 0 or bool(rng.integers(2))))
            starts = {i: streams[i].rows for i in chosen}
            plan = Plan(tuple(segments))
            logits = model.forward(state, plan)
            for i, segment, begin in zip(chosen, segments, plan.starts, strict=False):
                first, count = starts[i], kept[i]
                assert logits[begin : begin + count].tobytes() == oracle[i][1][first : first + count].tobytes()
                if segment.journal:
                    state.settle(streams[i], count)
                assert streams[i].rows == first + count
                assert state.digest(streams[i]) == oracle[i][2][first + count - 1]
    finally:
        set_threads(before)


@pytest.mark.parametrize(("first", "window"), [(1, 1), (3, 6), (61, 5), (64, 64), (95, 5)])
def test_every_number_of_kept_rows(model, oracle, first, window):
    """Around page and block edges, and where a stream begins."""
    tokens, logits, digests = oracle[0]
    window = min(window, LENGTH - first)
    for count in {1, 2, 3, window // 2, window - 1, window} & set(range(1, window + 1)):
        state = model.new_state(slots=1, pages=3)
        stream = state.open()
        run(model, state, stream, tokens[:first])
        model.forward(state, Plan((Segment(stream, tuple(tokens[first : first + window]), "none", journal=True),)))
        state.settle(stream, count)
        assert state.digest(stream) == digests[first + count - 1]
        rest = run(model, state, stream, tokens[first + count :]) if first + count < LENGTH else logits[:0]
        assert rest.tobytes() == logits[first + count :].tobytes()


def test_the_first_rows_of_a_stream_are_given_up_too(model, oracle):
    tokens, logits, digests = oracle[1]
    state = model.new_state(slots=1, pages=3)
    stream = state.open()
    model.forward(state, Plan((Segment(stream, (tokens[0], 5, 6, 7), "none", journal=True),)))
    state.settle(stream, 1)
    assert state.digest(stream) == digests[0]
    assert run(model, state, stream, tokens[1:]).tobytes() == logits[1:].tobytes()


def test_a_kept_state_survives_what_is_tried_from_it(model, oracle):
    """Two streams go on from one kept state that ends with a page; what one tries, the other must not see."""
    tokens, logits, digests = oracle[0]
    state = model.new_state(slots=2, pages=12)
    first = state.open()
    run(model, state, first, tokens[:64])
    kept = state.save(first)
    run(model, state, first, tokens[64:66])
    second = state.restore(kept)
    model.forward(state, Plan((Segment(second, (1, 2, 3), "none", journal=True),)))
    state.settle(second, 1)
    assert state.digest(first) == digests[65]
    state.rewind(second, kept)
    assert state.digest(second) == digests[63]
    assert run(model, state, second, tokens[64:]).tobytes() == logits[64:].tobytes()
    assert run(model, state, first, tokens[66:]).tobytes() == logits[66:].tobytes()
    assert state.digest(first) == state.digest(second) == digests[-1]


def test_drafts_change_no_page_that_others_share(model, oracle):
    """The head's draft rows begin in the last page of a kept state, which another stream reads."""
    tokens, _, digests = oracle[0]
    state = model.new_state(slots=2, pages=12)
    first = state.open()
    run(model, state, first, tokens[:64])
    kept = state.save(first)
    run(model, state, first, tokens[64:66])
    second = state.restore(kept)
    assert len(propose_mtp(model, state, [second], [3], 3)[0]) == 3
    assert state.digest(first) == digests[65]
    assert state.digest(second) == digests[63]


def test_only_journaled_rows_can_be_given_up(model):
    state = model.new_state(slots=2, pages=4)
    stream, other = state.open(), state.open()
    model.forward(state, Plan((Segment(stream, (1, 2, 3)), Segment(other, (4, 5), journal=True))))
    with pytest.raises(ValueError, match="no journaled segment"):
        state.settle(stream, 2)
    for rows in (0, 3):
        with pytest.raises(ValueError, match="2 journaled rows"):
            state.settle(other, rows)
    state.settle(other, 2)
    model.forward(state, Plan((Segment(other, (6, 7), journal=True),)))
    model.forward(state, Plan((Segment(stream, (8,)),)))
    with pytest.raises(ValueError, match="no journaled segment"):
        state.settle(other, 1)


def test_nothing_is_journaled_unless_asked(model):
    state = model.new_state(slots=1, pages=4)
    stream = state.open()
    model.forward(state, Plan((Segment(stream, (1, 2, 3)),)))
    model.forward(state, Plan((Segment(stream, (4,), journal=True),)))
    assert state.journals == {}
    model.forward(state, Plan((Segment(stream, (5, 6, 7), journal=True),)))
    assert {len(journal) for journal in state.journals.values()} == {2}
    assert sum(journal.nbytes for journal in state.journals.values()) == model.journal_bytes(2)
