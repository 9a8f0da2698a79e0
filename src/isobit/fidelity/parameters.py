"""A checkpoint's weights as transformers' text model takes them: dequantized, float32, experts fused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isobit.checkpoint.names import TensorGroup, is_outside, required_tensors
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.trellis import dequantize, dequantize_embedding, dequantize_ngram_rows
from isobit.checkpoint.weights import Exl3Linear, Linear, NgramTable, PlainEmbedding, QuantizedEmbedding
from isobit.errors import CheckpointError

NGRAM_CONSTANTS = {
    "ngram_heads_vocab_sizes": "sizes",
    "ngram_heads_offsets": "offsets",
    "layer_multipliers": "multipliers",
}


class Arrays(Protocol):
    """Where weights are dequantized to: NumPy's arrays, or the tensors of a device (`tensors.DeviceArrays`)."""

    def dense(self, linear: Linear) -> Any:
        """The weight as PyTorch has it: float32 [out_features, in_features]."""

    def empty(self, shape: tuple[int, ...]) -> Any:
        """float32, uninitialised."""


class HostArrays:
    """NumPy's arrays."""

    def dense(self, linear: Linear) -> np.ndarray:
        return dense(linear)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.float32)


def text_config(folder: Path) -> dict[str, Any]:
    """The text config of config.json as it stands, not as isobit understands it."""
    outer = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = dict(outer.get("text_config", outer))
    config["tie_word_embeddings"] = outer.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return config


def reference_name(canonical: str) -> str:
    """A tensor's name in transformers' text model with a head."""
    return canonical if is_outside(canonical) else f"model.{canonical}"


def parameters(checkpoint: Checkpoint, mtp: bool = False, arrays: Arrays | None = None) -> Iterator[tuple[str, Any]]:
    """All parameters of the text model by transformers' names, float32; n-gram constants int64, tables left out.

    mtp: with the MTP head's, which transformers has no place for. arrays: where linear layers are dequantized to
    (None: NumPy's arrays); the other parameters are NumPy's arrays always.
    """
    arrays = arrays or HostArrays()
    fused: dict[str, None] = {}
    for group in required_tensors(checkpoint.config, mtp):
        if ".experts." in group.name:
            fused[group.name.split(".experts.")[0] + ".experts"] = None
        else:
            yield from _parameters_of(checkpoint, group, arrays)
    for name in fused:
        yield from _fused_experts(checkpoint, name, arrays)


def table_gathers(checkpoint: Checkpoint) -> dict[int, Callable[[np.ndarray], np.ndarray]]:
    """For each layer with an n-gram embedding: int64 [..., heads] row ids -> float32 [..., heads, width]."""
    return {layer: _gather(checkpoint.ngram_table(layer)) for layer in checkpoint.config.ple_layers}


def _parameters_of(checkpoint: Checkpoint, group: TensorGroup, arrays: Arrays) -> Iterator[tuple[str, Any]]:
    name = reference_name(group.name)
    if group.kind == "linear":
        linear = checkpoint.linear(group.name)
        yield f"{name}.weight", arrays.dense(linear)
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias[: linear.out_features].astype(np.float32)
    elif group.kind == "vector":
        yield reference_name(group.tensor), checkpoint.vector(group.tensor).reshape(group.shape)
    elif group.kind == "embedding":
        yield f"{name}.weight", embedding_rows(checkpoint.embedding())
    else:
        table = checkpoint.ngram_table(int(group.name.split(".")[1]))
        parent = name.rpartition(".")[0]
        for constant, field in NGRAM_CONSTANTS.items():
            yield f"{parent}.{constant}", np.array(getattr(table, field), np.int64)


def _fused_experts(checkpoint: Checkpoint, name: str, arrays: Arrays) -> Iterator[tuple[str, Any]]:
    config = checkpoint.config
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    gate_up = arrays.empty((config.num_experts, 2 * inner, hidden))
    down = arrays.empty((config.num_experts, hidden, inner))
    for expert in range(config.num_experts):
        parts = {part: checkpoint.linear(f"{name}.{expert}.{part}") for part in ("gate_proj", "up_proj", "down_proj")}
        for linear in parts.values():
            if linear.bias is not None:
                raise CheckpointError(
                    f"{linear.name}: has a bias, which transformers' experts cannot hold; "
                    "isobit fidelity needs a checkpoint whose experts have none"
                )
        gate_up[expert, :inner] = arrays.dense(parts["gate_proj"])
        gate_up[expert, inner:] = arrays.dense(parts["up_proj"])
        down[expert] = arrays.dense(parts["down_proj"])
    yield reference_name(f"{name}.gate_up_proj"), gate_up
    yield reference_name(f"{name}.down_proj"), down


def dense(linear: Linear) -> np.ndarray:
    """The weight as PyTorch has it: float32 [out_features, in_features]."""
    if isinstance(linear, Exl3Linear):
        return np.ascontiguousarray(dequantize(linear, np.float32).T)
    return np.array(linear.weight, np.float32)


def embedding_rows(embedding: PlainEmbedding | QuantizedEmbedding) -> np.ndarray:
    """All token embeddings: float32 [vocabulary, hidden]."""
    if isinstance(embedding, QuantizedEmbedding):
        return dequantize_embedding(embedding)
    return widened(embedding.rows, embedding.bfloat16)


def widened(values: np.ndarray, bfloat16: bool) -> np.ndarray:
    """Stored half, bfloat16 (as uint16) or float32 values in float32; exact."""
    if bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.array(values, np.float32)


def _gather(table: NgramTable) -> Callable[[np.ndarray], np.ndarray]:
    def gather(ids: np.ndarray) -> np.ndarray:
        heads = np.broadcast_to(np.arange(table.heads), ids.shape).reshape(-1)
        rows = np.stack([table.shards[row // table.shard_rows][row % table.shard_rows] for row in ids.reshape(-1)])
        bias = None if table.head_bias is None else table.head_bias[heads]
        if table.bits is not None:
            values = dequantize_ngram_rows(rows, table.bits, bias)
        else:
            values = widened(rows, table.bfloat16)
            values = values if bias is None else values + bias.astype(np.float32)
        return values.reshape(*ids.shape, table.width)

    return gather
