"""Sampling on CUDA: exact sums of probabilities, whose order does not matter, and a search for the drawn rank."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.ops.sample import Draw, Samples

__all__ = ["sample", "top_logprobs"]

SOURCE = "ops/sample/sample.cu"
CHUNK, BINS = 2048, 2048  # as in sums.cuh
CHUNK_THREADS = 256
DRAW_FIELDS = 6
MOST_SORTED = 2048
MOST_IDS = 1 << 21  # whose sum is exact
LOW_64_BITS = (1 << 64) - 1


def sample(logits: torch.Tensor | np.ndarray, draws: Sequence[Draw] | torch.Tensor) -> Samples:
    """Draw one token a row: logits float32 [R, V], one Draw a row, or `packed_draws` of them on the device.

    Any settings give a token; none are refused. Raises ValueError for more than 2^21 ids.
    """
    logits = _placed(logits)
    rows, width = logits.shape
    tokens, logprob = memory.empty((rows,), torch.int32), memory.empty((rows,), torch.float64)
    finite = memory.empty((rows,), torch.bool)
    if not rows:
        return Samples(tokens, logprob, finite)
    if not isinstance(draws, torch.Tensor):
        draws = memory.to_device(packed_draws(draws))
    sums = _Sums(logits, draws)
    kernel = kernels.load(SOURCE, "draw_tokens", THREADS=draw_threads())
    searched = sums.best, sums.totals, *sums.bins, sums.masks, sums.above
    kernel(rows, draw_threads(), logits, width, sums.chunks, draws, *searched, tokens, logprob, finite)
    return Samples(tokens, logprob, finite)


def top_logprobs(logits: torch.Tensor | np.ndarray, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32, logprobs float64) [R, min(count, V)] of each row, descending, ties to the lower id.

    A row with a logit that is not finite gets ids -1 and logprobs NaN. Raises ValueError for more than 2^21 ids, or
    more than 2048 of the likeliest.
    """
    logits = _placed(logits)
    rows, width = logits.shape
    count = min(max(count, 0), width)
    if count > MOST_SORTED:
        raise ValueError(f"the {count} likeliest ids were asked for, expected at most {MOST_SORTED}")
    ids, logprobs = memory.empty((rows, count), torch.int32), memory.empty((rows, count), torch.float64)
    if rows and count:
        sums = _Sums(logits, None)
        kernel = kernels.load(SOURCE, "most_likely", THREADS=draw_threads())
        searched = sums.best, sums.totals, *sums.bins, sums.masks
        kernel(rows, draw_threads(), logits, width, sums.chunks, count, *searched, ids, logprobs)
    return ids, logprobs


def packed_draws(draws: Sequence[Draw]) -> np.ndarray:
    """int64 [R, 6]: the bits of temperature, top_p and min_p (float64), then top_k, seed and position."""
    packed = np.zeros((len(draws), DRAW_FIELDS), np.int64)
    for row, draw in enumerate(draws):
        packed[row, :3] = np.array([draw.temperature, draw.top_p, draw.min_p], np.float64).view(np.int64)
        packed[row, 3] = min(max(draw.top_k, 0), MOST_IDS)
        words = np.array([draw.seed & LOW_64_BITS, draw.position & LOW_64_BITS], np.uint64)
        packed[row, 4:] = words.view(np.int64)
    return packed


def draw_threads() -> int:
    """Threads that search one row; their number changes no byte, but the emulator's time."""
    return 64 if memory.is_emulated() else 512


class _Sums:
    """The largest logit of each row and its sums of probabilities, by chunks of ids and by bins of logits."""

    def __init__(self, logits: torch.Tensor, draws: torch.Tensor | None):
        rows, width = logits.shape
        if not 0 < width <= MOST_IDS:
            raise ValueError(f"logits have {width} columns, expected 1 to {MOST_IDS}")
        self.chunks = -(-width // CHUNK)
        self.best = memory.empty((rows, self.chunks), torch.int64)
        self.totals = memory.empty((rows, self.chunks, 2), torch.int64)
        self.bins = tuple(memory.empty((rows, BINS), dtype) for dtype in (torch.int32, torch.int64, torch.int64))
        self.masks = memory.empty((rows, self.chunks, BINS // 32), torch.int32)
        self.above = memory.empty((rows, self.chunks), torch.int64)
        grid: Any = self.chunks, rows
        kernels.load(SOURCE, "find_best")(grid, CHUNK_THREADS, logits, width, self.best, *self.bins)
        arrays = self.best, self.totals, *self.bins, self.masks, self.above
        kernels.load(SOURCE, "sum_chunks")(grid, CHUNK_THREADS, logits, width, draws, *arrays)


def _placed(logits: torch.Tensor | np.ndarray) -> torch.Tensor:
    return memory.to_device(logits) if isinstance(logits, np.ndarray) else logits
