"""The row contracts of route and experts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isobit.checkpoint.weights import Linear
from isobit.ops.cases import given, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.experts import reference
from isobit.ops.experts.cpu import experts, prepare_experts, route
from isobit.ops.experts.product import BY_COUNT, FEW_BY_FEW, IN_PANELS, ROW_BY_ROW
from isobit.ops.experts.reference import HostExperts
from isobit.ops.linear.blocks import FEW_ROWS, GROUP_ROWS
from isobit.ops.linear.contract import awkward_rows, random_plain, random_trellis
from isobit.ops.linear.reference import ROUNDING, TINY

HOW = {"row by row": ROW_BY_ROW, "few by few": FEW_BY_FEW, "in panels": IN_PANELS, "by count": BY_COUNT}


class RouteOp:
    """Every row is its own stream. Logits are multiples of 1/64: equal or clearly apart, so that ids are certain."""

    name = "route"
    implementations: tuple[str, ...] = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for count, chosen in ((8, 2), (5, 5), (33, 4), (512, 10)):
            logits = np.round(rng.standard_normal((29, count)) * 64).astype(np.float32) / 64
            logits[1] = 0.25
            logits[2] = np.round(logits[2])
            logits[3] *= 1024
            logits[4] -= 30000
            logits[5, 1:] = -200
            logits[6] = np.where(np.arange(count) % 2, np.float32(0.0), np.float32(-0.0))
            logits[7, count // 2] = np.nan
            logits[8, count // 3], logits[9, 1:], logits[10] = np.inf, -np.inf, -np.inf
            for renormalise in (False, True):
                inputs = {"logits": logits, "chosen": chosen, "renormalise": renormalise}
                yield Case(f"{chosen} of {count}, renormalise {renormalise}", (1,) * len(logits), inputs)

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation != "cpu":
            raise KeyError(implementation)
        logits = given(case.inputs["logits"][stream_of_row(plan)])
        ids, weights = route(logits, case.inputs["chosen"], case.inputs["renormalise"])
        return {"ids": ids, "weights": weights}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        inputs = case.inputs
        ids, weights = reference.route(inputs["logits"], inputs["chosen"], inputs["renormalise"])
        return {"ids": ids.astype(np.float64), "weights": weights}

    def error_limit(self, case: Case, reference_outputs: Outputs) -> Outputs:
        logits = case.inputs["logits"].astype(np.float64)
        ids = reference_outputs["ids"].astype(np.int64)
        below = logits.max(axis=1, keepdims=True) - np.take_along_axis(logits, ids, axis=1)
        # An exponential's error grows with its argument's rounding; a sum of n terms in 32 lanes rounds n/32 + 5 times.
        roundings = below.max(axis=1, keepdims=True) + logits.shape[1] / 32 + case.inputs["chosen"] + 16
        return {"ids": np.zeros(()), "weights": 2 * roundings * ROUNDING * reference_outputs["weights"] + TINY}

    def limits(self) -> list[str]:
        return [
            "logits less than 1/64 apart but not equal: the float32 softmax decides, which float64 need not follow",
            "more than 512 experts",
        ]


class ExpertsOp:
    """Every row is its own stream."""

    name = "experts"
    implementations: tuple[str, ...] = tuple(HOW)
    row_edges = (GROUP_ROWS, FEW_ROWS)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        yield self._case(rng, "8 experts, 2 chosen", 29, 2, trellis_experts(rng, 8, 128, 128))
        yield self._case(rng, "mixed widths, padded sizes", 21, 3, trellis_experts(rng, 11, 160, 96, (3, 2.5), 300))
        yield self._case(rng, "plain, an empty shard", 13, 3, plain_experts(rng, 3, 72, 40))
        yield self._cancelling(rng)
        yield self._case(rng, "one expert for all rows", 300, 1, trellis_experts(rng, 1, 128, 128))
        if full:
            yield self._case(rng, "real widths", 16, 10, trellis_experts(rng, 12, 2560, 640, (3, 2, 4)))
            yield self._case(rng, "long inputs", 9, 2, trellis_experts(rng, 4, 4096, 128))
            yield self._case(rng, "every codebook", 21, 4, trellis_experts(rng, 12, 256, 256, (3, 4, 5), mixed=True))

    def begin(self, case: Case) -> Any:
        host: HostExperts = case.inputs["host"]
        return prepare_experts(host.gate, host.up, host.down, *host.shared, host.shared_expert_gate)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        x, ids, weights = (given(case.inputs[name][rows]) for name in ("x", "ids", "weights"))
        return {"y": experts(x, ids, weights, state, HOW[implementation])}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        return {"y": self._known(case)[0]}

    def error_limit(self, case: Case, reference_outputs: Outputs) -> Outputs:
        return {"y": self._known(case)[1]}

    def limits(self) -> list[str]:
        return [
            "rows beyond 300 of one expert: they are computed in passes of at most 256",
            "more than 12 experts at real widths",
        ]

    def _known(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """The reference and its limit."""
        inputs = (case.inputs[name] for name in ("x", "ids", "weights", "host"))
        known: tuple[np.ndarray, np.ndarray] = case.once("known", lambda: reference.experts(*inputs))
        return known

    def _cancelling(self, rng: np.random.Generator) -> Case:
        """Two equal experts of different shards with opposite weights, so that the order of the shards shows."""
        host = trellis_experts(rng, 8, 128, 128)
        gate, up, down = ([*layers[:2], layers[0], *layers[3:]] for layers in (host.gate, host.up, host.down))
        host = replace(host, gate=gate, up=up, down=down)
        case = self._case(rng, "cancelling experts", 12, 3, host)
        case.inputs["ids"][:] = [0, 2, 5]
        case.inputs["weights"][:, :2] = np.float32(1e15) * np.array([1, -1], np.float32)
        return case

    @staticmethod
    def _case(rng: np.random.Generator, label: str, rows: int, chosen: int, host: HostExperts) -> Case:
        ids = np.stack([np.sort(rng.permutation(len(host.gate))[:chosen]) for _ in range(rows)]).astype(np.int32)
        weights = rng.uniform(0, 1, (rows, chosen)).astype(np.float32)
        weights[::5] = np.float32(1e-42)
        x = awkward_rows(rng, rows, host.gate[0].in_features)
        x = np.where(np.isinf(x), x, np.clip(x, -1e9, 1e9))
        return Case(label, (1,) * rows, {"x": x, "ids": ids, "weights": weights, "host": host})


def trellis_experts(
    rng: np.random.Generator,
    count: int,
    hidden: int,
    inner: int,
    widths: Sequence[float] = (3,),
    shared_inner: int | None = None,
    mixed: bool = False,
) -> HostExperts:
    """EXL3 experts whose widths (and codebooks, if `mixed`) take turns; a plain gate for the shared one."""
    turn = iter(range(10**6))

    def layer(inputs: int, outputs: int) -> Linear:
        i = next(turn)
        codebook = ("mul1", "mcg", "3inst")[i % 3] if mixed else "mul1"
        return random_trellis(rng, inputs, outputs, codebook, widths[i % len(widths)])

    shared = shared_inner or inner
    gate, up = ([layer(hidden, inner) for _ in range(count)] for _ in range(2))
    down = [layer(inner, hidden) for _ in range(count)]
    shared_layers = layer(hidden, shared), layer(hidden, shared), layer(shared, hidden)
    return HostExperts(gate, up, down, shared_layers, random_plain(rng, hidden, 1, "bfloat16"))


def plain_experts(rng: np.random.Generator, count: int, hidden: int, inner: int) -> HostExperts:
    """Experts left plain."""
    kinds = ("float16", "bfloat16", "float32")
    sizes = (hidden, inner), (hidden, inner), (inner, hidden)
    gate, up, down = ([random_plain(rng, *size, kinds[e % 3]) for e in range(count)] for size in sizes)
    shared = tuple(random_plain(rng, *size, "float32") for size in sizes)
    return HostExperts(gate, up, down, (shared[0], shared[1], shared[2]), random_plain(rng, hidden, 1, "float32"))


register(RouteOp())
register(ExpertsOp())
