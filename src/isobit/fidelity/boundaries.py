"""Where a network is cut into parts that are compared one by one, each from the same inputs.

The cuts follow the forward pass: the embedding's streams; in each layer the streams after the n-gram injection (if the
layer has one), what is read of them, the streams after the mixer (DeltaNet or attention), what is read of those, and
the streams after the experts; at last what is read for the head. Streams are [T, S, H], reads [T, H].
"""

from dataclasses import dataclass

import numpy as np

from isobit.checkpoint.config import FlashNextConfig

SMALLEST_SHARE = 0.1  # of the typical update; a position that hardly changes is not held to its own tiny change
TINY = 1e-30


@dataclass(frozen=True)
class Part:
    """How far one part of the network is off, given the same inputs.

    error: the norm of the difference over the norm of what the part reads or adds to the streams, over all positions.
    worst: the same of the worst position alone, `position`.
    """

    name: str
    error: float
    worst: float
    position: int


def part_names(config: FlashNextConfig) -> list[str]:
    """What lies before each cut, in order."""
    names = ["the embedding"]
    for layer in range(config.num_hidden_layers):
        if config.has_ple(layer):
            names.append(f"the n-gram injection of layer {layer}")
        for block in ("mixer", "experts"):
            names += [f"the read before the {block} of layer {layer}", f"the {block} of layer {layer}"]
    return [*names, "the last read"]


def parts(names: list[str], mine: list[np.ndarray], reference: list[np.ndarray]) -> list[Part]:
    """Compare the values at all cuts, when the reference had `mine` as every part's input."""
    found = []
    nothing = np.zeros(())
    streams = nothing
    for name, ours, theirs in zip(names, mine, reference, strict=True):
        is_read = ours.ndim == 2
        changes = _row_norms(theirs - (nothing if is_read else streams))
        differences = _row_norms(ours - theirs.astype(np.float64))
        streams = streams if is_read else ours.astype(np.float64)
        scale = max(_rms(changes), TINY)
        relative = differences / np.maximum(changes, SMALLEST_SHARE * scale)
        position = int(relative.argmax())
        found.append(Part(name, _rms(differences) / scale, float(relative[position]), position))
    return found


def _row_norms(values: np.ndarray) -> np.ndarray:
    flat = values.reshape(len(values), -1)
    return np.sqrt((flat * flat).sum(axis=1))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))
