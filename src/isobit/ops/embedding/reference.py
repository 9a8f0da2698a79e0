"""Embedding rows in float64."""

import numpy as np

from isobit.checkpoint.trellis import GROUP, butterfly, codebook_values, ring_scales, unpack_ring
from isobit.checkpoint.weights import PlainEmbedding, QuantizedEmbedding


def embed(ids: np.ndarray, weights: PlainEmbedding | QuantizedEmbedding) -> np.ndarray:
    """ids [R] -> float64 [R, hidden]."""
    if isinstance(weights, PlainEmbedding):
        rows = weights.rows[ids]
        if weights.bfloat16:
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float64)
    values = butterfly(scaled_codebook_values(ids, weights), GROUP) / 16 * weights.signs.astype(np.float64)
    return values.reshape(len(ids), -1)[:, : weights.hidden]


def scaled_codebook_values(ids: np.ndarray, weights: QuantizedEmbedding) -> np.ndarray:
    """What the rotation sums: float64 [R, groups, 256]."""
    rings = weights.trellis[ids].reshape(len(ids), len(weights.signs), -1)
    values = codebook_values("mul1").astype(np.float64)[unpack_ring(rings[..., 1:], weights.bits)]
    return values * ring_scales(rings)[..., None].astype(np.float64)
