"""The row contract of sampling on CUDA: its sums are exact, and so not the CPU's in the last bit."""

from collections.abc import Sequence
from typing import Any

from isobit.cuda import memory
from isobit.ops.cases import given, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.sample import contract, cuda, packed_draws


class Sample(contract.Sample):
    """Draws given on the host and on the device, read array by array and in one copy."""

    implementations: tuple[str, ...] = ("host_draws", "device_draws", "one_copy")
    sums_are_exact = True

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        draws: Any = [case.inputs["draws"][row] for row in rows]
        if implementation == "device_draws":
            draws = memory.to_device(packed_draws(draws))
        samples = cuda.sample(on_device(case.inputs["logits"][rows]), draws)
        if implementation == "one_copy":
            samples = cuda.samples_to_host(samples)
        return to_host({"token": samples.tokens, "logprob": samples.logprob, "finite": samples.finite})


class TopLogprobs(contract.TopLogprobs):
    """Logits on the device and on the host."""

    implementations: tuple[str, ...] = ("device_logits", "host_logits")
    sums_are_exact = True

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        place = on_device if implementation == "device_logits" else given
        logits: Any = place(case.inputs["logits"][stream_of_row(plan)])
        ids, logprobs = cuda.top_logprobs(logits, case.inputs["count"])
        return to_host({"ids": ids, "logprobs": logprobs})

    def limits(self) -> list[str]:
        return [f"more than {cuda.MOST_IDS} ids, or more than {cuda.MOST_SORTED} of the likeliest, are refused"]


register(Sample(), device="cuda")
register(TopLogprobs(), device="cuda")
