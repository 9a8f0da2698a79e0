"""Holds isobit's run against the reference, and explains or fails on every difference."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.choices import (
    ChoiceKind,
    Forced,
    Root,
    Run,
    all_forced,
    differing,
    malformed,
    relative_score_errors,
    roots,
)
from isobit.fidelity.matched import matched_roundings
from isobit.fidelity.reference import Reference

ROUNDING_LIMIT = 2e-2  # relative error that half-precision operands may cause, choices being equal
MATCHED_LIMIT = 1e-3  # relative error that the order of float32 sums may cause, roundings being equal too

Say = Callable[[str], None]


@dataclass(frozen=True)
class Agreement:
    """isobit's logits against a reference run's, over all positions.

    top1: positions with the same best token. kl: of isobit's distribution from the reference's, in nats. error: the
    norm of the difference over the norm of the reference's logits, per position. logit_error: the largest difference.
    score_error: of routers and indexers, norm over norm, in the worst layer.
    """

    top1: int
    positions: int
    kl_mean: float
    kl_max: float
    error_mean: float
    error_max: float
    logit_error: float
    score_error: float


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
    """What `isobit fidelity` found. past_budget: positions at which the indexer had more blocks than it may read."""

    tokens: int
    past_budget: int
    free: Agreement
    forced: Agreement | None
    matched: Agreement | None
    roots: tuple[Root, ...]
    differences: tuple[Difference, ...]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"passed": self.passed, **asdict(self)}


def compare(mine: Run, reference: Reference, checkpoint: Checkpoint, tokens: np.ndarray, say: Say) -> Report:
    """Run the reference free, forced and with matched roundings over the tokens, and hold `mine` against each."""
    say("the reference, as it is")
    free = reference.run(tokens)
    past_budget = _past_budget(checkpoint, len(tokens))
    broken = malformed(mine.choices, _counts(checkpoint)) or []
    if broken or not np.isfinite(mine.logits).all():
        failures = [f"isobit's choice is not a valid one: {place}" for place in broken[:8]]
        if not np.isfinite(mine.logits).all():
            failures.append("isobit's logits are not finite")
        return Report(len(tokens), past_budget, agreement(mine, free), None, None, (), (), tuple(failures))
    say("the reference with isobit's choices")
    everything = all_forced(mine.choices)
    forced = reference.run(tokens, everything)
    found = roots(mine.choices, forced.choices)
    say("the reference with isobit's choices and roundings")
    with matched_roundings(reference, checkpoint):
        matched = reference.run(tokens, everything)
    rooted = free
    if found:
        say("the reference with the root choices only")
        rooted = reference.run(tokens, _only(everything, found))
    near, nearest = agreement(mine, forced), agreement(mine, matched)
    differences = [
        _difference(position, mine, free, rooted, found, near.logit_error)
        for position in np.flatnonzero(mine.logits.argmax(1) != free.logits.argmax(1)).tolist()
    ]
    failures = _failures(mine, rooted, found, differences, near, nearest)
    return Report(
        tokens=len(tokens),
        past_budget=past_budget,
        free=agreement(mine, free),
        forced=near,
        matched=nearest,
        roots=tuple(found),
        differences=tuple(differences),
        failures=tuple(failures),
    )


def agreement(mine: Run, reference: Run) -> Agreement:
    """How far apart two runs' logits are."""
    positions = len(mine.logits)
    kl, error, largest, top1 = np.empty(positions), np.empty(positions), 0.0, 0
    for position in range(positions):
        ours, theirs = (run.logits[position].astype(np.float64) for run in (mine, reference))
        difference = ours - theirs
        kl[position] = max(divergence(theirs, ours), 0.0)
        error[position] = _norm(difference) / max(_norm(theirs), 1e-30)
        largest = max(largest, float(np.abs(difference).max()))
        top1 += int(ours.argmax() == theirs.argmax())
    return Agreement(
        top1=top1,
        positions=positions,
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        error_mean=float(error.mean()),
        error_max=float(error.max()),
        logit_error=largest,
        score_error=max(relative_score_errors(mine.choices, reference.choices).values(), default=0.0),
    )


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt((values * values).sum()))


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """KL(p || q) in nats, of the softmax of float64 logits."""
    log_p, log_q = log_softmax(p_logits), log_softmax(q_logits)
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


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


def _failures(
    mine: Run, rooted: Run, found: list[Root], differences: list[Difference], forced: Agreement, matched: Agreement
) -> list[str]:
    failures = [
        f"{root.place}: isobit took {list(root.taken)} over {list(root.dropped)}, which the reference prefers by "
        f"{root.margin:.3g}, more than the scores' measured error {root.error:.3g}"
        for root in found
        if not root.is_near_tie
    ]
    failures += [f"position {d.position}: the best tokens differ and no near tie explains it"
                 for d in differences if not d.explained]  # fmt: skip
    failures += [f"{place}: differs although every root choice is forced"
                 for place in differing(mine.choices, rooted.choices)[:8]]  # fmt: skip
    for condition, errors, limit in (
        ("with isobit's choices", forced, ROUNDING_LIMIT),
        ("with isobit's choices and roundings", matched, MATCHED_LIMIT),
    ):
        for what, error in (("logits", errors.error_max), ("router and indexer scores", errors.score_error)):
            if not error <= limit:
                failures.append(f"the {what} {condition} are off by {error:.3g}, relatively, above {limit:g}")
    return failures


def _preference(run: Run, position: int, over: int, under: int) -> float:
    return float(run.logits[position, over] - run.logits[position, under])


def _only(everything: Forced, found: list[Root]) -> Forced:
    return {root.place: everything[root.place] for root in found}


def _counts(checkpoint: Checkpoint) -> dict[ChoiceKind, int]:
    config = checkpoint.config
    blocks = config.index_blocks if config.attention_layers else 0
    return {"router": config.num_experts_per_tok, "blocks": blocks}


def _past_budget(checkpoint: Checkpoint, tokens: int) -> int:
    config = checkpoint.config
    if not config.attention_layers:
        return 0
    first = config.indexer_budget + config.indexer_compress_ratio - 1
    return max(tokens - first, 0)
