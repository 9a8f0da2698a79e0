"""The row contract of linear on CUDA."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from isobit.checkpoint.weights import Exl3Linear, Linear, PlainLinear
from isobit.cuda import memory
from isobit.ops.cases import stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import on_device, to_host
from isobit.ops.linear import contract, cuda, cuda_reference
from isobit.ops.linear.contract import awkward_rows, random_plain, random_trellis
from isobit.ops.linear.cuda_layers import LinearHandle

GROUPED = "grouped"  # in one launch with other layers of its format
AS_WIDE = "as wide"  # by the kernels of layers of many outputs
IMPLEMENTATIONS = {
    "few_rows": cuda.FEW_ROWS,
    "many_rows": cuda.MANY_ROWS,
    "own_product": cuda.OWN_PRODUCT,
    AS_WIDE: cuda.AS_WIDE,
}


@dataclass(frozen=True)
class Prepared:
    """A case's layer, and others of as many inputs that are computed with it: of its format where that is a trellis."""

    layer: LinearHandle
    alike: list[LinearHandle]


class CudaLinearOp(contract.LinearOp):
    """Few rows from tiles decoded in registers, many from expanded weights through cuBLAS or the own product."""

    implementations = (*IMPLEMENTATIONS, contract.IN_COMPANY, GROUPED)
    row_edges = (8, 16, 32, cuda.MOST_FEW_ROWS, cuda.MOST_FEW_PLAIN_ROWS)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        yield from super().cases(rng, full)
        yield self._case("float16 64x520", awkward_rows(rng, 11, 64), random_plain(rng, 64, 520, "float16"))
        # Columns enough to be dealt whole and in halves.
        weights = random_trellis(rng, 1024, 1100, "mul1", 3, bias=True)
        yield self._case("mul1 3 bits 1024x1100", awkward_rows(rng, 17, 1024), weights)

    def begin(self, case: Case) -> Any:
        weights = case.inputs["weights"]
        return Prepared(cuda.prepare_linear(weights), [cuda.prepare_linear(other) for other in layers_like(weights)])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        if implementation == contract.IN_COMPANY:
            beside = companion(state.layer.in_features, memory.is_emulated())
            return company_outputs(case.inputs["x"][rows], [beside, state.layer])
        how = IMPLEMENTATIONS.get(implementation, cuda.FEW_ROWS)
        most = cuda.MOST_FEW_ROWS if how in (cuda.FEW_ROWS, cuda.AS_WIDE) else len(rows)
        pieces = [rows[first : first + most] for first in range(0, len(rows), most)]
        if implementation == GROUPED:
            parts = [company_outputs(case.inputs["x"][piece], [*state.alike, state.layer])["y"] for piece in pieces]
        else:
            parts = [alone(case.inputs["x"][piece], state.layer, how) for piece in pieces]
        return {"y": np.concatenate(parts)}

    def reference(self, case: Case) -> Outputs:
        return {"y": cuda_reference.linear(case.inputs["x"], case.inputs["weights"])}

    def error_limit(self, case: Case, reference_outputs: Outputs) -> Outputs:
        return {"y": cuda_reference.error_limit(case.inputs["x"], case.inputs["weights"], reference_outputs["y"])}

    def limits(self) -> list[str]:
        where = "the emulator: cuBLAS is not run" if memory.is_emulated() else "cuBLAS is compared shape by shape"
        return [
            "outputs beyond 2560 of one layer: columns are computed in blocks of 128 that do not meet",
            f"rows beyond 530: rows are computed in passes; {where}",
        ]


def alone(x: np.ndarray, layer: LinearHandle, how: int) -> np.ndarray:
    return to_host({"y": cuda.linear(on_device(x), layer, how)})["y"]


def company_outputs(x: np.ndarray, layers: Sequence[LinearHandle]) -> Outputs:
    """What the last of several layers of one x gives."""
    return to_host({"y": cuda.linears(on_device(x), layers)[-1]})


def layers_like(weights: Linear) -> list[Linear]:
    """Two other layers of a trellis layer's format and inputs; none like a plain one."""
    if not isinstance(weights, Exl3Linear):
        return []
    rng = np.random.default_rng(11)
    return [
        random_trellis(rng, weights.in_features, outputs, weights.codebook, weights.bits, bias=outputs == 200)
        for outputs in (384, 200)
    ]


@lru_cache(maxsize=4)
def companion(inputs: int, emulated: bool) -> Any:
    """A layer to compute beside another of as many inputs, on the emulator or on the GPU."""
    return cuda.prepare_linear(PlainLinear("companion", np.ones((48, inputs), np.float32)))


register(CudaLinearOp(), device="cuda")
