"""Sampling on CUDA: exact sums of probabilities, whose order does not matter, and a search for the drawn rank."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.ops.sample import Draw, Samples, packed_draws

__all__ = ["sample", "samples_to_host", "top_logprobs"]

SOURCE = "ops/sample/sample.cu"
CHUNK, BINS = 2048, 2048  # as in sums.cuh
CHUNK_THREADS = 256
MOST_SORTED = 2048
MOST_IDS = 1 << 21  # whose sum is exact
SAMPLE_BYTES = 8 + 4 + 1  # of a row's logprob, token, finite


def sample(logits: torch.Tensor | np.ndarray, draws: Sequence[Draw] | np.ndarray | torch.Tensor) -> Samples:
    """Draw one token a row: logits float32 [R, V], one Draw a row, or `packed_draws` of them, on the device or not.

    Any settings give a token; none are refused. Raises ValueError for more than 2^21 ids. Nothing depends on a value,
    so that the call can be captured in a graph.
    """
    logits = _placed(logits)
    rows, width = logits.shape
    samples = _room_for(rows)
    if not rows:
        return samples
    if not isinstance(draws, torch.Tensor):
        draws = memory.to_device(draws if isinstance(draws, np.ndarray) else packed_draws(draws))
    sums = _Sums(logits, draws)
    kernel = kernels.load(SOURCE, "draw_tokens", THREADS=draw_threads())
    searched = sums.best, sums.totals, *sums.bins, sums.masks, sums.above
    drawn = samples.tokens, samples.logprob, samples.finite
    kernel(rows, draw_threads(), logits, width, sums.chunks, draws, *searched, *drawn)
    return samples


def samples_to_host(samples: Samples) -> Samples:
    """The same as NumPy arrays, in one copy, after the device has drawn them."""
    packed, rows = memory.to_host(samples.packed), len(samples.tokens)
    logprobs, tokens = packed[: 8 * rows].view(np.float64), packed[8 * rows : 12 * rows].view(np.int32)
    return Samples(tokens, logprobs, packed[12 * rows :].view(np.bool_))


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


def _room_for(rows: int) -> Samples:
    """Uninitialised samples of so many rows: in their array all logprobs, then all tokens, then all `finite`."""
    packed = memory.empty((rows * SAMPLE_BYTES,), torch.uint8)
    logprobs, tokens, finite = torch.split(packed, [8 * rows, 4 * rows, rows])
    return Samples(tokens.view(torch.int32), logprobs.view(torch.float64), finite.view(torch.bool), packed)


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
