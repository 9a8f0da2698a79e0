"""How far apart two runs are."""

from dataclasses import dataclass

import numpy as np

from isobit.fidelity.choices import Run, relative_score_errors

TINY = 1e-30


@dataclass(frozen=True)
class Agreement:
    """isobit's logits against a reference run's, over all positions.

    top1: positions with the same best token. kl: of isobit's distribution from the reference's, in nats. error: the
    norm of the difference over the norm of the reference's logits, per position. Their medians, unlike their means, are
    not moved by the few positions at which a near tie was decided otherwise. logit_error: the largest difference.
    score_error: of routers and indexers, norm over norm, in the worst layer.
    """

    top1: int
    positions: int
    kl_mean: float
    kl_median: float
    kl_max: float
    error_mean: float
    error_median: float
    error_max: float
    logit_error: float
    score_error: float


def agreement(mine: Run, reference: Run) -> Agreement:
    """How far apart two runs' logits are."""
    positions = len(mine.logits)
    kl, error, largest, top1 = np.empty(positions), np.empty(positions), 0.0, 0
    for position in range(positions):
        ours, theirs = (run.logits[position].astype(np.float64) for run in (mine, reference))
        difference = ours - theirs
        kl[position] = max(divergence(theirs, ours), 0.0)
        error[position] = _norm(difference) / max(_norm(theirs), TINY)
        largest = max(largest, float(np.abs(difference).max()))
        top1 += int(ours.argmax() == theirs.argmax())
    return Agreement(
        top1=top1,
        positions=positions,
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_max=float(kl.max()),
        error_mean=float(error.mean()),
        error_median=float(np.median(error)),
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
