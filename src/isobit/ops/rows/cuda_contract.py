"""The row contract of the row movements on CUDA: the CPU's bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from isobit.cuda import memory
from isobit.ops.batch import Batch
from isobit.ops.cases import given, in_place, rows_of_plan, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import DeviceState, on_device, to_host
from isobit.ops.journaled import JournaledOp
from isobit.ops.rows import contract, cuda

FILL = contract.FILL


class ShiftRows(DeviceState, contract.ShiftRows):
    """Every row's predecessor, the pool on the device."""

    implementations: tuple[str, ...] = ("cpu", "cuda")

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        if implementation == "cpu":
            return super().compute("cpu", case, state, plan, batch, journal)
        x = rows_of_plan(plan, case.inputs["x"])
        pool = memory.to_device(state)
        written = None if journal is None else memory.to_device(journal)
        previous = cuda.shift_rows(on_device(x), pool, batch, written)
        state[...] = memory.to_host(pool)
        if written is not None:
            journal[...] = memory.to_host(written)
        return to_host({"previous": previous})

    def device_state(self, case: Case, state: Any) -> dict[str, Any]:
        return {"last": state}


class MoveRows(contract.MoveRows):
    """Copies of rows on the device, by indices on the host and on the device, and of whole numbers on the host."""

    implementations: tuple[str, ...] = ("cpu", "host_indices", "device_indices", "host_rows")

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return super().call("cpu", case, state, plan)
        indices = stream_of_row(plan)
        reverse = np.arange(len(indices))[::-1].copy()
        on_host, indexed = implementation == "host_rows", implementation == "device_indices"
        x = given(case.inputs["x"]).view(np.int32) if on_host else on_device(case.inputs["x"])
        chosen, backwards = (memory.to_device(i) if indexed else i for i in (indices, reverse))
        taken = cuda.take_rows(x, chosen)
        sent = cuda.download(taken)
        left, right = cuda.split_columns(taken, case.inputs["column"])
        put, filled = cuda.zeros(taken.shape, taken.dtype), self._copy(taken)
        cuda.put_rows(put, backwards, cuda.to_host(taken)[::-1].copy())
        cuda.fill_rows(filled, backwards, FILL.view(np.int32) if on_host else FILL)
        outputs = {"taken": taken, "sent": sent(), "left": left, "right": right, "put": put, "filled": filled}
        return {name: np.asarray(cuda.to_host(values)).view(np.float32) for name, values in outputs.items()}

    @staticmethod
    def _copy(rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            return in_place(rows)
        copy = memory.empty(rows.shape, rows.dtype)
        copy.copy_(rows)
        return copy


register(ShiftRows(), device="cuda")
register(JournaledOp(ShiftRows()), device="cuda")
register(MoveRows(), device="cuda")
