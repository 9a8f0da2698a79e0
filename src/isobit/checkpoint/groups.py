"""How a folder stores each tensor group, from the headers (and the four bytes of a codebook marker) alone.

The reader loads what these layouts describe; `inspect` reports them. A layout that cannot be used raises
CheckpointError: what was found, where, what was expected.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.names import TensorGroup
from isobit.checkpoint.store import TensorInfo, TensorStore
from isobit.checkpoint.trellis import MULTIPLIERS
from isobit.checkpoint.weights import WIDTHS
from isobit.errors import CheckpointError

FLOATS = ("F16", "BF16", "F32")
MARKERS = ("mcg", "mul1")
AGAIN = "download or convert the checkpoint again"
EMBEDDING_GROUP = 256  # values of one ring of a quantized embedding row


class MissingTensorError(CheckpointError):
    """The folder does not hold a tensor that the model needs."""


@dataclass(frozen=True)
class LinearLayout:
    """A linear layer as stored: its tensors by part ("trellis", "suh", ..., or "weight" and "bias").

    bits and codebook are None for a plain weight. A weight that is a slice of a fused expert tensor has `rows`: its
    first row and row count in that tensor, leading axes taken together.
    """

    group: TensorGroup
    parts: dict[str, TensorInfo]
    bits: float | None = None
    codebook: str | None = None
    rows: tuple[int, int] | None = None

    @property
    def quantized(self) -> bool:
        return self.bits is not None

    @property
    def stored_bytes(self) -> int:
        if self.rows is not None:
            weight = self.parts["weight"]
            return weight.nbytes // math.prod(weight.shape[:-1]) * self.rows[1]
        return sum(info.nbytes for info in self.parts.values())

    @property
    def resident_bytes(self) -> int:
        """Memory that the loaded layer takes: a trellis as it is, anything plain widened to float32."""
        if self.quantized:
            return self.stored_bytes
        return 4 * self.group.in_features * self.group.out_features


@dataclass(frozen=True)
class EmbeddingLayout:
    """Token embeddings as stored: "weight", or "trellis" and "signs" with `bits` set."""

    group: TensorGroup
    parts: dict[str, TensorInfo]
    bits: int | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(info.nbytes for info in self.parts.values())


@dataclass(frozen=True)
class NgramLayout:
    """An n-gram table as stored: its shards in order, and its small tensors by part ("offsets", "sizes", ...)."""

    group: TensorGroup
    shards: tuple[TensorInfo, ...]
    parts: dict[str, TensorInfo]
    bits: int | None = None

    @property
    def rows(self) -> int:
        return sum(shard.shape[0] for shard in self.shards)

    @property
    def stored_bytes(self) -> int:
        return sum(info.nbytes for info in (*self.shards, *self.parts.values()))


def linear_layout(store: TensorStore, name: str, group: TensorGroup) -> LinearLayout:
    """How the linear layer `name` (as the files spell it) is stored; `group` gives its unpadded sizes."""
    trellis, weight = f"{name}.trellis" in store, f"{name}.weight" in store
    if trellis and weight:
        raise CheckpointError(
            f"{store.folder}: {name} has both a trellis and a weight, expected one; remove the file that does not "
            "belong to this checkpoint"
        )
    if trellis:
        return _quantized_linear(store, name, group)
    fused = _fused_expert(store, name, group)
    if not weight and fused is not None:
        return fused
    info = _require(store, f"{name}.weight", f"no {name}.trellis or {name}.weight")
    _check_dtype(info, FLOATS)
    n, k = group.out_features, group.in_features
    if info.shape not in ((n, k), (padded(n), padded(k))):
        raise _wrong_shape(info, [n, k])
    parts = {"weight": info}
    bias = _bias(store, name, group)
    return LinearLayout(group, parts | ({"bias": bias} if bias else {}))


def vector_layout(store: TensorStore, name: str, shape: Sequence[int] | None = None) -> TensorInfo:
    """The one tensor of a vector group; size-1 axes of `shape` may be missing."""
    info = _require(store, name, f"no tensor {name}")
    _check_dtype(info, FLOATS)
    squeezed = tuple(size for size in shape or () if size != 1)
    if shape is not None and info.shape != tuple(shape) and info.shape != squeezed:
        raise _wrong_shape(info, list(shape))
    return info


def embedding_layout(store: TensorStore, name: str, group: TensorGroup) -> EmbeddingLayout:
    """How the token embeddings are stored; a trellis goes before a weight, as in exllamav3."""
    vocabulary, hidden = group.out_features, group.in_features
    if f"{name}.trellis" not in store:
        info = _require(store, f"{name}.weight", f"no {name}.weight or {name}.trellis")
        _check_dtype(info, FLOATS)
        _check_shape(info, [vocabulary, hidden])
        return EmbeddingLayout(group, {"weight": info})
    trellis = store.info(f"{name}.trellis")
    signs = _require(store, f"{name}.signs", f"{name}.trellis without {name}.signs")
    groups = -(-hidden // EMBEDDING_GROUP)
    _check_dtype(trellis, ("I16",))
    _check_dtype(signs, ("F16",))
    _check_shape(signs, [groups, EMBEDDING_GROUP])
    words = trellis.shape[1] // groups if len(trellis.shape) == 2 else 0
    bits = (words - 1) // 16
    if not 1 <= bits <= 8 or trellis.shape != (vocabulary, groups * (1 + 16 * bits)):
        raise _wrong_shape(trellis, f"[{vocabulary}, {groups} * (1 + 16 * bits)] with bits from 1 to 8")
    return EmbeddingLayout(group, {"trellis": trellis, "signs": signs}, bits)


def ngram_layout(store: TensorStore, name: str, group: TensorGroup, config: FlashNextConfig) -> NgramLayout:
    """How an n-gram table is stored; a trellis goes before a weight, as in exllamav3."""
    shards, quantized = _shards(store, name, "trellis"), True
    if not shards:
        shards, quantized = _shards(store, name, "weight"), False
    if not shards:
        raise MissingTensorError(
            f"{store.folder}: no {name}.trellis, .weight or .shard_0 of either in its *.safetensors files; the n-gram "
            f"table is often a file of its own (ngram_embedding.safetensors); {AGAIN}"
        )
    bits = _check_shards(shards, group.in_features, quantized)
    parent = name.rpartition(".")[0]
    spelling = {
        "offsets": (f"{name}.head_offsets", f"{parent}.ngram_heads_offsets"),
        "sizes": (f"{name}.head_vocab_sizes", f"{parent}.ngram_heads_vocab_sizes"),
        "multipliers": (f"{name}.layer_multipliers", f"{parent}.layer_multipliers"),
    }
    parts = {part: _first(store, names) for part, names in spelling.items()}
    for part, info in parts.items():
        _check_dtype(info, ("I64", "I32"))
        _check_shape(info, [config.ngram_size if part == "multipliers" else config.ngram_heads])
    bias = f"{name}.head_bias"
    if bias in store:
        parts["bias"] = store.info(bias)
        _check_dtype(parts["bias"], FLOATS)
        _check_shape(parts["bias"], [config.ngram_heads, config.ngram_width])
    return NgramLayout(group, tuple(shards), parts, bits)


def padded(size: int) -> int:
    """The next multiple of 128."""
    return -(-size // 128) * 128


def _quantized_linear(store: TensorStore, name: str, group: TensorGroup) -> LinearLayout:
    trellis = store.info(f"{name}.trellis")
    _check_dtype(trellis, ("I16",))
    k, n = padded(group.in_features), padded(group.out_features)
    bits = trellis.shape[-1] / 16 if len(trellis.shape) == 3 else 0
    if trellis.shape[:-1] != (k // 16, n // 16) or bits not in WIDTHS:
        raise _wrong_shape(trellis, f"[{k // 16}, {n // 16}, 16 * bits] with bits in {', '.join(map(str, WIDTHS))}")
    codebook = _codebook(store, name)
    if bits % 1 and codebook != "mul1":
        raise CheckpointError(
            f"{trellis.file}: {name} has {bits} bits with codebook {codebook}, expected mul1 for half widths; {AGAIN}"
        )
    parts = {"trellis": trellis}
    for scale, signs, size in (("suh", "su", k), ("svh", "sv", n)):
        part = scale if f"{name}.{scale}" in store else signs
        info = _require(store, f"{name}.{part}", f"{name}.trellis without {name}.{scale} or {name}.{signs}")
        _check_dtype(info, ("F16",) if part == scale else ("I16", "U16"))
        _check_shape(info, [size if part == scale else size // 16])
        parts[part] = info
    bias = _bias(store, name, group)
    if bias is not None:
        parts["bias"] = bias
    return LinearLayout(group, parts, int(bits) if bits % 1 == 0 else bits, codebook)


def _codebook(store: TensorStore, name: str) -> str:
    found = [marker for marker in MARKERS if f"{name}.{marker}" in store]
    if len(found) > 1:
        raise CheckpointError(f"{store.folder}: {name} has both an mcg and a mul1 marker, expected one; {AGAIN}")
    if not found:
        return "3inst"
    info = store.info(f"{name}.{found[0]}")
    if info.dtype not in ("I32", "U32") or math.prod(info.shape) != 1:
        raise _wrong_shape(info, "I32 []")
    value = int(store.read(info.name).view(np.uint32).reshape(())[()])
    if value != MULTIPLIERS[found[0]]:
        raise CheckpointError(
            f"{info.file}: {info.name} is {value:#010x}, expected {MULTIPLIERS[found[0]]:#010x}; "
            "isobit does not know this codebook"
        )
    return found[0]


def _bias(store: TensorStore, name: str, group: TensorGroup) -> TensorInfo | None:
    if f"{name}.bias" not in store:
        if group.bias:
            raise MissingTensorError(
                f"{store.folder}: no tensor {name}.bias, but the config has attention_bias; {AGAIN}"
            )
        return None
    info = store.info(f"{name}.bias")
    _check_dtype(info, FLOATS)
    if info.shape not in ((group.out_features,), (padded(group.out_features),)):
        raise _wrong_shape(info, [group.out_features])
    return info


def _fused_expert(store: TensorStore, name: str, group: TensorGroup) -> LinearLayout | None:
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", name)
    if match is None:
        return None
    prefix, expert, projection = match[1], int(match[2]), match[3]
    fused = f"{prefix}.down_proj" if projection == "down" else f"{prefix}.gate_up_proj"
    if fused not in store:
        return None
    info = store.info(fused)
    _check_dtype(info, FLOATS)
    rows, copies = group.out_features, 1 if projection == "down" else 2
    if len(info.shape) != 3 or info.shape[1:] != (copies * rows, group.in_features) or info.shape[0] <= expert:
        raise _wrong_shape(info, f"[experts, {copies * rows}, {group.in_features}] with more than {expert} experts")
    first = expert * copies * rows + (rows if projection == "up" else 0)
    return LinearLayout(group, {"weight": info}, rows=(first, rows))


def _shards(store: TensorStore, name: str, suffix: str) -> list[TensorInfo]:
    shards: list[TensorInfo] = []
    while f"{name}.shard_{len(shards)}.{suffix}" in store:
        shards.append(store.info(f"{name}.shard_{len(shards)}.{suffix}"))
    pattern = re.compile(re.escape(name) + r"\.shard_(\d+)\." + suffix)
    last = max((int(match[1]) for match in map(pattern.fullmatch, store.names_under(name)) if match), default=-1)
    if last >= len(shards):
        raise MissingTensorError(
            f"{store.folder}: no tensor {name}.shard_{len(shards)}.{suffix}, but shard_{last} is there; {AGAIN}"
        )
    if not shards and f"{name}.{suffix}" in store:
        shards.append(store.info(f"{name}.{suffix}"))
    return shards


def _check_shards(shards: list[TensorInfo], width: int, quantized: bool) -> int | None:
    first = shards[0]
    _check_dtype(first, ("I16",) if quantized else FLOATS)
    if len(first.shape) != 2:
        raise _wrong_shape(first, "a matrix of rows")
    for shard in shards:
        if shard.shape[1:] != first.shape[1:] or shard.dtype != first.dtype:
            raise _wrong_shape(shard, f"{first.dtype} [rows, {first.shape[1]}] as {first.name}")
        too_many, too_few = shard.shape[0] > first.shape[0], shard.shape[0] < first.shape[0]
        if too_many or (too_few and shard is not shards[-1]):
            raise _wrong_shape(shard, f"{first.shape[0]} rows as {first.name} (only the last shard may be shorter)")
    words = first.shape[1]
    if not quantized:
        if words != width:
            raise _wrong_shape(first, f"[rows, {width}]")
        return None
    bits = (words - 1) * 16 // width
    if not 1 <= bits <= 8 or 16 * (words - 1) != bits * width:
        raise _wrong_shape(first, f"[rows, 1 + {width} * bits / 16] with bits from 1 to 8")
    return bits


def _require(store: TensorStore, name: str, problem: str) -> TensorInfo:
    if name not in store:
        raise MissingTensorError(f"{store.folder}: {problem} in its *.safetensors files; {AGAIN}")
    return store.info(name)


def _first(store: TensorStore, names: Iterable[str]) -> TensorInfo:
    for name in names:
        if name in store:
            return store.info(name)
    raise MissingTensorError(f"{store.folder}: no tensor {' or '.join(names)} in its *.safetensors files; {AGAIN}")


def _check_dtype(info: TensorInfo, expected: Sequence[str]) -> None:
    if info.dtype not in expected:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} is {info.dtype}, expected {' or '.join(expected)}; {AGAIN}"
        )


def _check_shape(info: TensorInfo, expected: list[int]) -> None:
    if list(info.shape) != expected:
        raise _wrong_shape(info, expected)


def _wrong_shape(info: TensorInfo, expected: object) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name} is {info.dtype} {list(info.shape)}, expected {expected} by config.json; "
        f"{AGAIN}"
    )
