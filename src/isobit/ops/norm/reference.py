"""The RMS norm in float64."""

import numpy as np


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., W], weight [W] (or [G, W] against x [..., G, W]) -> float64 of x's shape."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + weight)
