"""The row contract of sampling."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.ops.cases import ALL_KINDS, given, rows_of_kinds, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.sample import Draw, reference
from isobit.ops.sample.cpu import sample, samples_to_host, top_logprobs
from isobit.ops.work import forced_pieces

PIECES = {"one_thread": 1, "three_threads": 3}
DOUBLE_UNIT = 2.0**-53
TOLERANCE = 1e-12  # how far sums of float64 weights may be off, relative to their total


def draws_of(rng: np.random.Generator, rows: int) -> list[Draw]:
    """One draw a row: each filter alone, all together, and greedy."""
    filters: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 3.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"top_k": 1},
    ]
    keys = zip(rng.integers(0, 2**63, rows), rng.integers(0, 1 << 18, rows), strict=True)
    return [
        Draw(**filters[row % len(filters)], seed=int(seed) * 2 + 1, position=int(position))
        for row, (seed, position) in enumerate(keys)
    ]


def logits_cases(rng: np.random.Generator, full: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Logits of as many kinds as meet each kind of draw, ten rows for each of the seven draws where ids are few."""
    for width in (1, 2, 40, 2500) + ((248_320,) if full else ()):
        rows, kinds = (70, ALL_KINDS) if width <= 2500 else (14, ("random", "large"))
        for largest in (8.0, 1e30):
            yield f"{width} ids, up to {largest}", rows_of_kinds(rng, rows, width, largest=largest, kinds=kinds)


def finite_rows(case: Case) -> Iterator[tuple[int, np.ndarray]]:
    for row, logits in enumerate(case.inputs["logits"]):
        if np.isfinite(logits).all():
            yield row, logits


def logprob_limit(logprobs: np.ndarray, width: int) -> np.ndarray:
    """The sum of exponentials is off by a rounding a term, its logarithm by as much."""
    return (width + 16 + 4 * np.abs(logprobs)) * DOUBLE_UNIT


class Sample:
    """Rows with their own draws, some of them with logits that are not finite."""

    name = "sample"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for label, logits in logits_cases(rng, full):
            yield Case(label, (1,) * len(logits), {"logits": logits, "draws": draws_of(rng, len(logits))})

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        with forced_pieces(PIECES[implementation]):
            drawn = sample(given(case.inputs["logits"][rows]), [case.inputs["draws"][row] for row in rows])
        samples = samples_to_host(drawn)
        return {"token": samples.tokens, "logprob": samples.logprob, "finite": samples.finite}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        rows = len(case.rows)
        tokens, logprobs, finite = np.full(rows, -1), np.full(rows, np.nan), np.zeros(rows, np.bool_)
        for row, logits in finite_rows(case):
            tokens[row] = reference.token(logits, case.inputs["draws"][row])
            logprobs[row] = reference.logprobs(logits)[tokens[row]]
            finite[row] = True
        return {"token": tokens, "logprob": logprobs, "finite": finite}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """A draw that the sums' errors could change has no limit."""
        certain = np.ones(len(case.rows), np.bool_)
        for row, logits in finite_rows(case):
            certain[row] = self._is_certain(logits, case.inputs["draws"][row], reference["token"][row])
        limit = logprob_limit(reference["logprob"], case.inputs["logits"].shape[1])
        return {
            "token": np.where(certain, 0, np.inf),
            "logprob": np.where(certain, limit, np.inf),
            "finite": np.zeros(()),
        }

    def limits(self) -> list[str]:
        return ["temperatures below 0 and filters out of their ranges, which the server refuses"]

    def _is_certain(self, logits: np.ndarray, draw: Draw, token: int) -> bool:
        shifts, stretches = (-TOLERANCE, TOLERANCE), (1 - TOLERANCE, 1 + TOLERANCE)
        near = {reference.token(logits, draw, shift, stretch) for shift in shifts for stretch in stretches}
        return near == {token}


class TopLogprobs:
    """The most likely ids, more than there are included."""

    name = "top_logprobs"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, (label, logits) in enumerate(logits_cases(rng, full)):
            yield Case(label, (1,) * len(logits), {"logits": logits, "count": (1, 20, 5)[number % 3]})

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        with forced_pieces(PIECES[implementation]):
            ids, logprobs = top_logprobs(given(case.inputs["logits"][stream_of_row(plan)]), case.inputs["count"])
        return {"ids": ids, "logprobs": logprobs}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        shape = len(case.rows), min(case.inputs["count"], case.inputs["logits"].shape[1])
        ids, logprobs = np.full(shape, -1), np.full(shape, np.nan)
        for row, logits in finite_rows(case):
            ids[row] = reference.order(logits)[: shape[1]]
            logprobs[row] = reference.logprobs(logits)[ids[row]]
        return {"ids": ids, "logprobs": logprobs}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        limit = logprob_limit(reference["logprobs"], case.inputs["logits"].shape[1])
        return {"ids": np.zeros(()), "logprobs": limit}

    def limits(self) -> list[str]:
        return ["more than 2^31 ids"]


register(Sample())
register(TopLogprobs())
