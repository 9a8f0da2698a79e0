"""The router's choice and the experts' sum in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobit.checkpoint.weights import Linear
from isobit.ops.linear import reference as linear_reference


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
    ids = np.sort(np.argsort(-probabilities, axis=1, kind="stable")[:, :chosen], axis=1)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    return ids, weights / weights.sum(axis=1, keepdims=True) if renormalise else weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def experts(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, host: HostExperts) -> np.ndarray:
    """float64 [R, H]."""
    gate_logits = linear_reference.linear(x, host.shared_expert_gate)
    total = sigmoid(gate_logits) * expert(x, *host.shared)
    for e, layers in enumerate(zip(host.gate, host.up, host.down, strict=True)):
        rows, choices = np.nonzero(ids == e)
        if len(rows):
            total[rows] += weights[rows, choices, None].astype(np.float64) * expert(x[rows], *layers)
    return total


def expert(x: np.ndarray, gate: Linear, up: Linear, down: Linear) -> np.ndarray:
    """One expert's output: float64 [R, H]."""
    gates = linear_reference.linear(x, gate)
    return linear_reference.linear(gates * sigmoid(gates) * linear_reference.linear(x, up), down)
