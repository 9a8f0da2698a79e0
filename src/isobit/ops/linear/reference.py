"""The linear layer in float64, the rounding of its rotated inputs to half included."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from isobit.checkpoint.trellis import BLOCK, butterfly, dequantize_inner
from isobit.checkpoint.weights import Exl3Linear, Linear

HALF_MAX = 65504.0
ROUNDING = 2.0**-24
TINY = 2.0**-148  # a rounding among subnormals
ROTATION_ROUNDINGS = 11  # seven additions, two products, and the constant's own rounding
SHARDED_INPUTS, SHARDS = 4096, 4

KEPT_LAYERS = 40  # whose values are needed again soon: those of a case of experts

ChainError = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of |inputs| [R, K] and |weights| [K, N]


def linear(x: np.ndarray, weights: Linear) -> np.ndarray:
    """x [R, in_features] -> float64 [R, out_features]."""
    if isinstance(weights, Exl3Linear):
        inner = inner_values(weights)
        y = rotated_outputs(rounded(rotated_inputs(x, weights)) @ inner, weights)
    else:
        y = x.astype(np.float64) @ weights.weight.T.astype(np.float64)
    return y if weights.bias is None else y + weights.bias[: y.shape[1]].astype(np.float64)


def inner_values(weights: Exl3Linear) -> np.ndarray:
    """The layer's codebook values: float64 [K, N]."""
    return _inner_halves(_Same(weights)).astype(np.float64)


class _Same:
    """A layer that equals itself alone."""

    def __init__(self, weights: Exl3Linear):
        self.weights = weights

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.weights is self.weights

    def __hash__(self) -> int:
        return id(self.weights)


@lru_cache(maxsize=KEPT_LAYERS)
def _inner_halves(layer: _Same) -> np.ndarray:
    return dequantize_inner(layer.weights)


def rotated_inputs(x: np.ndarray, weights: Exl3Linear) -> np.ndarray:
    """Scaled, padded and rotated, not yet rounded: float64 [R, K]."""
    padded = np.zeros((len(x), weights.k))
    padded[:, : x.shape[1]] = x
    return butterfly(padded * weights.suh.astype(np.float64), BLOCK) / np.sqrt(BLOCK)


def rounded(x: np.ndarray) -> np.ndarray:
    """float64 values rounded to half, saturating."""
    return np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float64)


def rotated_outputs(sums: np.ndarray, weights: Exl3Linear) -> np.ndarray:
    """float64 [R, N] -> float64 [R, out_features]."""
    y = butterfly(sums, BLOCK) / np.sqrt(BLOCK) * weights.svh.astype(np.float64)
    return y[:, : weights.out_features]


def fused_chain_error(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How far chains of fused multiply-adds and their shards' sum may be off, given the magnitudes of their terms."""
    inputs = len(weights)
    shards = SHARDS if inputs >= SHARDED_INPUTS else 1
    longest = -(-inputs // shards) + BLOCK
    return (min(longest, inputs) + shards) * ROUNDING * (x @ weights) + inputs * TINY


def error_limit(
    x: np.ndarray, x_error: np.ndarray, weights: Linear, y: np.ndarray, chain_error: ChainError = fused_chain_error
) -> np.ndarray:
    """How far the float32 layer may be from y = `linear(x, weights)` when its own input is within x_error of x.

    Every rounding at its worst: float64 [R, out_features]. A rotated input near the middle of two halves may round
    either way, any other one not.
    """
    if not isinstance(weights, Exl3Linear):
        magnitudes = np.abs(weights.weight.T.astype(np.float64))
        limit = x_error @ magnitudes + chain_error(np.abs(x) + x_error, magnitudes)
    else:
        limit = _trellis_error(x, x_error, weights, chain_error)
    return limit + ROUNDING * (np.abs(y) + limit) + TINY


def _trellis_error(x: np.ndarray, x_error: np.ndarray, weights: Exl3Linear, chain_error: ChainError) -> np.ndarray:
    inner = inner_values(weights)
    magnitudes, exact = np.abs(inner), rotated_inputs(x, weights)
    scaled = np.abs(weights.suh.astype(np.float64)) / np.sqrt(BLOCK)
    padded = np.zeros((2, *exact.shape))
    padded[0, :, : x.shape[1]], padded[1, :, : x.shape[1]] = np.abs(x), x_error
    sizes, errors = _block_sums(padded * scaled)
    doubt = errors + ROTATION_ROUNDINGS * ROUNDING * (sizes + errors) + TINY
    doubt[np.isinf(exact)] = 0  # they saturate
    halves = rounded(exact)
    off = np.maximum(np.abs(rounded(exact + doubt) - halves), np.abs(rounded(exact - doubt) - halves))
    sums = halves @ inner
    sum_error = off @ magnitudes + chain_error(np.abs(halves) + off, magnitudes)
    out_scale = np.abs(weights.svh.astype(np.float64)) / np.sqrt(BLOCK)
    rotation = ROTATION_ROUNDINGS * ROUNDING * _block_sums(np.abs(sums) + sum_error)
    limit = (_block_sums(sum_error) + rotation) * out_scale
    return limit[:, : weights.out_features]


def typical_error(x: np.ndarray, x_error: np.ndarray, weights: Linear, y: np.ndarray) -> np.ndarray:
    """The standard deviation to expect where `error_limit` takes the worst: roundings are taken as independent.

    For chains of layers, whose worst cases are far beyond what can happen. float64 [R, out_features].
    """
    if not isinstance(weights, Exl3Linear):
        squares = weights.weight.T.astype(np.float64) ** 2
        variance = x_error**2 @ squares + _chain_variance(x, squares)
    else:
        variance = _trellis_variance(x, x_error, weights)
    return np.sqrt(variance) + ROUNDING * np.abs(y) + TINY


def _trellis_variance(x: np.ndarray, x_error: np.ndarray, weights: Exl3Linear) -> np.ndarray:
    inner = inner_values(weights)
    exact = rotated_inputs(x, weights)
    padded = np.zeros((2, *exact.shape))
    padded[0, :, : x.shape[1]], padded[1, :, : x.shape[1]] = x, x_error
    sizes, errors = _block_sums((padded * weights.suh.astype(np.float64)) ** 2) / BLOCK
    doubt = errors + (ROTATION_ROUNDINGS * ROUNDING) ** 2 * sizes
    between_halves = 2.0**-10 * np.abs(exact) + 2.0**-24
    off = doubt + between_halves * np.sqrt(doubt)
    off[np.isinf(exact)] = 0
    halves = rounded(exact)
    variance = off @ inner**2 + _chain_variance(halves, inner**2)
    rotation = (ROTATION_ROUNDINGS * ROUNDING) ** 2 * _block_sums((halves @ inner) ** 2)
    variance = (_block_sums(variance) + rotation) / BLOCK * weights.svh.astype(np.float64) ** 2
    return variance[:, : weights.out_features]


def _chain_variance(x: np.ndarray, squares: np.ndarray) -> np.ndarray:
    return len(squares) * ROUNDING**2 * (x.astype(np.float64) ** 2 @ squares)


def _block_sums(x: np.ndarray) -> np.ndarray:
    """Each block's sum, in place of every one of its elements."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    return np.repeat(blocks.sum(axis=-1), BLOCK, axis=-1)
