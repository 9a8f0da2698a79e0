"""isobit's whole network, the MTP head included, against the plain float64 one; needs no PyTorch."""

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.parameters import text_config
from isobit.model.blocks import Pass
from isobit.model.flash_next import TRUNK
from isobit.model.load import load_model
from isobit.model.mtp import draft_batch
from isobit.model.plan import Plan, Segment
from isobit.model.state import pages_for
from isobit.ops import load_ops
from isobit.ops.passes import PassInputs
from tests.model.reference_network import ReferenceNetwork
from tests.model.reference_weights import checkpoint_weights

ROWS = 70  # past the test preset's selection budget of 32
HALF_CACHE = 1e-3  # relative; keys and values in half precision are the only rounding that float64 does not share


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return make_checkpoint("test", seed=5, plain=("*",))


@pytest.fixture(scope="module")
def network(folder):
    return ReferenceNetwork(text_config(folder), checkpoint_weights(folder))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(Checkpoint(folder), load_ops("cpu"), ROWS + 8)


def relative_error(value, expected):
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)


def test_trunk_and_drafts(model, network):
    ops, config = model.ops, model.config
    tokens = np.random.default_rng(8).integers(0, config.vocab_size, ROWS + 3)
    tokens[[9, 40]] = config.ple_end_token
    trunk = network.trunk(tokens[:ROWS])

    state = model.new_state(slots=1, pages=pages_for(ROWS + 8))
    stream = state.open()
    logits = ops.to_host(model.forward(state, Plan((Segment(stream, tuple(tokens[:ROWS].tolist()), "all"),))))
    assert relative_error(logits, network.head(trunk)) < HALF_CACHE

    streams = ops.take_rows(state.recurrent["mtp.streams"], np.array([stream.slot]))
    expected = trunk
    for depth in range(3):
        draft_logits, outputs = network.draft(tokens[: ROWS + depth + 1], expected)
        state.reserve(stream, depth + 1)
        batch = draft_batch([stream], depth)
        run = Pass(ops, state, batch, PassInputs({TRUNK: batch}))
        embedded = ops.embed(tokens[ROWS + depth : ROWS + depth + 1].astype(np.int32), model.embedding)
        streams = model.mtp.propose(run, streams, embedded)
        proposed = ops.to_host(model.logits(streams, model.mtp.mixer))
        assert relative_error(ops.to_host(streams)[0], outputs[-1]) < HALF_CACHE, depth
        assert relative_error(proposed[0], draft_logits[-1]) < HALF_CACHE, depth
        expected = np.concatenate([expected, outputs[-1:]])
