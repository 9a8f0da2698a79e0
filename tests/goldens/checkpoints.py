"""The synthetic checkpoints that the logit goldens were made of: other seeds, sizes, codebooks and widths each."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from isobit.checkpoint.synth import synthesize

POSITIONS = 112  # at least 72 of them past every checkpoint's selection budget
GOLDEN_POSITIONS = 56
KEPT_ROWS = (0, 1, 5, 30, 32, 41, 50, 55)

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain_sailing": {
        "seed": 11,
        "plain": ("layers.[02].*", "layers.1.mlp.*", "layers.3.mlp.experts.[23].*"),
        "overrides": {"num_experts": 4, "indexer_budget": 32},
    },
    "mixed_widths": {
        "seed": 12,
        "plain": ("layers.[12].*", "layers.0.mlp.*", "layers.3.mlp.experts.[234].*"),
        "codebook": "mixed",
        "bits": "mixed",
        "embedding_bits": 6,
        "biases": True,
        "packed_signs": True,
        "ngram_shards": 3,
        "overrides": {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "indexer_budget": 16,
            "indexer_n_heads": 2,
            "num_attention_heads": 4,
            "head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 128,
            "norm_topk_prob": False,
        },
    },
    "two_streams": {
        "seed": 13,
        "plain": ("layers.[024].*", "layers.1.mlp.*", "layers.3.self_attn.*", "layers.3.mlp.experts.[12].*", "lm_head"),
        "codebook": "3inst",
        "bits": 2,
        "layers": 5,
        "ngram_bits": 16,
        "overrides": {
            "hidden_size": 256,
            "hc_count": 2,
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "indexer_budget": 24,
            "indexer_compress_ratio": 8,
            "output_gate_type": "silu",
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
            "ple_layer_ids": [1, 3],
            "ngram_size": 2,
        },
    },
}


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write one of the checkpoints into `folder`, which must not exist."""
    return synthesize(folder, "test", mtp=False, **CHECKPOINTS[name])


def tokens_of(name: str, vocab_size: int, end_token: int, count: int = POSITIONS, draw: int = 0) -> np.ndarray:
    """int64 [count], keyed by the checkpoint's seed and `draw`, end tokens inside."""
    generator = np.random.Generator(np.random.PCG64([CHECKPOINTS[name]["seed"], draw]))
    tokens = generator.integers(0, vocab_size, count)
    tokens[[30, 31, 47]] = end_token
    return tokens


def digest(folder: Path) -> str:
    """SHA-256 over the folder's tensors and text config, to tell a changed checkpoint from a changed result."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.name.encode() + path.read_bytes())
    text_config = json.loads((folder / "config.json").read_text())["text_config"]
    total.update(json.dumps(text_config, sort_keys=True).encode())
    return total.hexdigest()
