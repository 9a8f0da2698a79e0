"""The row contract of the Gated DeltaNet on CUDA: the CPU's bytes but for the recurrence, whose sums are its own."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.cuda import memory
from isobit.ops.batch import Batch
from isobit.ops.cases import UNIT, rows_of_plan, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.delta_rule import contract, cuda
from isobit.ops.device_cases import DeviceState, on_device, to_host
from isobit.ops.journaled import JournaledOp

IMPLEMENTATIONS = {"few_rows": cuda.FEW_ROWS, "many_rows": cuda.MANY_ROWS, "by_row_count": cuda.BY_ROW_COUNT}


class LentPool:
    """A pool and a journal of the host on the device for one call; afterwards they hold what the call wrote."""

    def __init__(self, pool: np.ndarray, journal: np.ndarray | None):
        self._host = [pool] if journal is None else [pool, journal]

    def __enter__(self) -> tuple[Any, Any]:
        self._device = [guarded(array) for array in self._host]
        return self._device[0], self._device[1] if len(self._device) > 1 else None

    def __exit__(self, *_: object) -> None:
        for array, written in zip(self._host, self._device, strict=True):
            array[...] = memory.to_host(written)


def guarded(array: np.ndarray) -> Any:
    """A copy on the device where op outputs come from."""
    source = memory.to_device(array)
    copy = memory.empty(source.shape, source.dtype)
    copy.copy_(source)
    return copy


class CausalConv(DeviceState, contract.CausalConv):
    """The convolution, row by row and by chunks of rows."""

    implementations: tuple[str, ...] = ("cpu", *IMPLEMENTATIONS)
    row_edges = (cuda.MOST_FEW_ROWS, cuda.CONV_CHUNK[cuda.MANY_ROWS])

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        if implementation == "cpu":
            return super().compute("one_thread", case, state, plan, batch, journal)
        host, pool = state
        x, dilation = on_device(rows_of_plan(plan, case.inputs["x"])), case.inputs["dilation"]
        how = IMPLEMENTATIONS[implementation]
        zeros = np.zeros(1, np.float32)
        handle = cuda.prepare_delta(case.inputs["weight"], zeros, zeros, zeros, 1, 1, 4, 4, 1e-6, "sigmoid")
        with LentPool(pool, journal) as (moving, written):
            if dilation == 1:
                return to_host({"y": cuda.causal_conv(x, handle, moving, batch, written, how)})
            weight = on_device(host.conv_weight)
            return to_host({"y": cuda.convolve(x, weight, dilation, moving, batch, written, how)})

    def device_state(self, case: Case, state: Any) -> dict[str, Any]:
        return {"rows": state[1]}


class DeltaRule(DeviceState, contract.DeltaRule):
    """The recurrence in both tilings, also where a key head serves more value heads than a lane takes."""

    implementations: tuple[str, ...] = tuple(IMPLEMENTATIONS)
    row_edges = (cuda.MOST_FEW_ROWS,)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        yield from super().cases(rng, full)
        yield self._case_of(rng, 2, 8, 64, 24)

    def begin(self, case: Case) -> Any:
        sizes, inputs = self._sizes(case), case.inputs
        key_heads, value_heads, key_dim, value_dim = sizes
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        conv_weight, norm_weight = np.zeros((channels, 4), np.float32), np.ones(value_dim, np.float32)
        gates = inputs["a_log"], inputs["dt_bias"]
        handle = cuda.prepare_delta(conv_weight, *gates, norm_weight, *sizes, 1e-6, "sigmoid")
        return handle, super().begin(case)[1]

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        handle, pool = state
        qkv, a, b = (on_device(rows_of_plan(plan, case.inputs[name])) for name in ("qkv", "a", "b"))
        with LentPool(pool, journal) as (moving, written):
            how = IMPLEMENTATIONS[implementation]
            return to_host({"o": cuda.delta_rule(qkv, a, b, handle, moving, batch, written, how)})

    def device_state(self, case: Case, state: Any) -> dict[str, Any]:
        return {"recurrent": state[1]}

    def limits(self) -> list[str]:
        return [*super().limits(), "key dims above 128; value heads that the key heads do not divide"]

    def _sizes(self, case: Case) -> tuple[int, int, int, int]:
        """Key heads, value heads, key dim, value dim."""
        value_heads, key_dim, value_dim = case.inputs["state"].shape[1:]
        return case.inputs["key_heads"], value_heads, key_dim, value_dim

    def _case_of(
        self, rng: np.random.Generator, key_heads: int, value_heads: int, key_dim: int, value_dim: int
    ) -> Case:
        """Short streams of ordinary values."""
        streams, channels = (1, 2, 9), 2 * key_heads * key_dim + value_heads * value_dim
        normal = rng.standard_normal
        inputs = {
            "qkv": [normal((rows, channels)).astype(np.float32) for rows in streams],
            "a": [normal((rows, value_heads)).astype(np.float32) for rows in streams],
            "b": [normal((rows, value_heads)).astype(np.float32) for rows in streams],
            "state": normal((len(streams), value_heads, key_dim, value_dim)).astype(np.float32),
            "a_log": rng.uniform(-4, 2, value_heads).astype(np.float32),
            "dt_bias": normal(value_heads).astype(np.float32),
            "key_heads": key_heads,
        }
        label = f"{key_heads} key heads of {key_dim}, {value_heads} value heads of {value_dim}, ordinary"
        return Case(label, streams, inputs)

    def _rounding(self, case: Case) -> float:
        """The CPU's, whose chains are longer; what is read of the state before a row is rounded three times more."""
        return super()._rounding(case) + 3 * UNIT


class GatedNorm(contract.GatedNorm):
    """The norm of each head, one warp a head."""

    implementations: tuple[str, ...] = ("cpu", "cuda")

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return super().call("one_thread", case, state, plan)
        rows, weight = stream_of_row(plan), case.inputs["weight"]
        zeros, width = np.zeros(1, np.float32), len(weight)
        conv_weight = np.zeros((3 * width, 4), np.float32)
        gate = case.inputs["gate"]
        handle = cuda.prepare_delta(conv_weight, zeros, zeros, weight, 1, 1, width, width, 1e-6, gate)
        x, z = (on_device(case.inputs[name][rows]) for name in ("x", "z"))
        return to_host({"y": cuda.gated_norm(x, z, handle)})


register(CausalConv(), device="cuda")
register(JournaledOp(CausalConv()), device="cuda")
register(DeltaRule(), device="cuda")
register(JournaledOp(DeltaRule()), device="cuda")
register(GatedNorm(), device="cuda")
