"""Gated residual streams in float64, with the linear layers as plain matrices."""

import numpy as np

from isobit.ops.norm import reference as norm_reference


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def gated_read(
    streams: np.ndarray,
    norm_weight: np.ndarray,
    down: np.ndarray,
    up: np.ndarray,
    inject: np.ndarray | None,
    eps: float,
) -> tuple[np.ndarray, np.ndarray | None]:
    """streams [R, S, H]; down [rank, S*H], up [S*H, rank], inject [S, S*H] -> input [R, H], injection [R, S]."""
    rows, count, hidden = streams.shape
    normed = norm_reference.norm(streams, norm_weight.reshape(count, hidden), eps)
    flat = normed.reshape(rows, count * hidden)
    low = flat @ down.T / count
    mix = sigmoid((low * sigmoid(low)) @ up.T).reshape(rows, count, hidden)
    injection = None if inject is None else 2 * sigmoid(flat @ inject.T / count)
    return (mix * normed).mean(axis=1), injection


def gated_write(streams: np.ndarray, injection: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The streams after the write: [R, S, H], [R, S], [R, H] -> float64 [R, S, H]."""
    return streams.astype(np.float64) + injection.astype(np.float64)[:, :, None] * y.astype(np.float64)[:, None, :]
