"""Synthetic checkpoints in memory: the tensors of a written one, of its kinds, and a model that runs."""

import numpy as np

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.synth_memory import SyntheticCheckpoint
from isobit.checkpoint.weights import Exl3Linear
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import load_ops


def test_it_has_the_tensors_of_a_written_checkpoint(test_checkpoint):
    written, made = Checkpoint(test_checkpoint), SyntheticCheckpoint("test")
    assert made.store.names == written.store.names
    for name in written.store.names:
        one, other = written.store.info(name), made.store.info(name)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert made.store.read(name).shape == one.shape
        assert made.store.read(name).dtype == written.store.read(name).dtype, name


def test_large_tensors_are_cut_from_pools_that_fit_their_kind():
    made = SyntheticCheckpoint("demo", seed=3)
    first, second = (made.linear(f"layers.0.mlp.experts.{expert}.gate_proj") for expert in (0, 1))
    assert isinstance(first, Exl3Linear)
    assert isinstance(second, Exl3Linear)
    assert not np.array_equal(first.trellis, second.trellis)
    for linear in (first, second):
        assert 0.7 < np.abs(linear.suh.astype(np.float32)).min() < np.abs(linear.suh.astype(np.float32)).max() < 1.3
    table = made.ngram_table(1)
    scales = table.shards[0][:, 0].view(np.float16)
    assert ((scales >= 0.5) & (scales < 1)).all()


def test_the_same_seed_gives_the_same_values():
    one, other, third = (SyntheticCheckpoint("demo", seed=seed) for seed in (1, 1, 2))
    name = "layers.1.mlp.experts.7.up_proj"
    assert np.array_equal(one.linear(name).trellis, other.linear(name).trellis)
    assert not np.array_equal(one.linear(name).trellis, third.linear(name).trellis)


def test_a_model_of_it_runs():
    model = load_model(SyntheticCheckpoint("test"), load_ops("cpu"), context=64)
    state = model.new_state(slots=1, pages=1)
    logits = model.forward(state, Plan((Segment(state.open(), (1, 2, 3), "all"),)))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 10
