"""Sparse attention in float64, for the rows of one stream."""

import numpy as np

HALF_MAX = 65504.0


def half(x: np.ndarray) -> np.ndarray:
    """Rounded to binary16, saturating, as float64."""
    return np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float64)


def norm_and_rotate(
    x: np.ndarray, weight: np.ndarray, eps: float, positions: np.ndarray, rotary_dim: int, theta: float
) -> np.ndarray:
    """x [n, heads, d], weight [d] stored around 0, positions [n] -> float64 [n, heads, d]."""
    x = x.astype(np.float64)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + weight.astype(np.float64))
    half_dim = rotary_dim // 2
    inverse = np.float32(np.float64(theta) ** (-2 * np.arange(half_dim) / max(rotary_dim, 1)))
    angle = (positions.astype(np.float32)[:, None] * inverse).astype(np.float64)[:, None]
    first, second = y[..., :half_dim], y[..., half_dim:rotary_dim]
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate([*turned, y[..., rotary_dim:]], axis=-1)


def block_means(index_k: np.ndarray, block: int) -> np.ndarray:
    """index_k [n, di] -> float64 [n // block, di], the mean of every finished block."""
    finished = len(index_k) // block
    return index_k[: finished * block].astype(np.float64).reshape(finished, block, index_k.shape[1]).mean(axis=1)


def block_scores(queries: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """queries [heads, di], pooled [blocks, di], normed and rotated -> float64 [blocks]."""
    return np.maximum(queries @ pooled.T, 0).sum(axis=0) / np.sqrt(pooled.shape[1])


def best_blocks(scores: np.ndarray, kept: int) -> np.ndarray:
    """The ids of the `kept` largest scores, ascending; ties to the lower id."""
    return np.sort(np.lexsort((np.arange(len(scores)), -scores))[:kept])


def read_positions(position: int, blocks: np.ndarray, block: int) -> np.ndarray:
    """The positions that a row reads, ascending: its blocks' rows and the unfinished tail."""
    tail = np.arange((position + 1) // block * block, position + 1)
    return np.concatenate([(blocks[:, None] * block + np.arange(block)).ravel(), tail]).astype(np.int64)


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """queries [heads, d], keys and values [n, kv_heads, d] -> weights [heads, n] and output [heads, d]."""
    scores = by_key_head(queries, keys.transpose(1, 2, 0)) / np.sqrt(queries.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights, by_key_head(weights, values.transpose(1, 0, 2))


def by_key_head(heads: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """heads [heads, a] times the matrix of each one's key-value head, [kv_heads, a, b] -> [heads, b]."""
    groups = heads.reshape(len(matrices), -1, heads.shape[1])
    return (groups @ matrices).reshape(len(heads), matrices.shape[2])


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x.astype(np.float64)))
    return np.where(x >= 0, 1, e) / (1 + e)
