"""The row contracts of route and experts on CUDA."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isobit.ops.cases import stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.experts import contract, cuda
from isobit.ops.experts.contract import plain_experts, trellis_experts
from isobit.ops.experts.reference import HostExperts
from isobit.ops.linear.contract import random_trellis

HOW = {"few_rows": cuda.FEW_ROWS, "many_rows": cuda.MANY_ROWS, "by_row_count": cuda.BY_ROW_COUNT}
EXPERTS_HOW = {**HOW, "many_rows_by_warps": cuda.MANY_ROWS_BY_WARPS}
STEP_ROWS = 8  # of one multiply-accumulate
STEPS_ALLOWANCE = 2


class RouteOp(contract.RouteOp):
    """One warp a row, in blocks of one warp or four."""

    implementations = ("cpu", *HOW)
    row_edges = (cuda.MOST_FEW_ROWS,)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return super().call("cpu", case, state, plan)
        logits = on_device(case.inputs["logits"][stream_of_row(plan)])
        chosen, renormalise = case.inputs["chosen"], case.inputs["renormalise"]
        ids, weights = cuda.route(logits, chosen, renormalise, HOW[implementation])
        return to_host({"ids": ids, "weights": weights})


class ExpertsOp(contract.ExpertsOp):
    """Every row is its own stream."""

    implementations = tuple(EXPERTS_HOW)
    row_edges = (STEP_ROWS, cuda.MOST_FEW_ROWS)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        every_case = list(super().cases(rng, full))
        narrow = len(list(super().cases(np.random.default_rng(0), False))) if full else len(every_case)
        yield from every_case[:narrow]
        yield self._case(rng, "plain beside trellis layers", 19, 3, mixed_experts(rng, 7, 144, 136))
        yield self._case(rng, "three codebooks", 18, 2, trellis_experts(rng, 5, 128, 256, (3, 5, 2), mixed=True))
        yield from every_case[narrow:]

    def begin(self, case: Case) -> Any:
        host: HostExperts = case.inputs["host"]
        return cuda.prepare_experts(host.gate, host.up, host.down, *host.shared, host.shared_expert_gate)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        x, ids, weights = (on_device(case.inputs[name][rows]) for name in ("x", "ids", "weights"))
        return to_host({"y": cuda.experts(x, ids, weights, state, EXPERTS_HOW[implementation])})

    def error_limit(self, case: Case, reference_outputs: Outputs) -> Outputs:
        """Twice the CPU's.

        A step of a tensor core cuts off up to 2^-22 of its largest term, always towards zero: over K inputs up to
        K/16 * 2^-22 of the running sum, about half of that on average. The CPU's limit allows 12 * sqrt(K) * 2^-24 of
        it, which is more for K up to 9216.
        """
        limits = super().error_limit(case, reference_outputs)
        return {name: STEPS_ALLOWANCE * limit for name, limit in limits.items()}

    def limits(self) -> list[str]:
        return [
            "rows beyond 300 of one expert: they are computed in tiles of at most 128",
            "more than 12 experts at real widths",
            "inputs beyond 9216 of one layer: the error limit is not derived for them",
        ]


def mixed_experts(rng: np.random.Generator, count: int, hidden: int, inner: int) -> HostExperts:
    """Experts of which some projections are plain, each combination once, with biases in the trellis layers."""
    trellis, plain = trellis_experts(rng, count, hidden, inner), plain_experts(rng, count, hidden, inner)
    gate, up, down = (
        [(trellis_layers if e >> bit & 1 else plain_layers)[e] for e in range(count)]
        for bit, (trellis_layers, plain_layers) in enumerate(
            [(trellis.gate, plain.gate), (trellis.up, plain.up), (trellis.down, plain.down)]
        )
    )
    shared_up = random_trellis(rng, hidden, inner, "mul1", 4, bias=True)
    shared = (plain.shared[0], shared_up, random_trellis(rng, inner, hidden, "mul1", 3, bias=True))
    return replace(trellis, gate=gate, up=up, down=down, shared=shared)


register(RouteOp(), device="cuda")
register(ExpertsOp(), device="cuda")
