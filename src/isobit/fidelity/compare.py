"""Holds isobit's run against the reference, and explains or fails on every difference."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.agreement import Agreement, agreement
from isobit.fidelity.boundaries import Part, part_names, parts
from isobit.fidelity.choices import ChoiceKind, Place, Root, Run, all_forced, differing, malformed, roots
from isobit.fidelity.matched import matched_roundings
from isobit.fidelity.reference import Reference

# Relative errors that sound arithmetic stays below.
ROUNDING_LIMIT = 5e-2  # of logits and scores, from half-precision operands through the whole network


@dataclass(frozen=True)
class Limits:
    """Relative errors of one part of the network that sound arithmetic stays below: over all positions, in the worst.

    They come from the order of float32 sums and what it flips in half precision.
    """

    part: float = 2e-4
    worst: float = 1e-3


CPU_LIMITS = Limits()
# The attention's queries and the inputs of plain products are halves there.
CUDA_LIMITS = Limits(part=5e-4, worst=2.5e-3)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """A position at which the best tokens differ, and what it was traced to.

    margin: how much the reference prefers its token, in logits. causes: the root choices that reach this position,
    the nearest first. agrees_when_forced: the best tokens are equal once the root choices are forced.
    argmax_margin: else, how much the forced reference still prefers another token.
    """

    position: int
    token: int
    reference_token: int
    margin: float
    causes: tuple[Root, ...]
    agrees_when_forced: bool
    argmax_margin: float | None
    explained: bool


@dataclass(frozen=True)
class Report:
    """What `isobit fidelity` found. past_budget: positions at which the indexer had more blocks than it may read.

    free: against the reference as it is; forced: with isobit's choices; part_by_part: with isobit's choices, roundings
    and every part's inputs. They are None, and the tuples empty, when isobit's run is no valid one.
    """

    tokens: int
    past_budget: int
    free: Agreement | None = None
    forced: Agreement | None = None
    part_by_part: Agreement | None = None
    parts: tuple[Part, ...] = ()
    roots: tuple[Root, ...] = ()
    differences: tuple[Difference, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"passed": self.passed, **asdict(self)}


def compare(
    mine: Run,
    reference: Reference,
    checkpoint: Checkpoint,
    tokens: np.ndarray,
    say: Say,
    limits: Limits = CPU_LIMITS,
) -> Report:
    """Run the reference free, forced and part by part over the tokens, and hold `mine` against each."""
    past_budget = _past_budget(checkpoint.config, len(tokens))
    invalid = tuple(_invalid(mine, checkpoint.config))
    if invalid:
        return Report(len(tokens), past_budget, failures=invalid)
    choices = all_forced(mine.choices)
    say("the reference as it is")
    free = reference.run(tokens)
    say("the reference with isobit's choices")
    forced = reference.run(tokens, choices)
    found = roots(mine.choices, forced.choices)
    say("the reference part by part")
    with matched_roundings(reference, checkpoint):
        apart = reference.run(tokens, choices, given=mine.boundaries)
    rooted = free
    if found:
        say("the reference with the root choices only")
        rooted = reference.run(tokens, {root.place: choices[root.place] for root in found})
    with_choices, part_by_part = agreement(mine, forced), agreement(mine, apart)
    compared = parts(part_names(checkpoint.config), mine.boundaries, apart.boundaries)
    differences = [
        _difference(position, mine, free, rooted, found, 2 * with_choices.logit_error)
        for position in np.flatnonzero(mine.logits.argmax(1) != free.logits.argmax(1)).tolist()
    ]
    failures = [
        *_unexplained(found, differences, differing(mine.choices, rooted.choices)),
        *_no_ties(roots(mine.choices, apart.choices), "from the same inputs"),
        *_too_far_off(with_choices, part_by_part, limits),
        *_parts_off(compared, limits),
    ]
    return Report(
        tokens=len(tokens),
        past_budget=past_budget,
        free=agreement(mine, free),
        forced=with_choices,
        part_by_part=part_by_part,
        parts=tuple(compared),
        roots=tuple(found),
        differences=tuple(differences),
        failures=tuple(failures),
    )


def _difference(position: int, mine: Run, free: Run, rooted: Run, found: list[Root], error: float) -> Difference:
    token, theirs = int(mine.logits[position].argmax()), int(free.logits[position].argmax())
    settled = int(rooted.logits[position].argmax())
    reaching = [root for root in found if root.place.position <= position]
    causes = tuple(sorted(reaching, key=lambda root: (position - root.place.position, root.place.layer)))
    argmax_margin = None if settled == token else _preference(rooted, position, settled, token)
    near_tie = argmax_margin is None or argmax_margin <= error
    return Difference(
        position,
        token,
        theirs,
        margin=_preference(free, position, theirs, token),
        causes=causes,
        agrees_when_forced=settled == token,
        argmax_margin=argmax_margin,
        explained=near_tie and all(root.is_near_tie for root in causes),
    )


def _invalid(mine: Run, config: FlashNextConfig) -> Iterator[str]:
    if not np.isfinite(mine.logits).all():
        yield "isobit's logits are not finite"
    blocks = config.index_blocks if config.attention_layers else 0
    counts: dict[ChoiceKind, int] = {"router": config.num_experts_per_tok, "blocks": blocks}
    for place in malformed(mine.choices, counts):
        yield f"isobit's choice is not a valid one: {place}"


def _no_ties(found: list[Root], condition: str) -> Iterator[str]:
    for root in found:
        if not root.is_near_tie:
            yield (
                f"{root.place}: {condition}, isobit took {list(root.taken)} over {list(root.dropped)}, which the "
                f"reference prefers by {root.margin:.3g}, more than the measured error {root.error:.3g}"
            )


def _unexplained(found: list[Root], differences: list[Difference], still_differing: list[Place]) -> Iterator[str]:
    yield from _no_ties(found, "with its other choices")
    for difference in differences:
        if not difference.explained:
            yield f"position {difference.position}: the best tokens differ and no near tie explains it"
    for place in still_differing:
        yield f"{place}: differs although every root choice is forced"


def _too_far_off(with_choices: Agreement, part_by_part: Agreement, limits: Limits) -> Iterator[str]:
    for what, error, limit in (
        ("logits, with isobit's choices,", with_choices.error_max, ROUNDING_LIMIT),
        ("router and indexer scores, with isobit's choices,", with_choices.score_error, ROUNDING_LIMIT),
        ("logits, from the same inputs,", part_by_part.error_mean, limits.part),
        ("router and indexer scores, from the same inputs,", part_by_part.score_error, limits.part),
    ):
        if not error <= limit:
            yield f"the {what} are off by {error:.3g}, relatively, above {limit:g}"


def _parts_off(compared: list[Part], limits: Limits) -> Iterator[str]:
    for part in compared:
        if not part.error <= limits.part:
            yield f"{part.name}, from the same inputs, is off by {part.error:.3g}, relatively, above {limits.part:g}"
        elif not part.worst <= limits.worst:
            where = f"{part.name} at position {part.position}"
            yield f"{where}, from the same inputs, is off by {part.worst:.3g}, relatively, above {limits.worst:g}"


def _preference(run: Run, position: int, over: int, under: int) -> float:
    return float(run.logits[position, over] - run.logits[position, under])


def _past_budget(config: FlashNextConfig, tokens: int) -> int:
    if not config.attention_layers:
        return 0
    return max(tokens - (config.indexer_budget + config.indexer_compress_ratio - 1), 0)
