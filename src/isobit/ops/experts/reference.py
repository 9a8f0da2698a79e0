"""The router's choice and the experts' sum in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobit.checkpoint.weights import Linear
from isobit.ops.linear import reference as linear_reference
from isobit.ops.linear.reference import ROUNDING

SAFETY = 12


@dataclass(frozen=True)
class HostExperts:
    """The experts of one layer as the checkpoint gives them."""

    gate: Sequence[Linear]
    up: Sequence[Linear]
    down: Sequence[Linear]
    shared: tuple[Linear, Linear, Linear]
    shared_expert_gate: Linear


def softmax(logits: np.ndarray) -> np.ndarray:
    """[R, E] -> float64 [R, E]."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True).astype(np.float64))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def route(logits: np.ndarray, chosen: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """ids [R, chosen] ascending, weights float64 [R, chosen]; ties to the lower id."""
    probabilities = softmax(logits)
    ranked = probabilities.astype(np.float32)  # what underflows is equal
    ids = np.sort(np.argsort(-ranked, axis=1, kind="stable")[:, :chosen], axis=1)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    return ids, weights / weights.sum(axis=1, keepdims=True) if renormalise else weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), 0 at -infinity."""
    return np.where(np.isneginf(x), 0, x * sigmoid(x))


def experts(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, host: HostExperts) -> tuple[np.ndarray, np.ndarray]:
    """(output, how far the float32 experts may be from it), float64 [R, H] both.

    The limit is SAFETY standard deviations of independent roundings.
    """
    logits = linear_reference.linear(x, host.shared_expert_gate)
    share = sigmoid(logits)
    logit_error = linear_reference.typical_error(x, np.zeros(x.shape), host.shared_expert_gate, logits)
    share_error = np.where(np.isinf(logits), 0, logit_error / 4) + 4 * ROUNDING * share
    shared, shared_error = expert_with_error(x, *host.shared)
    total = share * shared
    variance = (share_error * shared) ** 2 + (share * shared_error) ** 2 + (2 * ROUNDING * total) ** 2
    for e, layers in enumerate(zip(host.gate, host.up, host.down, strict=True)):
        rows, choices = np.nonzero(ids == e)
        if len(rows):
            output, error = expert_with_error(x[rows], *layers)
            weight = weights[rows, choices, None].astype(np.float64)
            total[rows] += weight * output
            variance[rows] += (weight * error) ** 2 + (2 * ROUNDING * weight * output) ** 2
    return total, SAFETY * np.sqrt(variance) + linear_reference.TINY


def expert_with_error(x: np.ndarray, gate: Linear, up: Linear, down: Linear) -> tuple[np.ndarray, np.ndarray]:
    """One expert's output and the deviation to expect of the float32 one. The slope of silu is below 1.1."""
    exact = np.zeros(x.shape)
    gates, ups = linear_reference.linear(x, gate), linear_reference.linear(x, up)
    gate_error = linear_reference.typical_error(x, exact, gate, gates)
    up_error = linear_reference.typical_error(x, exact, up, ups)
    opened = silu(gates)
    hidden = opened * ups
    error = 1.1 * gate_error * (np.abs(ups) + up_error) + np.abs(opened) * up_error
    error += 4 * ROUNDING * np.abs(hidden) + linear_reference.TINY
    output = linear_reference.linear(hidden, down)
    return output, linear_reference.typical_error(hidden, error, down, output)
