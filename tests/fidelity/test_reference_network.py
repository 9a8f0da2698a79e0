"""The plain float64 network agrees with transformers, so that what transformers lacks can be held against it."""

import numpy as np
import pytest

from tests.model.reference_network import ReferenceNetwork

pytest.importorskip("torch", reason="needs isobit[fidelity]")
pytest.importorskip("transformers.models.qwen4_exp", reason="needs isobit[fidelity]")

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "output_gate_type": "sigmoid",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
    "eos_token_id": 7,
}


def random_parameters(shapes, rng):
    """Every parameter random and none trivial; the n-gram constants as the format wants them."""
    for name, shape in shapes.items():
        if name.endswith("ngram_heads_vocab_sizes"):
            yield name, np.array([53, 59, 61, 67])
        elif name.endswith("ngram_heads_offsets"):
            yield name, np.array([0, 53, 112, 173])
        elif name.endswith("layer_multipliers"):
            yield name, rng.integers(1 << 40, 1 << 55, 3) * 2 + 1
        else:
            scale = 0.3 if len(shape) < 2 else 2.0 / np.sqrt(shape[-1])
            yield name, (rng.standard_normal(shape) * scale).astype(np.float32)


@pytest.fixture(scope="module")
def pair():
    from isobit.fidelity.reference import Reference

    rng = np.random.default_rng(3)
    table = rng.standard_normal((240, 8)).astype(np.float32)
    reference = Reference(CONFIG, {1: lambda ids: table[ids]})
    parameters = dict(random_parameters(reference.shapes, rng))
    reference.load(parameters.items())
    weights = {name.removeprefix("model."): array.astype(np.float64) for name, array in parameters.items()}
    for name in ("ngram_heads_vocab_sizes", "ngram_heads_offsets", "layer_multipliers"):
        weights[f"layers.1.ple.ple_embedding.{name}"] = parameters[f"model.layers.1.ple.ple_embedding.{name}"]
    weights["layers.1.ple.ple_embedding.ngram_embedding.weight"] = table.astype(np.float64)
    return reference, ReferenceNetwork(CONFIG, weights)


def test_logits_and_choices_agree_past_the_budget(pair):
    reference, network = pair
    tokens = np.random.default_rng(5).integers(0, 96, 90)
    tokens[[20, 21, 60]] = CONFIG["eos_token_id"]
    run = reference.run(tokens)
    logits = network.logits(tokens)
    assert np.abs(run.logits - logits).max() < 1e-4 * np.abs(logits).max()
    attention = network.choices["layers.2"]
    for position, (mine, theirs) in enumerate(zip(attention.blocks, run.choices["blocks", 2].chosen, strict=True)):
        assert mine == theirs.tolist(), position
    for layer in range(4):
        theirs = [chosen.tolist() for chosen in run.choices["router", layer].chosen]
        assert network.choices[f"layers.{layer}"].experts == theirs
    assert max(map(len, attention.block_scores)) > CONFIG["indexer_budget"] // CONFIG["indexer_compress_ratio"]


def test_a_forced_choice_changes_what_follows_only(pair):
    from isobit.fidelity.choices import Place, differing

    reference, _ = pair
    tokens = np.random.default_rng(6).integers(0, 96, 60)
    free = reference.run(tokens)
    place = Place("router", 1, 30)
    unlike = np.setdiff1d(np.arange(8), free.choices["router", 1].chosen[30])[:3]
    forced = reference.run(tokens, {place: unlike})
    assert np.array_equal(forced.logits[:30], free.logits[:30])
    assert not np.array_equal(forced.logits[30], free.logits[30])
    assert differing(forced.choices, free.choices)[0] == place
