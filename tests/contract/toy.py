"""Small ops in NumPy whose defects are known, to try the gates on."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.ops.buffers import empty
from isobit.ops.cases import batch_of_plan, given, pool_of_streams, rows_of_plan, stream_of_row
from isobit.ops.contract import Case, Outputs, Span


class Doubling:
    """y = 2x, row by row. Subclasses spoil `compute`."""

    name = "doubling"
    implementations: tuple[str, ...] = ("oracle", "other")

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        yield Case("20 rows", (1,) * 20, {"x": rng.standard_normal((20, 5)).astype(np.float32)})

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        x = given(case.inputs["x"][stream_of_row(plan)])
        out = empty(x.shape)
        self.compute(implementation, x, out)
        return {"y": out}

    def compute(self, implementation: str, x: np.ndarray, out: np.ndarray) -> None:
        out[...] = 2 * x

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        return {"y": 2 * case.inputs["x"].astype(np.float64)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"y": np.zeros(())}

    def limits(self) -> list[str]:
        return ["only twenty rows"]


class RunningSum:
    """Each row plus all before it in its stream. Subclasses spoil `advance`."""

    name = "running_sum"
    implementations: tuple[str, ...] = ("oracle",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        rows = (1, 40, 3)
        yield Case("three streams", rows, {"x": [rng.integers(-9, 9, (n, 2)).astype(np.float32) for n in rows]})

    def begin(self, case: Case) -> np.ndarray:
        return pool_of_streams([np.zeros(2, np.float32) for _ in case.rows])

    def call(self, implementation: str, case: Case, state: np.ndarray, plan: Sequence[Span]) -> Outputs:
        x, batch = given(rows_of_plan(plan, case.inputs["x"])), batch_of_plan(plan, len(case.rows))
        out = empty(x.shape)
        for slot, start, end in zip(batch.slots, batch.starts, batch.starts[1:], strict=False):
            self.advance(state, int(slot), x[start:end], out[start:end])
        return {"y": out}

    def advance(self, state: np.ndarray, slot: int, x: np.ndarray, out: np.ndarray) -> None:
        out[...] = state[slot] + np.cumsum(x, axis=0)
        state[slot] = out[-1]

    def final_state(self, case: Case, state: np.ndarray) -> Outputs:
        return {"sums": state}

    def reference(self, case: Case) -> Outputs:
        return {"y": np.concatenate([np.cumsum(x, axis=0) for x in case.inputs["x"]]).astype(np.float64)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"y": np.zeros(())}

    def limits(self) -> list[str]:
        return ["only three streams"]
