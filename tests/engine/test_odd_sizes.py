"""Sizes that no published checkpoint has: serial, batched and deep agree for whatever is accepted."""

import pytest

from isobit.checkpoint.synth import synthesize
from isobit.cli.common import follow
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Finished, Request, Sampling

DELTA, ATTENTION = "linear_attention", "full_attention"
SMALL = {
    "hidden_size": 128,
    "num_experts": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "ngram_vocab_size_base": 50,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "layer_types": [DELTA, ATTENTION],
    "ple_layer_ids": [1],
}
WHOLE_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
SIZES = {
    "one attention layer, one expert, two streams": {
        "num_hidden_layers": 1,
        "layer_types": [ATTENTION],
        "ple_layer_ids": [],
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "hc_count": 2,
        "indexer_budget": 4,
    },
    "DeltaNet alone, but for the MTP head": {
        "layer_types": [DELTA, DELTA],
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "hc_count": 3,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 40,
    },
    "odd vocabulary, a key head each, blocks of one": {
        "vocab_size": 385,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_parameters": WHOLE_ROTARY,
        "indexer_compress_ratio": 1,
        "indexer_budget": 8,
        "indexer_n_heads": 1,
        "ple_conv_kernel_size": 2,
        "ngram_size": 2,
    },
    "wide heads, narrow inner layers": {
        "head_dim": 256,
        "indexer_head_dim": 64,
        "num_key_value_heads": 1,
        "hidden_size": 100,
        "moe_intermediate_size": 1,
        "shared_expert_intermediate_size": 1,
        "hc_lowrank": 1,
        "tie_word_embeddings": True,
    },
    "a window of two": {"max_position_embeddings": 2},
}
# Models without pages, or without recurrent state.
STATELESS = {
    "DeltaNet alone": {"layer_types": [DELTA, DELTA], "mtp_num_hidden_layers": 0},
    "attention alone": {"layer_types": [ATTENTION, ATTENTION], "ple_layer_ids": [], "mtp_num_hidden_layers": 0},
}
WAYS = (("serial", None), ("batched", 3), ("deep", None), ("deep", 1), ("deep", 65_536))


def reply(engine: Engine, tokens: tuple[int, ...], prefill: str, segment_rows: int | None) -> Finished:
    request = Request(
        tokens, max_tokens=4, sampling=Sampling(seed=5), prefill=prefill, segment_rows=segment_rows, reuse=False
    )
    return next(event for event in follow(engine, request) if isinstance(event, Finished))


@pytest.mark.parametrize("sizes", STATELESS.values(), ids=STATELESS)
def test_models_with_one_kind_of_state_keep_the_promise(sizes, tmp_path):
    check_promise(sizes, tmp_path)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_odd_sizes_keep_the_promise(sizes, tmp_path):
    check_promise(sizes, tmp_path)


def check_promise(sizes, tmp_path):
    folder = synthesize(tmp_path / "odd", "test", overrides={**SMALL, **sizes})
    engine = Engine(folder, EngineSettings(parallel=1, prompt_cache_gib=0))
    try:
        for length in {1, engine.context // 2, engine.context - 1}:
            tokens = tuple((7 * i * i + 3 * i) % 250 for i in range(length))
            replies = [reply(engine, tokens, *way) for way in WAYS]
            assert {finished.reason for finished in replies} == {"length"}
            assert len({(finished.token_hash, finished.logits_hash) for finished in replies}) == 1
    finally:
        engine.close()
