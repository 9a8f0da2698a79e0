"""The row contract of the RMS norm."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.ops.cases import ALL_KINDS, SMALLEST, UNIT, given, rows_of_kinds, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.norm import reference
from isobit.ops.norm.cpu import group_norm, norm
from isobit.ops.work import forced_pieces

PIECES = {"one_thread": 1, "three_threads": 3}


class Norm:
    """Plain and group norm on one thread and on three."""

    name = "norm"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        widths = ((1, 1), (7, 1), (32, 2), (40, 4), (129, 1)) + (((2560, 4), (10240, 1)) if full else ())
        for width, groups in widths:
            inputs = {
                "x": rows_of_kinds(rng, 24, groups, width, kinds=ALL_KINDS),
                "weight": rng.standard_normal(groups * width).astype(np.float32),
                "eps": float(10.0 ** -rng.integers(4, 8)),
            }
            yield Case(f"{groups} groups of {width}", (1,) * 24, inputs)

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        x, weight, eps = (case.inputs[name] for name in ("x", "weight", "eps"))
        x, weight = given(x[stream_of_row(plan)]), given(weight)
        with forced_pieces(PIECES[implementation]):
            if x.shape[1] == 1:
                return {"y": norm(x[:, 0], weight, eps)[:, None]}
            return {"y": group_norm(x, weight, x.shape[1], eps)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        x, weight, eps = (case.inputs[name] for name in ("x", "weight", "eps"))
        return {"y": reference.norm(x, weight.reshape(x.shape[1:]), eps)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        width = case.inputs["x"].shape[-1]
        return {"y": np.abs(reference["y"]) * (width / 32 + 16) * UNIT + 8 * SMALLEST}

    def limits(self) -> list[str]:
        return ["rows whose sum of squares is above float32's range (|x| from about 1e17 on) come out as zero"]


register(Norm())
