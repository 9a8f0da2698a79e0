"""The tensors of a synthetic checkpoint, and the distribution of each.

Gains are chosen so that activations stay near 1 through any number of layers, logits have a standard deviation around
2, and every gate, router and score spreads: a linear turns inputs of variance 1 into outputs of deviation `gain`.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import numpy as np

from isobit.checkpoint import ngram_constants, synth_predictable
from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.groups import padded
from isobit.checkpoint.names import TensorGroup, published_name, required_tensors
from isobit.checkpoint.synth_values import Fill, Tensor, bell, between, bits, given, rings, signed_between
from isobit.checkpoint.trellis import GROUP, MULTIPLIERS, TILE
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS

MIXED = "mixed"
PLAIN_TABLE = 16  # the n-gram "width" that stands for an unquantized table

# The deviation of a codebook's values over all states; dividing by it gives every codebook outputs of one size.
CODEBOOK_SPREAD = {"3inst": 1.2437, "mcg": 1.2441, "mul1": 1.0003}

# By the last part of the name.
GAINS = {
    "lm_head": 4.0,
    "input_mix_weight_down": 4.0,
    "input_mix_weight_up": 2.0,
    "block_inject_weight": 4.0,
    "in_proj_qkv": 2.0,
    "in_proj_z": 2.0,
    "in_proj_a": 1.0,
    "in_proj_b": 2.0,
    "out_proj": 1.0,
    "q_proj": 2.0,
    "k_proj": 2.0,
    "v_proj": 2.0,
    "o_proj": 1.5,
    "index_qk_proj": 2.0,
    "gate": 4.0,
    "gate_proj": 2.0,
    "up_proj": 2.0,
    "down_proj": 1.5,
    "shared_expert_gate": 4.0,
    "key_proj": 1.0,
    "value_proj": 1.0,
    "fc_embedding": 1.0,
    "fc_hidden": 1.0,
}

# By the last parts of the name; attention's norms are large, so that it picks among its keys instead of averaging.
VECTORS: dict[str, tuple[str, Fill]] = {
    "linear_attn.conv1d": ("BF16", bell(0.6)),
    "linear_attn.A_log": ("F32", between(-4.0, 1.5)),
    "linear_attn.dt_bias": ("BF16", between(-3.0, 1.0)),
    "linear_attn.norm": ("BF16", between(0.6, 1.4)),
    "self_attn.q_norm": ("F16", between(0.2, 0.8)),
    "self_attn.k_norm": ("F16", between(0.2, 0.8)),
    "ple.conv1d": ("F16", bell(0.4)),
}
OTHER_VECTORS: tuple[str, Fill] = ("F16", between(-0.3, 0.3))


@dataclass(frozen=True)
class Widths:
    """Bits a value by kind of tensor, MIXED = chosen by each tensor's name. embedding: None = plain fp16."""

    experts: float | str
    head: float | str
    mtp: float | str
    others: float | str
    ngram: int
    embedding: int | None

    def of(self, group: TensorGroup) -> float | str:
        by_class = {"experts": self.experts, "head": self.head, "mtp": self.mtp}
        return by_class.get(group.tensor_class, self.others)


@dataclass(frozen=True)
class Layout:
    """Which tensors a checkpoint has. plain: patterns of canonical names of linears that stay plain.

    predictable: as synth_predictable describes it.
    """

    config: FlashNextConfig
    seed: int
    codebook: str
    widths: Widths
    ngram_shards: int
    packed_signs: bool
    plain: tuple[str, ...]
    predictable: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by published name, in the order of the forward pass, without the n-gram tables."""
        kinds = {"embedding": self._embedding, "linear": self._linear, "vector": self._vector}
        return {
            published_name(name): synth_predictable.predictable_tensor(name, tensor) if self.predictable else tensor
            for group in required_tensors(self.config)
            if group.kind != "ngram"
            for name, tensor in kinds[group.kind](group)
        }

    def table(self) -> dict[str, Tensor]:
        """The tensors of the n-gram tables by published name."""
        tables = [group for group in required_tensors(self.config) if group.kind == "ngram"]
        return {
            published_name(name): tensor
            for ordinal, group in enumerate(tables)
            for name, tensor in self._ngram(group, ordinal)
        }

    @property
    def _plain(self) -> tuple[str, ...]:
        return self.plain + synth_predictable.PLAIN if self.predictable else self.plain

    def _embedding(self, group: TensorGroup) -> Iterator[tuple[str, Tensor]]:
        rows, hidden, width = group.out_features, group.in_features, self.widths.embedding
        if width is None:
            yield f"{group.name}.weight", Tensor("F16", (rows, hidden), bell(0.8))
            return
        groups, words = -(-hidden // GROUP), 1 + GROUP // 16 * width
        yield f"{group.name}.trellis", Tensor("I16", (rows, groups * words), rings(words), words)
        yield f"{group.name}.signs", Tensor("F16", (groups, GROUP), signed_between(1.0, 1.0), groups * GROUP)

    def _vector(self, group: TensorGroup) -> Iterator[tuple[str, Tensor]]:
        vectors = VECTORS | synth_predictable.VECTORS if self.predictable else VECTORS
        dtype, fill = vectors.get(".".join(group.name.split(".")[-2:]), OTHER_VECTORS)
        yield group.tensor, Tensor(dtype, group.shape, fill)

    def _linear(self, group: TensorGroup) -> Iterator[tuple[str, Tensor]]:
        gains = GAINS | synth_predictable.GAINS if self.predictable else GAINS
        spread = gains[group.name.rpartition(".")[2]] / math.sqrt(group.in_features)
        plain = not group.quantizable or any(fnmatchcase(group.name, pattern) for pattern in self._plain)
        if plain:
            yield f"{group.name}.weight", Tensor("F16", (group.out_features, group.in_features), bell(spread))
        else:
            yield from self._trellis(group, spread)
        if group.bias:
            size = group.out_features if plain else padded(group.out_features)
            yield f"{group.name}.bias", Tensor("F16", (size,), bell(0.2))

    def _trellis(self, group: TensorGroup, spread: float) -> Iterator[tuple[str, Tensor]]:
        name, k, n = group.name, padded(group.in_features), padded(group.out_features)
        codebook, width = self._variant(name, self.widths.of(group))
        yield f"{name}.trellis", Tensor("I16", (k // TILE, n // TILE, int(TILE * width)), bits)
        scale = spread / CODEBOOK_SPREAD[codebook]
        around_one, around_scale = signed_between(0.75, 1.25), signed_between(0.75 * scale, 1.25 * scale)
        packed = self._pick(name, "packed", ("su", "sv")) if self.packed_signs else None
        if packed == "su":
            yield f"{name}.su", Tensor("I16", (k // TILE,), bits)
        else:
            yield f"{name}.suh", Tensor("F16", (k,), around_scale if packed == "sv" else around_one, k)
        if packed == "sv":
            yield f"{name}.sv", Tensor("I16", (n // TILE,), bits)
        else:
            yield f"{name}.svh", Tensor("F16", (n,), around_scale, n)
        if codebook != "3inst":
            yield f"{name}.{codebook}", _marker(codebook)

    def _variant(self, name: str, width: float | str) -> tuple[str, float]:
        codebook = self.codebook
        if codebook == MIXED:
            half = width != MIXED and float(width) % 1
            codebook = "mul1" if half else self._pick(name, "codebook", CODEBOOKS)
        if width == MIXED:
            width = self._pick(name, "bits", [bits for bits in WIDTHS if codebook == "mul1" or bits % 1 == 0])
        return codebook, float(width)

    def _pick(self, name: str, what: str, choices):
        digest = hashlib.sha256(f"{self.seed}/{name}/{what}".encode()).digest()
        return choices[int.from_bytes(digest[:8], "little") % len(choices)]

    def _ngram(self, group: TensorGroup, ordinal: int) -> Iterator[tuple[str, Tensor]]:
        config, width = self.config, group.in_features
        sizes = ngram_constants.head_sizes(config.ngram_vocab_size_base, config.ngram_heads, ordinal)
        offsets = [sum(sizes[:head]) for head in range(len(sizes))]
        multipliers = ngram_constants.multipliers(config.vocab_size, config.ngram_size, config.seed, ordinal)
        plain = self.widths.ngram == PLAIN_TABLE
        owner, heads = (group.name.rpartition(".")[0], "ngram_heads") if plain else (group.name, "head")
        yield f"{owner}.{heads}_offsets", _integers(offsets)
        yield f"{owner}.{heads}_vocab_sizes", _integers(sizes)
        yield f"{owner}.layer_multipliers", _integers(multipliers)
        if not plain:
            yield f"{group.name}.head_bias", Tensor("F16", (len(sizes), width), bell(0.1))
        for suffix, rows in self._shards(padded_rows(sum(sizes), config.make_ngram_vocab_size_divisible_by)):
            if plain:
                yield f"{group.name}.{suffix}weight", Tensor("F16", (rows, width), bell(0.7))
            else:
                words = 1 + width * self.widths.ngram // 16
                yield f"{group.name}.{suffix}trellis", Tensor("I16", (rows, words), rings(words), words)

    def _shards(self, rows: int) -> Iterator[tuple[str, int]]:
        if self.ngram_shards == 1:
            yield "", rows
            return
        each = -(-rows // self.ngram_shards)
        for shard in range(-(-rows // each)):
            yield f"shard_{shard}.", min(each, rows - shard * each)


def padded_rows(rows: int, divisor: int) -> int:
    return -(-rows // divisor) * divisor


@cache
def _marker(codebook: str) -> Tensor:
    return Tensor("I32", (), given(np.array([MULTIPLIERS[codebook]], np.uint32).view(np.int32).tolist(), np.int32))


def _integers(numbers: list[int]) -> Tensor:
    return Tensor("I64", (len(numbers),), given(numbers, np.int64))
