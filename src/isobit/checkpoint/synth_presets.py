"""The sizes of synthetic checkpoints: a text config as Hugging Face names its fields, and the widths of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Sizes (`config`), widths in bits per value, and which linears stay plain (name patterns, without prefix)."""

    summary: str
    config: Mapping[str, Any]
    layers: int
    expert_bits: float
    bits: float
    head_bits: float
    mtp_bits: float
    ngram_bits: int
    plain: tuple[str, ...] = field(default=())


_COMMON: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float16",
    "full_attention_interval": 4,
    "hc_count": 4,
    "indexer_compress_ratio": 4,
    "indexer_kv_heads": 1,
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "make_ngram_vocab_size_divisible_by": 128,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "ngram_size": 3,
    "norm_topk_prob": True,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "output_router_logits": False,
    "ple_conv_kernel_size": 4,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "router_aux_loss_coef": 0.001,
    "seed": 1234,
    "tie_word_embeddings": False,
    "use_cache": True,
}

PRESETS: dict[str, Preset] = {
    "demo": Preset(
        summary="small and quick, about 8 M active values a token, context 8,192",
        config=_COMMON
        | {
            "hidden_size": 512,
            "vocab_size": 384,
            "max_position_embeddings": 8192,
            "num_attention_heads": 4,
            "head_dim": 64,
            "indexer_n_heads": 3,
            "indexer_head_dim": 64,
            "indexer_budget": 512,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "hc_lowrank": 32,
            "heads_per_ngram": 1,
            "ple_embed_dim": 320,
            "ngram_vocab_size_base": 20000,
        },
        layers=4,
        expert_bits=3,
        bits=4,
        head_bits=4,
        mtp_bits=4,
        ngram_bits=5,
    ),
    "test": Preset(
        summary="tiny, for tests, some linears plain, selection budget 32, context 2,048",
        config=_COMMON
        | {
            "hidden_size": 128,
            "vocab_size": 384,
            "max_position_embeddings": 2048,
            "num_attention_heads": 4,
            "head_dim": 64,
            "indexer_n_heads": 3,
            "indexer_head_dim": 32,
            "indexer_budget": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "hc_lowrank": 16,
            "heads_per_ngram": 2,
            "ple_embed_dim": 640,
            "ngram_vocab_size_base": 1000,
        },
        layers=4,
        expert_bits=3,
        bits=4,
        head_bits=5,
        mtp_bits=4,
        ngram_bits=4,
        plain=("layers.2.*", "layers.[03].mlp.*", "mtp.layers.*"),
    ),
    "full": Preset(
        summary="the real widths (hidden 2560, 512 experts, vocabulary 248,320), context 262,144",
        config=_COMMON
        | {
            "hidden_size": 2560,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
            "num_attention_heads": 24,
            "head_dim": 256,
            "indexer_n_heads": 4,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "hc_lowrank": 320,
            "heads_per_ngram": 8,
            "ple_embed_dim": 2560,
            "ngram_vocab_size_base": 60000,
        },
        layers=4,
        expert_bits=3,
        bits=4,
        head_bits=5,
        mtp_bits=4,
        ngram_bits=5,
    ),
}
