"""A tiny EXL3 folder built from the written description alone: what the checkpoint tests change and break."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from isobit.checkpoint.config import FlashNextConfig, parse_config
from isobit.checkpoint.names import TensorGroup, published_name, required_tensors
from isobit.checkpoint.store import write_tensors

MUL1 = 0x83DCD12D
MCG = 0xCBAC1FED
BITS = 2
NGRAM_BITS = 2
NGRAM_ROWS = 40

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "eos_token_id": 5,
    "max_position_embeddings": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "output_gate_type": "sigmoid",
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 320,
    "heads_per_ngram": 1,
    "ngram_vocab_size_base": 17,
    "mtp_num_hidden_layers": 1,
}


def config_json(**changes: Any) -> dict[str, Any]:
    """A nested config.json; `changes` go into its text_config, None removes a key."""
    text = {key: value for key, value in {**TEXT, **changes}.items() if value is not None}
    return {"model_type": "qwen4_exp", "text_config": text}


def config(**changes: Any) -> FlashNextConfig:
    return parse_config(config_json(**changes))


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    """Every tensor of the folder by published name, random but for markers and n-gram sizes."""
    rng = np.random.default_rng(3)
    arrays: dict[str, np.ndarray] = {}
    for group in required_tensors(config(**changes)):
        arrays.update(_group(group, rng))
    return arrays


def quantized(name: str, k: int, n: int, bits: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A mul1 linear of K x N (multiples of 128)."""
    return {
        f"{name}.trellis": words(rng, (k // 16, n // 16, int(16 * bits))),
        f"{name}.suh": floats(rng, (k,)).astype(np.float16),
        f"{name}.svh": floats(rng, (n,)).astype(np.float16),
        f"{name}.mul1": marker(MUL1),
    }


def marker(value: int) -> np.ndarray:
    return np.array(value, np.uint32).view(np.int32)


def words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-(1 << 15), 1 << 15, shape).astype(np.int16)


def floats(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values that are bfloat16 and float16 values too."""
    return (rng.integers(-128, 128, shape) / 64).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values that bfloat16 holds exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def write(
    folder: Path,
    arrays: dict[str, np.ndarray] | None = None,
    config: dict[str, Any] | None = None,
    bf16: tuple[str, ...] = (),
) -> Path:
    """Write the folder; returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json() if config is None else config))
    write_tensors(folder / "model.safetensors", tensors() if arrays is None else arrays, bf16)
    return folder


def _group(group: TensorGroup, rng: np.random.Generator) -> dict[str, np.ndarray]:
    name = published_name(group.name)
    k, n = group.in_features, group.out_features
    if group.kind == "vector":
        return {name + group.suffix: floats(rng, group.shape)}
    if group.kind == "ngram":
        return {
            f"{name}.trellis": words(rng, (NGRAM_ROWS, 1 + k * NGRAM_BITS // 16)),
            f"{name}.head_offsets": np.array([0, 17], np.int64),
            f"{name}.head_vocab_sizes": np.array([17, 19], np.int64),
            f"{name}.layer_multipliers": np.array([3, 5, 7], np.int64),
            f"{name}.head_bias": floats(rng, (2, k)).astype(np.float16),
        }
    if group.kind == "linear" and group.quantizable:
        return quantized(name, -(-k // 128) * 128, -(-n // 128) * 128, BITS, rng)
    return {f"{name}.weight": floats(rng, (n, k)).astype(np.float16)}
