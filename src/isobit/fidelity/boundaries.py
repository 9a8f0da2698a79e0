"""Where a network is cut into parts that are compared one by one, each from the same input streams.

Boundary 0 is the embedding's output; each layer adds two, after its mixer (DeltaNet or attention, and the n-gram
injection before it) and after its experts. The head follows the last one.
"""

from dataclasses import dataclass

import numpy as np

SMALLEST_SHARE = 0.1  # of the typical update; a position that hardly changes is not held to its own tiny change
TINY = 1e-30


@dataclass(frozen=True)
class Part:
    """How far one part of the network is off, given the same inputs.

    error: the norm of the difference over the norm of what the part adds to the streams, over all positions.
    worst: the same of the worst position alone, `position`.
    """

    name: str
    error: float
    worst: float
    position: int


def part_name(boundary: int) -> str:
    """What lies between a boundary and the one before it."""
    if boundary == 0:
        return "the embedding"
    return f"the {'mixer' if boundary % 2 else 'experts'} of layer {(boundary - 1) // 2}"


def parts(mine: list[np.ndarray], reference: list[np.ndarray]) -> list[Part]:
    """Compare the streams [T, S, H] at all boundaries, when the reference had `mine` as every part's input."""
    found = []
    for boundary, (ours, theirs) in enumerate(zip(mine, reference, strict=True)):
        before = mine[boundary - 1] if boundary else np.zeros_like(ours)
        update = _row_norms(theirs.astype(np.float64) - before)
        difference = _row_norms(ours.astype(np.float64) - theirs)
        scale = _rms(update)
        worst = difference / np.maximum(update, max(SMALLEST_SHARE * scale, TINY))
        position = int(worst.argmax())
        error = _rms(difference) / max(scale, TINY)
        found.append(Part(part_name(boundary), error, float(worst[position]), position))
    return found


def _row_norms(streams: np.ndarray) -> np.ndarray:
    return np.sqrt((streams * streams).sum(axis=(1, 2)))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))
