"""The discrete choices of a forward, and what it means that two implementations chose differently.

Two implementations that agree up to rounding part where a choice is a near tie: another expert, another block. Given
the choices of one, the other's continuous values agree again. So: run the reference with all of isobit's choices
forced; wherever it would then itself have chosen otherwise, from inputs that agree, lies the *root* of a difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

ChoiceKind = Literal["router", "blocks"]


@dataclass(frozen=True)
class Place:
    """Which choice: of which kind, in which layer, for which position."""

    kind: ChoiceKind
    layer: int
    position: int

    def __str__(self) -> str:
        return f"{self.kind} of layer {self.layer} at position {self.position}"


@dataclass
class LayerChoices:
    """One layer's choices for positions 0..T-1.

    scores: a float32 array a position: the router's logits [experts], or the indexer's scores [finished blocks].
    chosen: an ascending int array a position, ids into the scores. natural: what would have been chosen unless forced.
    """

    scores: list[np.ndarray] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)
    natural: list[np.ndarray] = field(default_factory=list)

    def add(self, scores: np.ndarray, natural: np.ndarray, forced: np.ndarray | None = None) -> None:
        """Record the next position."""
        natural = np.sort(np.asarray(natural, np.int64))
        self.scores.append(np.asarray(scores, np.float32))
        self.natural.append(natural)
        self.chosen.append(natural if forced is None else forced)


Recording = dict[tuple[ChoiceKind, int], LayerChoices]
Forced = dict[Place, np.ndarray]


@dataclass(frozen=True)
class Run:
    """One stream through one implementation.

    logits: float32 [T, V]; choices: what every router and indexer chose; boundaries: the float32 values at the cuts of
    boundaries.py, if they were recorded.
    """

    logits: np.ndarray
    choices: Recording
    boundaries: list[np.ndarray] = field(default_factory=list)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest scores, ties to the lower id, in ascending id: what both sides should choose."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def places(recording: Recording) -> Iterator[tuple[Place, np.ndarray]]:
    """Every choice of a recording and what was chosen, by position, then layer, as the network makes them."""
    length = max((len(layer.chosen) for layer in recording.values()), default=0)
    order = sorted(recording, key=lambda key: (key[1], key[0] == "router"))
    for position in range(length):
        for kind, layer in order:
            yield Place(kind, layer, position), recording[kind, layer].chosen[position]


def all_forced(recording: Recording) -> Forced:
    """Every choice of a recording, to be forced upon another implementation."""
    return dict(places(recording))


def differing(mine: Recording, other: Recording) -> list[Place]:
    """The choices in which two recordings differ, in the network's order within each position."""
    return [
        place
        for place, chosen in places(mine)
        if not np.array_equal(chosen, other[place.kind, place.layer].chosen[place.position])
    ]


@dataclass(frozen=True)
class Root:
    """A choice that isobit made otherwise than the reference would have from the same inputs.

    dropped, taken: ids that only the reference, only isobit chose. margin: by how much the reference's scores prefer
    its own choice, a difference of two scores; error: that of such a difference as measured, twice the largest
    difference between the two sides' scores of this layer, over all positions.
    """

    place: Place
    dropped: tuple[int, ...]
    taken: tuple[int, ...]
    margin: float
    error: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it: the margin is within its measured error."""
        return self.margin <= self.error


def score_errors(mine: Recording, reference: Recording) -> dict[tuple[ChoiceKind, int], float]:
    """The largest absolute difference of the scores, by kind and layer."""
    errors = {}
    for key, layer in mine.items():
        pairs = zip(layer.scores, reference[key].scores, strict=True)
        errors[key] = max((float(np.abs(a - b).max()) for a, b in pairs if len(a)), default=0.0)
    return errors


def relative_score_errors(mine: Recording, reference: Recording) -> dict[tuple[ChoiceKind, int], float]:
    """The norm of the scores' differences over the norm of the reference's scores, by kind and layer."""
    errors = {}
    for key, layer in mine.items():
        ours, theirs = (np.concatenate(side.scores).astype(np.float64) for side in (layer, reference[key]))
        scale, difference = (float(np.sqrt((values * values).sum())) for values in (theirs, ours - theirs))
        errors[key] = difference / scale if scale else float(difference > 0)
    return errors


def roots(mine: Recording, reference: Recording) -> list[Root]:
    """Where the reference would have chosen otherwise than `mine`, whose choices were forced upon it."""
    errors = score_errors(mine, reference)
    found = []
    for place, chosen in places(mine):
        layer = reference[place.kind, place.layer]
        scores, natural = layer.scores[place.position], layer.natural[place.position]
        if np.array_equal(natural, chosen):
            continue
        dropped, taken = np.setdiff1d(natural, chosen), np.setdiff1d(chosen, natural)
        margin = float(scores[dropped].max() - scores[taken].min())
        error = 2 * errors[place.kind, place.layer]
        found.append(Root(place, tuple(dropped.tolist()), tuple(taken.tolist()), margin, error))
    return found


def malformed(recording: Recording, counts: dict[ChoiceKind, int]) -> list[Place]:
    """Choices that are no choice at all: not min(count, candidates) distinct ids of candidates."""
    return [
        place
        for place, chosen in places(recording)
        if not _is_choice(chosen, len(recording[place.kind, place.layer].scores[place.position]), counts[place.kind])
    ]


def _is_choice(chosen: np.ndarray, candidates: int, count: int) -> bool:
    if len(chosen) != min(count, candidates) or len(np.unique(chosen)) != len(chosen):
        return False
    return not len(chosen) or (chosen.min() >= 0 and chosen.max() < candidates)
