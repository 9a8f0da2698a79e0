"""Linear layers on the device: what their kernels read, and how stored weights become it."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from isobit.checkpoint.weights import Exl3Linear, Linear, PlainLinear
from isobit.cuda import memory
from isobit.cuda.staging import upload_one
from isobit.errors import CheckpointError
from isobit.ops.linear.stored import check_plain, check_trellis, narrowest_format, padded_bias
from isobit.ops.linear.tiles import BFLOAT16, FLOAT16

TILE, BLOCK = 16, 128
LONG_INPUTS, LONG_SHARDS = 4096, 4
CODEBOOK_NUMBERS = {"3inst": 0, "mcg": 1, "mul1": 2}  # as in trellis.cuh
MOST_SPLIT_OUTPUTS = 512  # of plain layers that keep what rounding their inputs to half leaves
MOST_FEW_ROWS = 64
MOST_PASSED_ROWS = 4  # whose sums a thread block hands to another
PIECE_BYTES = 64 << 20  # of plain weights that are converted at a time


def trellis_defines(codebook: str, bits: float) -> dict[str, int]:
    """The macros that make a kernel of trellis.cuh one of a storage format."""
    return {"CODEBOOK": CODEBOOK_NUMBERS[codebook], "TWICE_BITS": int(2 * bits)}


@dataclass(frozen=True)
class Layer:
    """A layer's sizes: as the model sees it, and as stored. `bias`: float32 [stored_outputs] or None."""

    in_features: int
    out_features: int
    stored_inputs: int
    stored_outputs: int
    bias: torch.Tensor | None

    @property
    def shards(self) -> int:
        """Into how many pieces the sum over inputs is cut."""
        return LONG_SHARDS if self.stored_inputs >= LONG_INPUTS else 1

    @property
    def input_blocks(self) -> int:
        """How many blocks of 128 inputs there are, the last perhaps short."""
        return -(-self.stored_inputs // BLOCK)

    @property
    def shard_bounds(self) -> tuple[tuple[int, int], ...]:
        """Each shard's first input and the one past its last."""
        return shard_bounds(self.stored_inputs, self.shards)


@cache
def shard_bounds(inputs: int, shards: int) -> tuple[tuple[int, int], ...]:
    """Where shards of whole blocks of 128 inputs begin and end."""
    cuts = [shard * -(-inputs // BLOCK) // shards * BLOCK for shard in range(shards + 1)]
    return tuple((first, min(last, inputs)) for first, last in pairwise(cuts))


@dataclass(frozen=True)
class TrellisLayer(Layer):
    """Tiles as stored, int16 [K/16, N/16, 16*bits]; suh, svh float16 [K], [N]; counters: int32 zeros [N/128].

    passed: int64 zeros [MOST_PASSED_ROWS, N], in which thread blocks hand over sums; zeros again after every call.
    """

    defines: dict[str, int]
    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    counters: torch.Tensor
    passed: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.trellis, self.suh, self.svh))


@dataclass(frozen=True)
class HalfLayer(Layer):
    """Half weights as the A operand's registers, float16 [N/16, K/16, 32 lanes, 8]; counters: int32 zeros.

    parts: 2 where an input's half and the half of what that leaves are both multiplied, otherwise 1.
    """

    parts: int
    fragments: torch.Tensor
    counters: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.fragments.nbytes


@dataclass(frozen=True)
class FloatLayer(Layer):
    """Weights that half cannot hold, float32 or bfloat16 bits (int16) [K, N], K a multiple of 16."""

    weights: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes


LinearHandle = TrellisLayer | HalfLayer | FloatLayer


def prepare(weights: Linear) -> LinearHandle:
    """A layer on the device; raises CheckpointError when its tensors do not fit each other."""
    return _trellis_layer(weights) if isinstance(weights, Exl3Linear) else _plain_layer(weights)


def _trellis_layer(weights: Exl3Linear) -> TrellisLayer:
    check_trellis(weights)
    return TrellisLayer(
        weights.in_features,
        weights.out_features,
        weights.k,
        weights.n,
        _bias(weights, weights.n),
        trellis_defines(weights.codebook, weights.bits),
        upload_one(weights.trellis),
        memory.to_device(np.ascontiguousarray(weights.suh)),
        memory.to_device(np.ascontiguousarray(weights.svh)),
        memory.zeros((weights.n // BLOCK,), torch.int32),
        memory.zeros((MOST_PASSED_ROWS, weights.n), torch.int64),
    )


def _plain_layer(weights: PlainLinear) -> HalfLayer | FloatLayer:
    check_plain(weights)
    outputs, inputs = weights.weight.shape
    if not inputs or not outputs:
        raise CheckpointError(f"{weights.name}: weight is {outputs} x {inputs}, expected at least 1 x 1")
    number = narrowest_format(weights.weight)
    stored_inputs, stored_outputs = -(-inputs // TILE) * TILE, -(-outputs // TILE) * TILE
    sizes = inputs, outputs, stored_inputs, stored_outputs, _bias(weights, stored_outputs)
    placed = _on_device(weights.weight, number, stored_inputs, stored_outputs)
    if number != FLOAT16:
        return FloatLayer(*sizes, placed.T.contiguous())
    columns = stored_outputs // TILE
    return HalfLayer(
        *sizes,
        2 if outputs <= MOST_SPLIT_OUTPUTS else 1,
        as_fragments(placed),
        memory.zeros((2 * columns,), torch.int32),
    )


def _on_device(weight: np.ndarray, number: int, inputs: int, outputs: int) -> torch.Tensor:
    """float32 or float16 [N, K] that a format holds exactly -> its values on the device, padded with zeros.

    They are float16, float32, or bfloat16 as int16.
    """
    dtype = {FLOAT16: torch.float16, BFLOAT16: torch.int16}.get(number, torch.float32)
    placed = memory.zeros((outputs, inputs), dtype)
    rows = max(1, PIECE_BYTES // weight[:1].nbytes)
    for first in range(0, len(weight), rows):
        piece = upload_one(weight[first : first + rows])
        values = piece.view(torch.int32) >> 16 if number == BFLOAT16 else piece
        placed[first : first + len(piece), : piece.shape[1]] = values
    return placed


def as_fragments(weights: torch.Tensor) -> torch.Tensor:
    """float16 [N, K], multiples of 16 -> [N/16, K/16, 32 lanes, 8], every lane's A operand of mma m16n8k16."""
    n, k = weights.shape
    parts = weights.view(n // TILE, 2, 8, k // TILE, 2, 4, 2)  # column, n + 8, group, tile, k + 8, pair, k + 1
    return parts.permute(0, 3, 2, 5, 4, 1, 6).contiguous().view(n // TILE, k // TILE, 32, 8)


def _bias(weights: Linear, stored_outputs: int) -> torch.Tensor | None:
    return None if weights.bias is None else memory.to_device(padded_bias(weights, stored_outputs))
