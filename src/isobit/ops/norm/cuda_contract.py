"""The row contract of the RMS norm on CUDA: the CPU's bytes."""

from collections.abc import Sequence
from typing import Any

from isobit.ops.cases import stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.norm import contract, cuda

IMPLEMENTATIONS = {"few_rows": cuda.FEW_ROWS, "many_rows": cuda.MANY_ROWS, "by_row_count": cuda.BY_ROW_COUNT}


class Norm(contract.Norm):
    """Plain and group norm, one warp a block and several."""

    implementations = ("cpu", *IMPLEMENTATIONS)
    row_edges = (cuda.MOST_FEW_ROWS,)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return super().call("one_thread", case, state, plan)
        x, weight, eps = (case.inputs[name] for name in ("x", "weight", "eps"))
        x, weight, how = on_device(x[stream_of_row(plan)]), on_device(weight), IMPLEMENTATIONS[implementation]
        if x.shape[1] == 1:
            return to_host({"y": cuda.norm(x[:, 0], weight, eps, how)[:, None]})
        return to_host({"y": cuda.group_norm(x, weight, x.shape[1], eps, how)})


register(Norm(), device="cuda")
