"""What a synthetic checkpoint is a function of: its options, declared once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True)
class SynthOptions:
    """The options of a synthetic checkpoint: same options, same bytes.

    preset: a key of PRESETS. layers: decoder layers, every fourth one attention. seed: keys every value.
    codebook: one of CODEBOOKS, or "mixed" (chosen by each tensor's name). bits: the width of every quantized linear,
    or "mixed"; None keeps the preset's widths. head_bits, mtp_bits: the same for the head and the MTP head alone.
    ngram_bits: 1 to 8, or 16 for a plain fp16 table. ngram_rows: about how many rows the n-gram table has.
    ngram_shards: tensors that it is split into. embedding_bits: 1 to 8; None leaves the token embeddings fp16.
    biases: attention projections get a bias. packed_signs: each linear stores one of its scales as packed signs (`su`
    or `sv`). plain: patterns of names without prefix ("layers.0.mlp.*") whose linears stay plain; None: the preset's.
    mtp: whether there is an MTP head. predictable: it predicts more than half of the next tokens. overrides: fields of
    the text config.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    preset: str = "demo"
    layers: int | None = None
    seed: int = 0
    codebook: str = "mul1"
    bits: float | str | None = None
    head_bits: float | str | None = None
    mtp_bits: float | str | None = None
    ngram_bits: int | None = None
    ngram_rows: int | None = None
    ngram_shards: int = 1
    embedding_bits: int | None = None
    biases: bool = False
    packed_signs: bool = False
    plain: tuple[str, ...] | None = None
    mtp: bool = True
    predictable: bool = False
    overrides: Mapping[str, Any] | None = None
