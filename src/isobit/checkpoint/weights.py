"""Host-side weights as the checkpoint stores them: what `checkpoint` hands to `ops` to prepare for a device."""

from dataclasses import dataclass

import numpy as np

CODEBOOKS = ("3inst", "mcg", "mul1")
WIDTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Exl3Linear:
    """One trellis-quantized linear layer, K inputs by N outputs as stored (multiples of 128).

    trellis: int16 [K/16, N/16, 16*bits]; suh: float16 [K]; svh: float16 [N]; bias: float16 [N] or None.
    in_features, out_features: the unpadded sizes; inputs beyond in_features are zero, outputs beyond are dropped.
    """

    name: str
    trellis: np.ndarray
    suh: np.ndarray
    svh: np.ndarray
    bias: np.ndarray | None
    bits: float
    codebook: str
    in_features: int
    out_features: int

    @property
    def k(self) -> int:
        return self.trellis.shape[0] * 16

    @property
    def n(self) -> int:
        return self.trellis.shape[1] * 16


@dataclass(frozen=True)
class PlainLinear:
    """An unquantized linear layer, bias: float32 [N] or None.

    weight: float32 [N, K], or float16 as it is stored (bf16 widens exactly).
    """

    name: str
    weight: np.ndarray
    bias: np.ndarray | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


Linear = Exl3Linear | PlainLinear

HALF_INFINITY, BFLOAT16_INFINITY = 0x7C00, 0x7F80
SCANNED_BYTES = 1 << 19  # at a time, so that what is made of them stays in the processor's cache


def all_finite(values: np.ndarray, bfloat16: bool = False) -> bool:
    """Whether no value is NaN or infinite; of 16 bits by their bits, as NumPy widens each of them.

    bfloat16: whether values are uint16 that hold bfloat16 bits. Takes little memory beside them.
    """
    values = np.atleast_1d(values)
    rows = max(1, SCANNED_BYTES * len(values) // max(values.nbytes, 1))
    pieces = (values[first : first + rows] for first in range(0, len(values), rows))
    if bfloat16:
        return all(_below(piece, BFLOAT16_INFINITY) for piece in pieces)
    if values.dtype == np.float16:
        return all(_below(piece, HALF_INFINITY) for piece in pieces)
    return all(bool(np.isfinite(piece).all()) for piece in pieces)


def _below(values: np.ndarray, infinity: int) -> bool:
    """Whether the bits of 16-bit floats, without their signs, are all below those of infinity."""
    sizes = values.view(np.uint16) & np.uint16(0x7FFF)
    return int(np.maximum.reduce(sizes, axis=None, initial=0)) < infinity


@dataclass(frozen=True)
class PlainEmbedding:
    """Token embeddings as stored. rows: float16 or float32 [vocab, hidden], or uint16 holding bfloat16 bits.

    `bfloat16` says which of the two a 16-bit array holds.
    """

    name: str
    rows: np.ndarray
    hidden: int
    bfloat16: bool = False


@dataclass(frozen=True)
class QuantizedEmbedding:
    """Token embeddings in the ring codec. trellis: int16 [vocab, G*(1+16*bits)]; signs: float16 [G, 256]."""

    name: str
    trellis: np.ndarray
    signs: np.ndarray
    bits: int
    hidden: int


@dataclass(frozen=True)
class NgramTable:
    """The n-gram table of one layer, memory-mapped; `shards` are read-only maps of consecutive row ranges.

    Quantized: shards int16 [rows, 1 + width*bits/16], `bits` set. Plain: float16 or float32 [rows, width], or uint16
    holding bfloat16 bits with `bfloat16` set; bits None. All shards but the last hold `shard_rows` rows.
    offsets, sizes: int64 [heads]; multipliers: int64 [order]; head_bias: float16 [heads, width] or None.
    """

    name: str
    shards: tuple[np.ndarray, ...]
    shard_rows: int
    width: int
    bits: int | None
    bfloat16: bool
    offsets: np.ndarray
    sizes: np.ndarray
    multipliers: np.ndarray
    head_bias: np.ndarray | None

    @property
    def heads(self) -> int:
        return len(self.offsets)
