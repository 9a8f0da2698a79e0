"""The row contract of the gated residual on CUDA."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from isobit.cuda import memory
from isobit.ops.cases import stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.gated_residual import contract, cuda


class GatedWrite(contract.GatedWrite):
    """The writes that need no linear layer, with the CPU's bytes."""

    implementations = ("cpu", "cuda", "cuda_normed")
    row_edges = (cuda.MOST_FEW_ROWS,)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return super().call("one_thread", case, state, plan)
        rows = stream_of_row(plan)
        streams, added = (memory.to_device(case.inputs["streams"][rows]) for _ in range(2))
        injection, y = (on_device(case.inputs[name][rows]) for name in ("injection", "y"))
        if implementation == "cuda":
            cuda.gated_write(streams, injection, y)
        else:
            inverse = cuda.gated_write_normed(streams, injection, y, EPS)
            same = memory.to_host(inverse).tobytes() == memory.to_host(cuda.inverse_norms(streams, EPS)).tobytes()
            assert same, "the norms of a write differ from those of what it wrote"
        cuda.add_streams(added, y)
        expanded = cuda.expand_streams(y, streams.shape[1])
        return to_host({"written": streams, "added": added, "expanded": expanded})


EPS = float(np.float32(1e-6))

register(GatedWrite(), device="cuda")
