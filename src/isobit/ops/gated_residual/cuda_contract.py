"""The row contract of the gated residual on CUDA."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.checkpoint.weights import PlainLinear
from isobit.cuda import memory
from isobit.ops.cases import stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.gated_residual import contract, cuda
from isobit.ops.linear import cuda_reference
from isobit.ops.linear.cuda import prepare_linear
from isobit.ops.norm import reference as norm_reference

READS = {
    "layer_by_layer": cuda.LAYER_BY_LAYER,
    "few_rows": cuda.FEW_ROWS,
    "many_rows": cuda.MANY_ROWS,
    "by_row_count": cuda.BY_ROW_COUNT,
}
NORMED_WRITES = "normed_writes"  # many rows, with the norms that the write before has found
EPS = float(np.float32(1e-6))


class GatedRead(contract.GatedRead):
    """The read of sites whose layers are read whole, and of those that are read layer by layer."""

    implementations: tuple[str, ...] = (*READS, NORMED_WRITES)
    row_edges = (cuda.MOST_OWN_ROWS, 16, 32, cuda.MOST_FEW_ROWS)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        yield from super().cases(rng, full)
        for hidden, rank, writes in ((144, 24, True), (144, 330, False)):
            yield self._half_case(rng, 4, hidden, rank, writes)
        if full:
            yield self._half_case(rng, 4, 2560, 320, True)

    def begin(self, case: Case) -> Any:
        down, up = (prepare_linear(PlainLinear(name, case.inputs[name])) for name in ("down", "up"))
        inject = None if case.inputs["inject"] is None else prepare_linear(PlainLinear("inject", case.inputs["inject"]))
        streams = case.inputs["streams"].shape[1]
        return cuda.prepare_gated_residual(case.inputs["norm_weight"], down, up, inject, streams, case.inputs["eps"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        how = cuda.MANY_ROWS if implementation == NORMED_WRITES else READS[implementation]
        if state.inject_at is None:
            how = cuda.LAYER_BY_LAYER
        most = cuda.MOST_FEW_ROWS if how == cuda.FEW_ROWS else len(rows)
        pieces = []
        for first in range(0, len(rows), most):
            streams = on_device(case.inputs["streams"][rows[first : first + most]])
            inverse = cuda.inverse_norms(streams, state.eps) if implementation == NORMED_WRITES else None
            mixed, injection = cuda.gated_read(streams, state, inverse, how)
            outputs = {"mixed": mixed} if injection is None else {"mixed": mixed, "injection": injection}
            pieces.append(to_host(outputs))
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """The CPU's bound, and what rounding inputs to half and cutting off tensor-core sums adds to it."""
        limits = super().error_limit(case, reference)
        streams, norm_weight, down, up, inject, eps = self._arguments(case)
        rows, count, hidden = streams.shape
        normed = norm_reference.norm(streams, norm_weight.reshape(count, hidden), eps)
        flat = normed.reshape(rows, -1)
        low = flat @ down.T / count
        low = low / (1 + np.exp(-low))
        low_error = 1.1 * self._product_error(flat, down) / count
        up_error = low_error @ np.abs(up).T + self._product_error(low, up)
        limits["mixed"] = limits["mixed"] + (np.abs(normed) * up_error.reshape(normed.shape) / 4).mean(axis=1)
        if inject is not None:
            limits["injection"] = limits["injection"] + self._product_error(flat, inject) / count / 2
        return limits

    @staticmethod
    def _product_error(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """How far a layer's product may be off: rounded inputs, then the chains' errors. float64 [R, outputs]."""
        layer = PlainLinear("", weight)
        x32 = x.astype(np.float32)
        rounded = cuda_reference.multiplied_inputs(x32, layer)
        limit = cuda_reference.error_limit(x32, layer, cuda_reference.linear(x32, layer))
        return np.abs(x - rounded) @ np.abs(weight).T + limit

    @staticmethod
    def _half_case(rng: np.random.Generator, streams: int, hidden: int, rank: int, writes: bool) -> Case:
        """A site whose weights are halves, as in a checkpoint, so that whole reads take it."""
        wide = streams * hidden

        def matrix(outputs: int, inputs: int) -> np.ndarray:
            values = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
            return values.astype(np.float16).astype(np.float32)

        inputs = {
            "streams": contract.rows_of_kinds(rng, contract.ROWS, streams, hidden, kinds=contract.ALL_KINDS),
            "norm_weight": (0.3 * rng.standard_normal(wide)).astype(np.float32),
            "down": matrix(rank, wide),
            "up": matrix(wide, rank),
            "inject": matrix(streams, wide) if writes else None,
            "eps": 1e-6,
        }
        label = f"{streams} streams of {hidden}, rank {rank}, halves, writes: {writes}"
        return Case(label, (1,) * contract.ROWS, inputs)


class GatedWriteRead(contract.ReadAfterWrite, GatedRead):
    """The write and the read of CUDA."""

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        streams = memory.to_device(case.inputs["before"][rows])
        injection, y = (on_device(case.inputs[name][rows]) for name in ("injection", "y"))
        if implementation == "joined":
            mixed, following = cuda.gated_write_read(streams, injection, y, state)
        else:
            cuda.gated_write(streams, injection, y)
            mixed, following = cuda.gated_read(streams, state)
        outputs = {"mixed": mixed} if following is None else {"mixed": mixed, "injection": following}
        return to_host({**outputs, "written": streams})


class GatedWrite(contract.GatedWrite):
    """The writes that need no linear layer, with the CPU's bytes."""

    implementations: tuple[str, ...] = ("cpu", "cuda", "cuda_normed")
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
            inverse = to_host({"": cuda.gated_write_normed(streams, injection, y, EPS)})
            found = to_host({"": cuda.inverse_norms(streams, EPS)})
            if inverse[""].tobytes() != found[""].tobytes():
                raise ValueError("the norms that a write found are not those of what it wrote")
        cuda.add_streams(added, y)
        expanded = cuda.expand_streams(y, streams.shape[1])
        return to_host({"written": streams, "added": added, "expanded": expanded})


register(GatedRead(), device="cuda")
register(GatedWrite(), device="cuda")
register(GatedWriteRead(), device="cuda")
