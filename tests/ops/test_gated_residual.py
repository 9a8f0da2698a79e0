"""The gated residual streams: reading, writing, transformers' module."""

import dataclasses

import numpy as np
import pytest

from isobit.checkpoint.weights import PlainLinear
from isobit.ops.gated_residual.cpu import (
    BLOCKWISE,
    LAYER_BY_LAYER,
    add_streams,
    expand_streams,
    gated_read,
    gated_write,
    prepare_gated_residual,
)
from isobit.ops.linear.contract import random_trellis
from isobit.ops.linear.cpu import linear, prepare_linear
from isobit.ops.work import forced_pieces
from tests.ops import plain

f32 = np.float32


def random_site(rng, streams, hidden, rank, writes=True):
    """(site, weights by name) of random plain linear layers."""
    wide = streams * hidden
    shapes = {"down": (rank, wide), "up": (wide, rank), "inject": (streams, wide)}
    weights = {name: (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(f32) for name, shape in shapes.items()}
    weights["norm"] = (0.3 * rng.standard_normal(wide)).astype(f32)
    handles = {name: prepare_linear(PlainLinear(name, weights[name])) for name in shapes}
    inject = handles["inject"] if writes else None
    return prepare_gated_residual(weights["norm"], handles["down"], handles["up"], inject, streams, 1e-6), weights


@pytest.mark.parametrize("streams", [3, 4])
def test_read_is_the_definition_rounding_by_rounding(streams):
    rng = np.random.default_rng(streams)
    hidden = 12
    site, weights = random_site(rng, streams, hidden, 5)
    x = rng.standard_normal((1, streams, hidden)).astype(f32)
    mixed, injection = gated_read(x, site)

    parts = weights["norm"].reshape(streams, hidden)
    normed = np.stack([plain.norm(x[0, s], parts[s], 1e-6) for s in range(streams)])
    flat = normed.reshape(1, -1)
    low = np.array([[plain.silu(f32(v / f32(streams))) for v in linear(flat, site.down)[0]]], f32)
    mix = np.array([plain.sigmoid(v) for v in linear(low, site.up)[0]], f32).reshape(streams, hidden)
    total = mix[0] * normed[0]
    for s in range(1, streams):
        total = total + mix[s] * normed[s]
    written = [f32(2) * f32(plain.sigmoid(f32(v / f32(streams)))) for v in linear(flat, site.inject)[0]]
    assert mixed.tobytes() == (total / f32(streams)).tobytes()
    assert injection.tobytes() == np.array(written, f32).tobytes()


@pytest.mark.parametrize(
    ("streams", "hidden", "rank"), [(4, 33, 5), (3, 128, 16), (2, 200, 130), (5, 7, 3)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_blockwise_and_layer_by_layer_give_the_same_bytes(streams, hidden, rank, rows):
    rng = np.random.default_rng(rows)
    site, _ = random_site(rng, streams, hidden, rank)
    x = rng.standard_normal((rows, streams, hidden)).astype(f32)
    expected = [array.tobytes() for array in gated_read(x, site, LAYER_BY_LAYER)]
    for near_rows in (4, 48):
        for pieces in (1, 2):
            with forced_pieces(pieces):
                found = gated_read(x, dataclasses.replace(site, near_rows=near_rows), BLOCKWISE)
            assert [array.tobytes() for array in found] == expected


def test_a_block_of_rows_leaves_nothing_to_the_next():
    rng = np.random.default_rng(5)
    site, _ = random_site(rng, 3, 60, 5)
    site = dataclasses.replace(site, near_rows=4)
    x = rng.standard_normal((7, 3, 60)).astype(f32)
    expected = gated_read(x[4:].copy(), site, BLOCKWISE)
    x[:4] = np.nan
    found = gated_read(x, site, BLOCKWISE)
    assert [array[4:].tobytes() for array in found] == [array.tobytes() for array in expected]


def test_quantized_layers_and_biases_are_read_layer_by_layer():
    rng = np.random.default_rng(6)
    weights = {name: rng.standard_normal(shape).astype(f32) for name, shape in (("down", (8, 256)), ("up", (256, 8)))}
    up = prepare_linear(PlainLinear("up", weights["up"]))
    biased = prepare_linear(PlainLinear("down", weights["down"], np.ones(8, f32)))
    quantized = prepare_linear(random_trellis(rng, 256, 8, "mul1", 3))
    x = rng.standard_normal((20, 2, 128)).astype(f32)
    for down in (biased, quantized):
        site = prepare_gated_residual(np.zeros(256, f32), down, up, None, 2, 1e-6)
        expected, _ = gated_read(x, site, LAYER_BY_LAYER)
        assert gated_read(x, site)[0].tobytes() == expected.tobytes()
        with pytest.raises(KeyError, match="plain"):
            gated_read(x, site, BLOCKWISE)


def test_a_site_without_injection_only_reads():
    site, _ = random_site(np.random.default_rng(1), 4, 8, 3, writes=False)
    mixed, injection = gated_read(np.ones((2, 4, 8), f32), site)
    assert mixed.shape == (2, 8)
    assert injection is None


def test_writes_are_fused_and_in_place():
    rng = np.random.default_rng(2)
    streams, injection, y = (rng.standard_normal(shape).astype(f32) for shape in ((5, 4, 9), (5, 4), (5, 9)))
    before = streams.copy()
    assert gated_write(streams, injection, y) is None
    for row, s, i in np.ndindex(streams.shape):
        assert streams[row, s, i] == f32(plain.fma(injection[row, s], y[row, i], before[row, s, i]))
    added = before.copy()
    add_streams(added, y)
    assert added.tobytes() == (before + y[:, None]).tobytes()
    assert expand_streams(y, 3).tobytes() == np.repeat(y[:, None], 3, axis=1).tobytes()


def test_agrees_with_transformers():
    torch = pytest.importorskip("torch", reason="needs the optional package torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs transformers")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    rng = np.random.default_rng(3)
    site, weights = random_site(rng, 4, 64, 16)
    module = modeling.Qwen4ExpTextGatedResidual(Qwen4ExpTextConfig(hidden_size=64, hc_count=4, hc_lowrank=16))
    names = {
        "hc_norm.weight": "norm",
        "input_mix_weight_down.weight": "down",
        "input_mix_weight_up.weight": "up",
        "block_inject_weight.weight": "inject",
    }
    module.load_state_dict({name: torch.from_numpy(weights[key]) for name, key in names.items()})
    x = rng.standard_normal((7, 4, 64)).astype(f32)
    with torch.no_grad():
        mixed, _, injection = module(torch.from_numpy(x.reshape(7, -1)))
    ours = gated_read(x, site)
    np.testing.assert_allclose(ours[0], mixed.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours[1], injection.numpy(), rtol=1e-5, atol=1e-6)
