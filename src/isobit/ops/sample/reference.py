"""Sampling in float64, one row at a time, and the counter generator in whole numbers."""

import numpy as np

from isobit.ops.sample import Draw

WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds."""
    a, b, c, d = counter
    for step in range(10):
        keys = (key[0] + step * 0x9E3779B9) & WORD, (key[1] + step * 0xBB67AE85) & WORD
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ keys[0], right & WORD, (left >> 32) ^ d ^ keys[1], left & WORD
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    first, second, _, _ = philox((position & WORD, position >> 32 & WORD, 0, 0), (seed & WORD, seed >> 32 & WORD))
    return ((second << 32 | first) >> 11) * 2.0**-53


def order(logits: np.ndarray) -> np.ndarray:
    """Ids by descending logit, then ascending id."""
    return np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))


def token(logits: np.ndarray, draw: Draw, shift: float = 0.0, stretch: float = 1.0) -> int:
    """The drawn id; `shift` moves the uniform number and `stretch` scales the filters' thresholds."""
    ids = order(logits)
    if draw.temperature <= 0:
        return int(ids[0])
    ids = ids[: draw.top_k or None]
    weights = np.exp((logits[ids].astype(np.float64) - np.float64(logits[ids[0]])) / draw.temperature)
    if draw.top_p < 1:
        sums = np.cumsum(weights)
        weights = weights[: np.searchsorted(sums, min(draw.top_p * stretch, 1.0) * sums[-1]) + 1]
    weights = weights[: max(1, np.count_nonzero(weights >= draw.min_p * stretch))]
    sums = np.cumsum(weights)
    rank = np.searchsorted(sums, (uniform(draw.seed, draw.position) + shift) * sums[-1], side="right")
    return int(ids[min(rank, len(sums) - 1)])


def logprobs(logits: np.ndarray) -> np.ndarray:
    """float64 [V], the natural logarithm of the softmax."""
    above = logits.astype(np.float64) - np.float64(logits.max())
    return above - np.log(np.exp(above).sum())
