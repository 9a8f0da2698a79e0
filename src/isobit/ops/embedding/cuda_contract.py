"""The row contract of embedding on CUDA: the CPU's bytes."""

from collections.abc import Sequence
from typing import Any

from isobit.ops.cases import given, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.embedding import contract, cpu, cuda


class Embedding(contract.Embedding):
    """Ids on the host and on the device."""

    implementations: tuple[str, ...] = ("cpu", "host_ids", "device_ids")

    def begin(self, case: Case) -> Any:
        weights = case.inputs["weights"]
        return cpu.prepare_embedding(weights), cuda.prepare_embedding(weights)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        on_host, handle = state
        ids = case.inputs["ids"][stream_of_row(plan)]
        if implementation == "cpu":
            return super().call("cpu", case, on_host, plan)
        return to_host({"rows": cuda.embed(given(ids) if implementation == "host_ids" else on_device(ids), handle)})


register(Embedding(), device="cuda")
