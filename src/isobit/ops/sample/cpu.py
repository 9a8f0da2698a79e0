"""Sampling on the CPU."""

from collections.abc import Sequence

import numpy as np
from numba import njit

from isobit.ops.buffers import empty
from isobit.ops.sample import Draw, Samples, packed_draws
from isobit.ops.sample.order import descending_ids
from isobit.ops.sample.philox import uniform
from isobit.ops.scalar import exp64, log64, scalar_function
from isobit.ops.work import run_split

__all__ = ["sample", "samples_to_host", "top_logprobs"]

VALUE_WORK = 32  # element operations that one logit costs
TOP_K, SEED, POSITION = 3, 4, 5  # words of a draw


def sample(logits: np.ndarray, draws: Sequence[Draw] | np.ndarray) -> Samples:
    """Draw one token a row: logits float32 [R, V], one Draw a row, or `packed_draws` of them.

    Any settings give a token; none are refused.
    """
    packed = draws if isinstance(draws, np.ndarray) else packed_draws(draws)
    rows = len(packed)
    tokens, logprob, finite = empty((rows,), np.int32), empty((rows,), np.float64), empty((rows,), np.bool_)
    arguments = logits, packed.view(np.float64), packed.view(np.uint64), tokens, logprob, finite
    run_split(sample_rows, logits.size * VALUE_WORK, rows, *arguments)
    return Samples(tokens, logprob, finite)


def samples_to_host(samples: Samples) -> Samples:
    """The same as NumPy arrays, after the device has drawn them."""
    return samples


def top_logprobs(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, logprobs float64) [R, min(count, V)] of each row, descending, ties to the lower id.

    A row with a logit that is not finite gets ids -1 and logprobs NaN.
    """
    rows, width = logits.shape
    shape = rows, min(max(count, 0), width)
    ids, logprobs = empty(shape, np.int32), empty(shape, np.float64)
    run_split(top_rows, logits.size * VALUE_WORK, rows, logits, ids, logprobs)
    return ids, logprobs


@njit(nogil=True, cache=True, error_model="numpy")
def sample_rows(logits, filters, words, tokens, logprob, finite, first, last):
    """Rows first to last - 1. filters, words: packed draws [R, 6] as float64 and as uint64."""
    for row in range(first, last):
        values = logits[row]
        best = _best(values)
        finite[row] = best >= 0
        tokens[row], logprob[row] = best, np.nan
        if best < 0:
            continue
        highest = np.float64(values[best])
        temperature = filters[row, 0]
        if temperature > 0.0:
            top_k = words[row, TOP_K]
            kept = np.int64(top_k) if 0 < top_k < len(values) else len(values)
            ids = descending_ids(values, kept)
            weights = _weights(values, ids, highest, temperature)
            target = uniform(words[row, SEED], words[row, POSITION])
            tokens[row] = ids[_drawn_rank(weights, filters[row, 1], filters[row, 2], target)]
        logprob[row] = np.float64(values[tokens[row]]) - highest - _log_sum(values, highest)


@njit(nogil=True, cache=True, error_model="numpy")
def top_rows(logits, ids, logprobs, first, last):
    """Rows first to last - 1 of the most likely ids and their logprobs."""
    for row in range(first, last):
        values = logits[row]
        best = _best(values)
        highest = np.float64(values[best])
        if best < 0:
            for rank in range(ids.shape[1]):
                ids[row, rank], logprobs[row, rank] = -1, np.nan
            continue
        total = _log_sum(values, highest)
        ordered = descending_ids(values, ids.shape[1])
        for rank in range(ids.shape[1]):
            ids[row, rank] = ordered[rank]
            logprobs[row, rank] = np.float64(values[ordered[rank]]) - highest - total


@njit(nogil=True, error_model="numpy")
def _best(values):
    """The id of the largest value, the lowest id if there are several; -1 if a value is not finite or there is none."""
    best, highest = -1, -np.inf
    for i in range(len(values)):
        if not abs(values[i]) < np.inf:
            return -1
        if values[i] > highest:
            best, highest = i, values[i]
    return best


@njit(nogil=True, error_model="numpy")
def _log_sum(values, highest):
    """log of the sum of exp(value - highest), the sum in ascending id."""
    total = 0.0
    for value in values:
        total += exp64(np.float64(value) - highest)
    return log64(total)


@scalar_function
def _weights(values, ids, highest, temperature):
    weights = np.empty(len(ids), np.float64)
    for rank in range(len(ids)):
        weights[rank] = exp64((np.float64(values[ids[rank]]) - highest) / temperature)
    return weights


@scalar_function
def _drawn_rank(weights, top_p, min_p, uniform_number):
    """The drawn rank among descending weights, after the top-p and min-p filters."""
    kept = len(weights)
    if top_p < 1.0:
        kept = _first_reaching(weights, top_p * _sum(weights, kept)) + 1
    while kept > 1 and weights[kept - 1] < min_p * weights[0]:
        kept -= 1
    target = uniform_number * _sum(weights, kept)
    total = 0.0
    for rank in range(kept):
        total += weights[rank]
        if total > target:
            return rank
    return kept - 1


@scalar_function
def _first_reaching(weights, target):
    total = 0.0
    for rank in range(len(weights)):
        total += weights[rank]
        if total >= target:
            return rank
    return len(weights) - 1


@scalar_function
def _sum(weights, count):
    total = 0.0
    for rank in range(count):
        total += weights[rank]
    return total
