"""The CUDA model on the emulator: many rows, few rows and single rows leave the same bytes; drafts and resumes too."""

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.model.drafting import propose_mtp
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import load_ops

pytestmark = pytest.mark.usefixtures("emulated_cuda")

LENGTH = 75  # more rows than a few


@pytest.fixture
def cuda_model(test_checkpoint):
    return load_model(Checkpoint(test_checkpoint), load_ops("cuda"), context=128)


@pytest.fixture
def tokens(cuda_model):
    return np.random.default_rng(5).integers(0, cuda_model.config.vocab_size, LENGTH).tolist()


def run(model, state, stream, tokens, *sizes, logits="last"):
    """Feed the tokens in segments of the sizes; the last forward's logits."""
    start = 0
    for size in sizes:
        given = model.forward(state, Plan((Segment(stream, tuple(tokens[start : start + size]), logits),)))
        start += size
    assert start == len(tokens)
    return model.ops.to_host(given)


def test_every_cut_of_a_prompt_leaves_the_same_bytes(cuda_model, tokens):
    results = []
    for sizes in ((LENGTH,), (64, LENGTH - 64), (31, 41, 1, 1, 1)):
        state = cuda_model.new_state(slots=1, pages=4)
        stream = state.open()
        logits = run(cuda_model, state, stream, tokens, *sizes)
        assert np.isfinite(logits).all()
        results.append((logits.tobytes(), state.digest(stream)))
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_rows_given_up_a_restored_state_and_company_leave_no_trace(cuda_model, tokens):
    state = cuda_model.new_state(slots=3, pages=8)
    alone = state.open()
    expected = run(cuda_model, state, alone, tokens[:20], 20)
    first = state.open()
    run(cuda_model, state, first, tokens[:12], 12)
    kept = state.save(first)
    state.close(first)
    restored, stranger = state.restore(kept), state.open()
    propose_mtp(cuda_model, state, [restored], [tokens[12]], 2)
    window = (*tokens[12:15], 1, 2)
    plan = Plan((Segment(stranger, (9, 8, 7)), Segment(restored, window, "all", journal=True)))
    cuda_model.forward(state, plan)
    state.settle(restored, 3)
    logits = run(cuda_model, state, restored, tokens[15:20], 4, 1)
    assert logits.tobytes() == expected.tobytes()
    assert state.digest(restored) == state.digest(alone)
