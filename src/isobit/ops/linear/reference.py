"""The linear layer in float64, the rounding of its rotated inputs to half included."""

import numpy as np

from isobit.checkpoint.trellis import BLOCK, butterfly, dequantize_inner
from isobit.checkpoint.weights import Exl3Linear, Linear

HALF_MAX = 65504.0


def linear(x: np.ndarray, weights: Linear) -> np.ndarray:
    """x [R, in_features] -> float64 [R, out_features]."""
    if isinstance(weights, Exl3Linear):
        inner = dequantize_inner(weights).astype(np.float64)
        y = rotated_outputs(rounded(rotated_inputs(x, weights)) @ inner, weights)
    else:
        y = x.astype(np.float64) @ weights.weight.T.astype(np.float64)
    return y if weights.bias is None else y + weights.bias[: y.shape[1]].astype(np.float64)


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
