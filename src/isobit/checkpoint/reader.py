"""A checkpoint folder as host weights: canonical names (`names.py`) in, the types of `weights.py` out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, cast

import numpy as np

from isobit.checkpoint.config import load_config, load_stop_tokens
from isobit.checkpoint.groups import (
    AGAIN,
    EmbeddingLayout,
    LinearLayout,
    NgramLayout,
    embedding_layout,
    linear_layout,
    ngram_layout,
    vector_layout,
)
from isobit.checkpoint.names import PREFIXES, TensorGroup, canonical_name, is_outside, required_tensors
from isobit.checkpoint.store import Each, TensorInfo, TensorStore
from isobit.checkpoint.trellis import dequantize_embedding
from isobit.checkpoint.weights import (
    Exl3Linear,
    Linear,
    NgramTable,
    PlainEmbedding,
    PlainLinear,
    QuantizedEmbedding,
    all_finite,
)
from isobit.errors import CheckpointError

PART_BYTES = 8 << 20

Projection = Literal["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class ExpertLinears:
    """The routed experts of one layer: a linear layer an expert, in ascending id."""

    gate: list[Linear]
    up: list[Linear]
    down: list[Linear]


class Checkpoint:
    """A folder with `config.json` and *.safetensors, EXL3 or plain Hugging Face, read lazily and never changed.

    `config` is what the folder really holds: without the MTP head if the files hold none, which `lacks_mtp` then says.
    Names are canonical or as the files spell them. What a method returns is owned and writable, except for the
    read-only memory maps of the token embeddings and n-gram tables. Every method raises CheckpointError for what is
    missing, has another shape or dtype than the config demands, or holds values that are not finite, except for
    the rows of n-gram tables.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        declared = load_config(folder)
        self.stop_tokens = load_stop_tokens(folder, declared)
        self.store = TensorStore(folder)
        self.prefix = _text_prefix(self.store)
        self.lacks_mtp = declared.has_mtp and not self.store.names_under("mtp.")
        self.config = declared.model_copy(update={"mtp_num_hidden_layers": 0}) if self.lacks_mtp else declared

    @property
    def has_mtp(self) -> bool:
        """Whether the config names an MTP head and the files hold one."""
        return self.config.has_mtp

    @cached_property
    def groups(self) -> dict[str, TensorGroup]:
        """What the model needs, by canonical name."""
        return {group.name: group for group in required_tensors(self.config)}

    def file_name(self, name: str) -> str:
        """A name as this folder spells it."""
        name = canonical_name(name)
        return name if is_outside(name) else self.prefix + name

    def has(self, name: str) -> bool:
        """Whether the files hold the tensor `name`, or any tensor of the group `name`."""
        spelled = self.file_name(name)
        return spelled in self.store or bool(self.store.names_under(f"{spelled}."))

    def linear(self, name: str, in_features: int | None = None, out_features: int | None = None) -> Linear:
        """One linear layer; its unpadded sizes are the config's unless they are given.

        `lm_head` falls back to the token embeddings when the config ties them.
        """
        if canonical_name(name) == "lm_head" and not self.has("lm_head") and self.config.tie_word_embeddings:
            return self._tied_head()
        layout = self.linear_layout(name, in_features, out_features)
        return self._quantized(layout) if layout.quantized else self._plain(layout)

    def head(self) -> Linear:
        """The output head: `lm_head`, or the token embeddings when the config ties them and no `lm_head` is there."""
        return self.linear("lm_head")

    def linear_layout(self, name: str, in_features: int | None = None, out_features: int | None = None) -> LinearLayout:
        """How a linear layer is stored, from the headers."""
        group = self._linear_group(canonical_name(name), in_features, out_features)
        return linear_layout(self.store, self.file_name(name), group)

    def experts(self, layer: int | str, each: Each = map) -> ExpertLinears:
        """The routed experts of a layer (from 0), or of the block `layer` ("mtp.layers.0.mlp").

        each: a `map`, whose calls may go to several threads.
        """
        block = f"layers.{layer}.mlp" if isinstance(layer, int) else layer

        def all_experts(projection: Projection) -> list[Linear]:
            names = [f"{block}.experts.{e}.{projection}" for e in range(self.config.num_experts)]
            return list(each(self.linear, names))

        return ExpertLinears(all_experts("gate_proj"), all_experts("up_proj"), all_experts("down_proj"))

    def expert_source(self, layer: int | str, expert: int, projection: Projection) -> np.ndarray:
        """float32 [N, K], the unquantized weight of one expert's projection, stored by itself or fused."""
        block = f"layers.{layer}.mlp" if isinstance(layer, int) else layer
        return self.source(f"{block}.experts.{expert}.{projection}").weight

    def source(self, name: str) -> PlainLinear:
        """One unquantized linear layer, its weight float32; CheckpointError if the folder holds it quantized."""
        layer = self.linear(name)
        if isinstance(layer, Exl3Linear):
            raise CheckpointError(
                f"{self.folder}: {layer.name} is quantized already, expected a plain weight; start from the original "
                "Hugging Face folder"
            )
        return replace(layer, weight=layer.weight.astype(np.float32, copy=False))

    def vector(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """float32, a norm's weight, `A_log`, `dt_bias` or a convolution; size-1 axes of matrices are dropped.

        `name` is the group's ("layers.0.linear_attn.norm") or the tensor's (with ".weight"). The expected shape is the
        config's unless it is given.
        """
        canonical = canonical_name(name)
        group = self.groups.get(canonical) or self.groups.get(canonical.removesuffix(".weight"))
        if group is not None and group.kind == "vector":
            canonical, shape = group.tensor, shape or group.shape
        info = vector_layout(self.store, self.file_name(canonical), shape)
        return self._floats(info, [size for size in shape or info.shape if size != 1] or [1])

    def embedding(self, each: Each = map) -> PlainEmbedding | QuantizedEmbedding:
        """The token embeddings, memory-mapped, all of them looked at.

        each: a `map`, whose calls may go to several threads.
        """
        layout = self.embedding_layout()
        name, hidden = self.file_name("embed_tokens"), self.config.hidden_size
        if layout.bits is None:
            info = layout.parts["weight"]
            rows, bfloat16 = self.store.map(info.name), info.dtype == "BF16"
            return PlainEmbedding(name, self._finite(rows, info, bfloat16, each), hidden, bfloat16)
        signs = self._finite(self.store.read(layout.parts["signs"].name), layout.parts["signs"])
        trellis = self.store.map(layout.parts["trellis"].name)
        scales = trellis[:, :: 1 + 16 * layout.bits].view(np.float16)
        self._finite(scales, layout.parts["trellis"], each=each)
        return QuantizedEmbedding(name, trellis, signs, layout.bits, hidden)

    def embedding_layout(self) -> EmbeddingLayout:
        """How the token embeddings are stored, from the headers."""
        return embedding_layout(self.store, self.file_name("embed_tokens"), self.groups["embed_tokens"])

    def has_ngram(self, layer: int | str) -> bool:
        """Whether an n-gram embedding is added before a layer, given from 0 or by any canonical name inside it."""
        return _layer_number(layer) in self.config.ple_layers

    def ngram_table(self, layer: int | str) -> NgramTable:
        """The n-gram table of a layer, memory-mapped: none of its rows is read here.

        layer: from 0, or any canonical name inside it.
        """
        layout = self.ngram_layout(layer)
        name = self.file_name(layout.group.name)
        offsets, sizes, multipliers = (self._integers(layout.parts[p]) for p in ("offsets", "sizes", "multipliers"))
        rows = layout.rows
        if (sizes < 1).any() or (offsets < 0).any() or (offsets > rows - sizes).any():
            raise CheckpointError(
                f"{layout.parts['offsets'].file}: {name} has head offsets {offsets.tolist()} and sizes "
                f"{sizes.tolist()}, expected ranges inside its {rows} rows; {AGAIN}"
            )
        bias = layout.parts.get("bias")
        return NgramTable(
            name=name,
            shards=tuple(self.store.map(shard.name) for shard in layout.shards),
            shard_rows=layout.shards[0].shape[0],
            width=layout.group.in_features,
            bits=layout.bits,
            bfloat16=layout.shards[0].dtype == "BF16",
            offsets=offsets,
            sizes=sizes,
            multipliers=multipliers,
            head_bias=None if bias is None else self._halves(bias),
        )

    def ngram_layout(self, layer: int | str) -> NgramLayout:
        """How a layer's n-gram table is stored, from the headers."""
        number = _layer_number(layer)
        if number not in self.config.ple_layers:
            raise CheckpointError(f"{self.folder}: layer {layer} has no n-gram embedding by config.json")
        group = self.groups[f"layers.{number}.ple.ple_embedding.ngram_embedding"]
        return ngram_layout(self.store, self.file_name(group.name), group, self.config)

    def close(self) -> None:
        """Close the files; memory maps that were given out stay valid."""
        self.store.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _linear_group(self, name: str, in_features: int | None, out_features: int | None) -> TensorGroup:
        group = self.groups.get(name)
        if name == "lm_head":
            group = TensorGroup(name, "linear", "head", self.config.hidden_size, self.config.vocab_size)
        if group is None or group.kind != "linear":
            if in_features is None or out_features is None:
                raise CheckpointError(f"{self.folder}: {name} is no linear layer of this model by config.json")
            return TensorGroup(name, "linear", "mtp", in_features, out_features, quantizable=True)
        if in_features is None and out_features is None:
            return group
        sizes = {"in_features": in_features or group.in_features, "out_features": out_features or group.out_features}
        return TensorGroup(**{**vars(group), **sizes})

    def _quantized(self, layout: LinearLayout) -> Exl3Linear:
        group, parts = layout.group, layout.parts
        trellis = self.store.read(parts["trellis"].name)
        return Exl3Linear(
            name=parts["trellis"].name.removesuffix(".trellis"),
            trellis=trellis,
            suh=self._scales(parts, "suh", "su"),
            svh=self._scales(parts, "svh", "sv"),
            bias=self._halves(parts["bias"], trellis.shape[1] * 16) if "bias" in parts else None,
            bits=cast(float, layout.bits),
            codebook=cast(str, layout.codebook),
            in_features=group.in_features,
            out_features=group.out_features,
        )

    def _plain(self, layout: LinearLayout) -> PlainLinear:
        group, parts = layout.group, layout.parts
        info, n, k = parts["weight"], group.out_features, group.in_features
        rows = layout.rows
        stored = self.store.read(info.name) if rows is None else self.store.read_rows(info.name, *rows)
        weight = self._finite(_held(stored, info), info)[:n, :k]
        bias = self._floats(parts["bias"])[:n] if "bias" in parts else None
        name = info.name.removesuffix(".weight") if rows is None else self.file_name(group.name)
        return PlainLinear(name, np.ascontiguousarray(weight), None if bias is None else np.ascontiguousarray(bias))

    def _tied_head(self) -> PlainLinear:
        embedding = self.embedding()
        if isinstance(embedding, QuantizedEmbedding):
            return PlainLinear(embedding.name, np.ascontiguousarray(dequantize_embedding(embedding), np.float32))
        info = self.embedding_layout().parts["weight"]
        return PlainLinear(embedding.name, self._finite(_held(self.store.read(info.name), info), info))

    def _scales(self, parts: dict[str, TensorInfo], scale: str, signs: str) -> np.ndarray:
        if scale in parts:
            return self._finite(self.store.read(parts[scale].name), parts[scale])
        words = self.store.read(parts[signs].name).view(np.uint8)
        negative = np.unpackbits(words, bitorder="little")
        return np.where(negative, np.float16(-1), np.float16(1))

    def _halves(self, info: TensorInfo, size: int | None = None) -> np.ndarray:
        """float16, rounded if stored wider and refused if that overflows; zeros up to `size` values."""
        with np.errstate(over="ignore"):
            values = self._finite(self._floats(info).astype(np.float16), info)
        if size is None or len(values) == size:
            return values
        return np.concatenate([values, np.zeros(size - len(values), np.float16)])

    def _floats(self, info: TensorInfo, shape: list[int] | None = None) -> np.ndarray:
        values = self._finite(_widen(self.store.read(info.name), info), info)
        return values if shape is None else values.reshape(shape)

    def _integers(self, info: TensorInfo) -> np.ndarray:
        return self.store.read(info.name).astype(np.int64)

    def _finite(self, values: np.ndarray, info: TensorInfo, bfloat16: bool = False, each: Each = map) -> np.ndarray:
        if not all(each(partial(all_finite, bfloat16=bfloat16), _in_parts(values))):
            raise CheckpointError(
                f"{info.file}: tensor {info.name} holds NaN or infinite values, expected finite ones; {AGAIN}"
            )
        return values


def _layer_number(layer: int | str) -> int | None:
    if isinstance(layer, int):
        return layer
    match = re.match(r"layers\.(\d+)(\.|$)", canonical_name(layer))
    return int(match[1]) if match else None


def _text_prefix(store: TensorStore) -> str:
    found = [p for p in PREFIXES if any(f"{p}embed_tokens.{part}" in store for part in ("weight", "trellis"))]
    if not found:
        spelled = ", ".join(f"{prefix}embed_tokens" for prefix in PREFIXES)
        raise CheckpointError(f"{store.folder}: holds no token embeddings, expected one of {spelled}; {AGAIN}")
    if len(found) > 1:
        raise CheckpointError(
            f"{store.folder}: holds both {found[0]}embed_tokens and {found[1]}embed_tokens, expected one; remove the "
            "file that does not belong to this checkpoint"
        )
    return found[0]


def _held(stored: np.ndarray, info: TensorInfo) -> np.ndarray:
    """A plain weight as `PlainLinear` has it: float16 as it is, all else float32."""
    return stored if info.dtype == "F16" else _widen(stored, info)


def _in_parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """The array, cut along its first axis into parts that are worth a thread's call each."""
    rows = max(1, PART_BYTES * len(values) // max(values.nbytes, 1))
    return (values[first : first + rows] for first in range(0, len(values), rows))


def _widen(stored: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Owned float32; every widening is exact."""
    if info.dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)
