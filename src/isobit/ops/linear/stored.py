"""Stored weights before they are prepared for a device: whether they fit, and the narrowest format of plain ones."""

from typing import Any

import numpy as np

from isobit.checkpoint.trellis import BLOCK, TILE
from isobit.checkpoint.weights import Exl3Linear, Linear, PlainLinear, all_finite
from isobit.errors import CheckpointError
from isobit.ops.linear.tiles import BFLOAT16, FLOAT16, FLOAT32

PREPARED_ROWS = 1024  # of plain weights converted at a time; a multiple of 16
LEAST_HALF, PAST_HALF = 0x38800000, 0x47800000  # float32 bits of half's least normal value, and of 65536
LOST_BITS = 0x1FFF  # of a float32's fraction, in half


def check_trellis(weights: Exl3Linear) -> None:
    """Raises CheckpointError when the tensors of the layer do not fit each other or are not finite."""
    k, n = weights.k, weights.n
    _check(weights, "trellis", weights.trellis, np.int16, (k // TILE, n // TILE, int(16 * weights.bits)))
    _check(weights, "suh", weights.suh, np.float16, (k,))
    _check(weights, "svh", weights.svh, np.float16, (n,))
    if k % BLOCK or n % BLOCK:
        raise CheckpointError(f"{weights.name}: stored sizes {k} x {n}, expected multiples of {BLOCK}")
    if not (0 < weights.in_features <= k and 0 < weights.out_features <= n):
        raise CheckpointError(
            f"{weights.name}: sizes {weights.in_features} x {weights.out_features} do not fit the stored {k} x {n}"
        )
    check_finite(weights, "suh", weights.suh)
    check_finite(weights, "svh", weights.svh)


def check_plain(weights: PlainLinear) -> None:
    """Raises CheckpointError unless the weight is a finite matrix of float32 or float16."""
    if weights.weight.ndim != 2 or weights.weight.dtype not in (np.float32, np.float16):
        raise CheckpointError(
            f"{weights.name}: weight is {weights.weight.dtype} {weights.weight.shape}, expected float32 or float16 "
            "[N, K]"
        )
    for first in range(0, len(weights.weight), PREPARED_ROWS):
        check_finite(weights, "weight", weights.weight[first : first + PREPARED_ROWS])


def narrowest_format(weight: np.ndarray) -> int:
    """The format of fewest bytes that holds every weight exactly."""
    if weight.dtype == np.float16:
        return FLOAT16
    holds = {FLOAT16: _fits_half, BFLOAT16: _fits_bfloat16}
    formats = list(holds)
    for first in range(0, len(weight), PREPARED_ROWS):
        bits = np.ascontiguousarray(weight[first : first + PREPARED_ROWS]).view(np.uint32)
        formats = [number for number in formats if holds[number](bits)]
    return formats[0] if formats else FLOAT32


def narrowed(weight: np.ndarray, number: int) -> np.ndarray:
    """float32 or float16 weights -> their bits in a format that holds them exactly."""
    weight = np.ascontiguousarray(weight)
    if number == FLOAT16:
        return weight.astype(np.float16, copy=False).view(np.uint16)
    bits = weight.view(np.uint32)
    return (bits >> 16).astype(np.uint16) if number == BFLOAT16 else bits


def _fits_half(bits: np.ndarray) -> bool:
    """Whether half holds all values exactly, given as float32 bits."""
    sizes = bits & np.uint32(0x7FFFFFFF)
    if (sizes >= PAST_HALF).any() or (bits & np.uint32(LOST_BITS)).any():
        return False
    small = sizes[sizes < LEAST_HALF].view(np.float32)
    return np.array_equal(small.astype(np.float16).astype(np.float32), small)


def _fits_bfloat16(bits: np.ndarray) -> bool:
    """Whether bfloat16 holds all values exactly, given as float32 bits."""
    return not (bits & np.uint32(0xFFFF)).any()


def padded_bias(weights: Linear, columns: int) -> np.ndarray:
    """The layer's bias as float32 [columns], zeros past its end; raises CheckpointError for one that does not fit."""
    bias: Any = weights.bias
    if bias.ndim != 1 or not weights.out_features <= bias.size <= columns:
        raise CheckpointError(f"{weights.name}: bias has shape {bias.shape}, expected [{weights.out_features}]")
    check_finite(weights, "bias", bias)
    padded = np.zeros(columns, np.float32)
    padded[: bias.size] = bias
    return padded


def check_finite(weights: Linear, what: str, array: np.ndarray) -> None:
    """Raises CheckpointError when the array holds NaN or infinite values."""
    if not all_finite(array):
        raise CheckpointError(
            f"{weights.name}: {what} holds NaN or infinite values, expected finite ones; download the checkpoint again"
        )


def _check(weights: Exl3Linear, what: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise CheckpointError(
            f"{weights.name}: {what} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}"
        )
