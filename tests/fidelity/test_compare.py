"""The comparison itself, with the reference in isobit's role: sound runs pass, planted defects fail."""

import numpy as np
import pytest

from tests.goldens.checkpoints import POSITIONS, make_checkpoint, tokens_of

pytest.importorskip("torch", reason="needs isobit[fidelity]")
pytest.importorskip("transformers.models.qwen4_exp", reason="needs isobit[fidelity]")


class Bench:
    """A checkpoint, its reference, and runs of a tampered reference with isobit's roundings."""

    def __init__(self, folder):
        from isobit.checkpoint.reader import Checkpoint
        from isobit.fidelity.parameters import parameters, table_gathers, text_config
        from isobit.fidelity.reference import Reference

        self.checkpoint = Checkpoint(folder)
        self.config = text_config(folder)
        self.tokens = tokens_of(folder.name, self.checkpoint.config.vocab_size, self.checkpoint.config.ple_end_token)
        self.parameters = dict(parameters(self.checkpoint))
        self.tables = table_gathers(self.checkpoint)
        self._reference = Reference
        self.reference = self.loaded({})

    def loaded(self, changes):
        reference = self._reference(self.config, self.tables)
        reference.load({**self.parameters, **changes}.items())
        return reference

    def judge(self, run):
        from isobit.fidelity.compare import compare

        return compare(run, self.reference, self.checkpoint, self.tokens, lambda step: None)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(make_checkpoint("plain_sailing", tmp_path_factory.mktemp("fidelity") / "plain_sailing"))


@pytest.fixture(scope="module")
def sound(bench):
    from isobit.fidelity.matched import matched_roundings

    with matched_roundings(bench.reference, bench.checkpoint):
        return bench.reference.run(bench.tokens, record_boundaries=True)


def copied(run):
    from isobit.fidelity.choices import LayerChoices, Run

    choices = {
        key: LayerChoices(list(layer.scores), list(layer.chosen), list(layer.natural))
        for key, layer in run.choices.items()
    }
    return Run(run.logits.copy(), choices, run.boundaries)


def test_rounding_alone_passes(bench, sound):
    report = bench.judge(sound)
    assert report.passed, report.failures
    assert report.past_budget >= 72
    assert report.forced.error_max > 1e-4, "isobit's roundings must show in the plain comparison"
    assert report.part_by_part.error_max < 1e-6
    assert max(part.worst for part in report.parts) < 1e-6


def test_near_ties_are_traced_and_forced(bench):
    """Two experts are equal to the reference, and isobit sees a millionth of a difference between them."""
    from isobit.fidelity.compare import compare
    from isobit.fidelity.matched import matched_roundings

    name = "model.layers.1.mlp.gate.weight"
    equal, unequal = bench.parameters[name].copy(), bench.parameters[name].copy()
    equal[2] = equal[1]
    unequal[2] = unequal[1] * np.float32(1 + 1e-6)
    reference, other = bench.loaded({name: equal}), bench.loaded({name: unequal})
    with matched_roundings(other, bench.checkpoint):
        mine = other.run(bench.tokens, record_boundaries=True)
    report = compare(mine, reference, bench.checkpoint, bench.tokens, lambda step: None)
    assert report.passed, report.failures
    swaps = [
        (root.dropped, root.taken) for root in report.roots if (root.place.kind, root.place.layer) == ("router", 1)
    ]
    assert swaps
    assert set(swaps) == {((1,), (2,))}
    assert report.differences
    assert all(difference.agrees_when_forced and difference.causes for difference in report.differences)


def test_a_choice_that_is_no_near_tie_fails(bench, sound):
    from isobit.fidelity.choices import Place
    from isobit.fidelity.matched import matched_roundings

    worst = np.sort(np.argsort(sound.choices["router", 1].scores[50])[:2])
    with matched_roundings(bench.reference, bench.checkpoint):
        mine = bench.reference.run(bench.tokens, {Place("router", 1, 50): worst}, record_boundaries=True)
    report = bench.judge(mine)
    assert not report.passed
    assert any("router of layer 1 at position 50" in failure for failure in report.failures)


@pytest.mark.parametrize("defect", ["swapped experts", "a weight off by one percent", "a wrong norm"])
def test_a_wrong_weight_fails(bench, defect):
    changes = {
        "swapped experts": ("model.layers.1.mlp.experts.down_proj", lambda w: w[[1, 0, *range(2, len(w))]]),
        "a weight off by one percent": ("model.layers.2.linear_attn.out_proj.weight", lambda w: w * np.float32(1.01)),
        "a wrong norm": ("model.layers.3.self_attn.indexer.q_layernorm.weight", lambda w: w + np.float32(0.25)),
    }
    name, change = changes[defect]
    report = bench.judge(
        bench.loaded({name: np.ascontiguousarray(change(bench.parameters[name]))}).run(
            bench.tokens, record_boundaries=True
        )
    )
    assert not report.passed


def test_a_rounding_in_another_place_fails(bench):
    """Inputs rounded to half before their rotation, not after: no larger an error, but not the declared one."""
    from isobit.fidelity.matched import half

    names = [f"layers.1.linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")]
    hooks = [
        bench.reference.model.model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: half(inputs[0]))
        for name in names
    ]
    early = bench.reference.run(bench.tokens, record_boundaries=True)
    for hook in hooks:
        hook.remove()
    report = bench.judge(early)
    assert report.forced.error_max < 2e-3
    assert any("the mixer of layer 1, from the same inputs" in failure for failure in report.failures)


def test_a_choice_that_is_not_one_fails(bench, sound):
    mine = copied(sound)
    mine.choices["blocks", 3].chosen[100] = mine.choices["blocks", 3].chosen[100][:-1]
    report = bench.judge(mine)
    assert report.failures == ("isobit's choice is not a valid one: blocks of layer 3 at position 100",)


def test_logits_that_are_not_finite_fail(bench, sound):
    mine = copied(sound)
    mine.logits[POSITIONS // 2, 7] = np.nan
    assert not bench.judge(mine).passed
