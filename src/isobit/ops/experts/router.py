"""The router's choice on the CPU."""

import numpy as np
from numba import njit

from isobit.ops.buffers import empty
from isobit.ops.lanes import lane_sum
from isobit.ops.scalar import ZERO, exp32
from isobit.ops.work import run_split


def route(logits: np.ndarray, chosen: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """The `chosen` likeliest experts of each row, ties to the lower id: float32 [R, E] -> (ids, weights).

    ids: int32 [R, chosen], ascending. weights: float32 [R, chosen], softmax probabilities, divided by their sum if
    `renormalise`. Raises ValueError when there are fewer experts than `chosen`.
    """
    rows, experts = logits.shape
    if not 0 < chosen <= experts:
        raise ValueError(f"route: {chosen} of {experts} experts asked for")
    ids, weights = empty((rows, chosen), np.int32), empty((rows, chosen))
    run_split(route_rows, 16 * logits.size, rows, logits, renormalise, ids, weights)
    return ids, weights


@njit(nogil=True, cache=True, error_model="numpy")
def route_rows(logits, renormalise, ids, weights, first, last):
    """Rows first to last - 1."""
    experts, chosen = logits.shape[1], ids.shape[1]
    probabilities, taken = np.empty(experts, np.float32), np.empty(experts, np.bool_)
    for row in range(first, last):
        softmax(logits[row], probabilities)
        take_largest(probabilities, chosen, taken)
        total, place = ZERO, 0
        for expert in range(experts):
            if taken[expert]:
                ids[row, place], weights[row, place] = expert, probabilities[expert]
                total += probabilities[expert]
                place += 1
        if renormalise:
            for i in range(chosen):
                weights[row, i] = weights[row, i] / total


@njit(nogil=True, cache=True, error_model="numpy")
def softmax(logits, probabilities):
    """Softmax of one row in float32: maximum, exponentials, lane sum, one division each."""
    largest = logits[0]
    for logit in logits:
        largest = logit if logit > largest else largest
    for i in range(logits.size):
        probabilities[i] = exp32(logits[i] - largest)
    total = lane_sum(probabilities)
    for i in range(logits.size):
        probabilities[i] = probabilities[i] / total


@njit(nogil=True, cache=True, error_model="numpy")
def take_largest(values, count, taken):
    """Mark the `count` largest values, ties to the lower index; always exactly `count`, whatever the values."""
    taken[:] = False
    for _ in range(count):
        best = -1
        for i in range(values.size):
            if not taken[i] and (best < 0 or values[i] > values[best]):
                best = i
        taken[best] = True
