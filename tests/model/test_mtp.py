"""The MTP head against the plain float64 network: its drafts, and that its state follows the trunk alone."""

import json

import numpy as np
import pytest

from isobit.model.blocks import Pass
from isobit.model.flash_next import TRUNK
from isobit.model.mtp import completed_rows, draft_batch
from isobit.model.plan import Plan, Segment
from isobit.ops.batch import Batch
from isobit.ops.passes import PassInputs
from tests.model.reference_network import ReferenceNetwork
from tests.model.reference_weights import checkpoint_weights
from tests.model.runs import run

LENGTH = 90


@pytest.fixture(scope="module")
def tokens(model):
    return np.random.default_rng(2).integers(0, model.config.vocab_size, LENGTH + 2).tolist()


@pytest.fixture(scope="module")
def network(test_checkpoint):
    config = json.loads((test_checkpoint / "config.json").read_text())["text_config"]
    return ReferenceNetwork(config, checkpoint_weights(test_checkpoint))


def draft(model, state, stream, following, depth=0, streams=None):
    """One draft row: its logits and the head's output streams."""
    batch = draft_batch([stream], depth)
    run_pass = Pass(model.ops, state, batch, PassInputs({TRUNK: batch}))
    trunk = model.ops.take_rows(state.recurrent["mtp.streams"], [stream.slot]) if streams is None else streams
    out = model.mtp.propose(run_pass, trunk, model.ops.embed(np.array([following], np.int32), model.embedding))
    return model.logits(out, model.mtp.mixer)[0], out


def test_drafts_agree_with_the_float64_network(model, network, tokens):
    trunk = network.trunk(tokens[:LENGTH])
    expected, _ = network.draft(tokens[: LENGTH + 1], trunk)
    state = model.new_state(slots=1, pages=8)
    stream = state.open()
    errors, agreeing = [], 0
    for end in range(10, LENGTH + 1, 10):
        run(model, state, stream, tokens[stream.rows : end])
        state.reserve(stream, 1)
        logits, _ = draft(model, state, stream, tokens[end])
        errors.append(np.linalg.norm(logits - expected[end - 1]) / np.linalg.norm(expected[end - 1]))
        agreeing += int(logits.argmax() == expected[end - 1].argmax())
    assert max(errors) < 0.02, errors
    assert agreeing >= 8


def test_drafts_leave_no_trace(model, tokens):
    """What drafts wrote into the head's cache is written anew from the trunk, whatever was drafted."""
    states = []
    for drafting in (False, True):
        state = model.new_state(slots=1, pages=8)
        stream = state.open()
        for begin in range(0, LENGTH, 6):
            run(model, state, stream, tokens[begin : begin + 6])
            if drafting:
                state.reserve(stream, 4)
                _, out = draft(model, state, stream, 7)
                for depth in (1, 2, 3):
                    _, out = draft(model, state, stream, 9 + depth, depth, out)
        states.append(state.digest(stream))
    assert states[0] == states[1]


def test_drafts_do_not_depend_on_the_cut(model, tokens):
    logits = []
    for cuts in ((), range(0, LENGTH, 7)):
        state = model.new_state(slots=1, pages=8)
        stream = state.open()
        run(model, state, stream, tokens[:LENGTH], cuts)
        state.reserve(stream, 1)
        logits.append(draft(model, state, stream, tokens[LENGTH])[0].tobytes())
    assert logits[0] == logits[1]


def test_a_segment_completes_the_row_before_it():
    batch = Batch(
        slots=np.array([4, 2, 0], np.int32),
        starts=np.array([0, 1, 3, 7], np.int32),
        first=np.array([0, 0, 9], np.int32),
        pages=np.array([[5], [6], [7]], np.int32),
    )
    done, rows = completed_rows(batch)
    assert rows.tolist() == [2, 3, 4, 5, 6]
    assert (done.slots.tolist(), done.starts.tolist(), done.first.tolist()) == ([2, 0], [0, 1, 5], [0, 8])
    assert done.pages.tolist() == [[6], [7]]


def test_the_first_token_completes_nothing(model):
    state = model.new_state(slots=1, pages=1)
    stream = state.open()
    model.forward(state, Plan((Segment(stream, (3,)),)))
    assert state.export(stream)["mtp.keys"].shape[0] == 0
