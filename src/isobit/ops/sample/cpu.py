"""Sampling on the CPU."""

from collections.abc import Sequence

import numpy as np
from numba import njit

from isobit.ops.buffers import empty
from isobit.ops.sample import Draw, Samples
from isobit.ops.sample.order import descending_ids
from isobit.ops.sample.philox import uniform
from isobit.ops.scalar import exp64, log64, scalar_function
from isobit.ops.work import run_split

__all__ = ["sample", "top_logprobs"]

VALUE_WORK = 32  # element operations that one logit costs
LOW_64_BITS = (1 << 64) - 1


def sample(logits: np.ndarray, draws: Sequence[Draw]) -> Samples:
    """Draw one token a row: logits float32 [R, V], one Draw a row. Any settings give a token; none are refused."""
    rows = len(draws)
    tokens, logprob, finite = empty((rows,), np.int32), empty((rows,), np.float64), empty((rows,), np.bool_)
    filters = np.array([(draw.temperature, draw.top_p, draw.min_p) for draw in draws], np.float64).reshape(rows, 3)
    top_k = np.array([min(max(draw.top_k, 0), logits.shape[1]) for draw in draws], np.int64)
    keys = np.array([(draw.seed & LOW_64_BITS, draw.position & LOW_64_BITS) for draw in draws], np.uint64)
    arguments = logits, filters, top_k, keys.reshape(rows, 2), tokens, logprob, finite
    run_split(sample_rows, logits.size * VALUE_WORK, rows, *arguments)
    return Samples(tokens, logprob, finite)


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
def sample_rows(logits, filters, top_k, keys, tokens, logprob, finite, first, last):
    """Rows first to last - 1. filters: [R, 3] of temperature, top_p, min_p; keys: uint64 [R, 2] of seed, position."""
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
            kept = top_k[row] if top_k[row] > 0 else len(values)
            ids = descending_ids(values, kept)
            weights = _weights(values, ids, highest, temperature)
            target = uniform(keys[row, 0], keys[row, 1])
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
