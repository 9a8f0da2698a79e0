"""The row contract of the row movements: the shift, which carries state, and the plain copies."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.ops.batch import Batch
from isobit.ops.cases import (
    ALL_KINDS,
    batch_of_plan,
    given,
    in_place,
    pool_of_streams,
    rows_of_kinds,
    rows_of_plan,
    stream_lengths,
    stream_of_row,
)
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.journaled import JournaledOp
from isobit.ops.rows.cpu import download, fill_rows, put_rows, shift_rows, split_columns, take_rows, to_host, zeros
from isobit.ops.rows.reference import previous_rows

ROWS = 20
FILL = np.float32(0.1)


class ShiftRows:
    """Every row's predecessor: exact, so the error limit is zero."""

    name = "shift_rows"
    implementations: tuple[str, ...] = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, width in enumerate((1, 7, 32, 2560) if full else (1, 7, 32)):
            rows = stream_lengths(number, full)
            inputs = {
                "x": [rows_of_kinds(rng, n, 2, width, kinds=ALL_KINDS) for n in rows],
                "before": [rng.standard_normal((2, width)).astype(np.float32) for _ in rows],
            }
            yield Case(f"width {width}", rows, inputs)

    def begin(self, case: Case) -> Any:
        return pool_of_streams(case.inputs["before"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        return self.compute(implementation, case, state, plan, batch_of_plan(plan, len(case.rows)), None)

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        if implementation != "cpu":
            raise KeyError(implementation)
        return {"previous": shift_rows(given(rows_of_plan(plan, case.inputs["x"])), state, batch, journal)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {"last": state}

    def reference(self, case: Case) -> Outputs:
        pairs = zip(case.inputs["x"], case.inputs["before"], strict=True)
        return {"previous": np.concatenate([previous_rows(x, before) for x, before in pairs]).astype(np.float64)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"previous": np.zeros(())}

    def states(self, case: Case) -> np.ndarray:
        return np.concatenate(case.inputs["x"]).astype(np.float64)

    def states_limit(self, case: Case, states: np.ndarray) -> np.ndarray:
        return np.zeros(())

    def limits(self) -> list[str]:
        return ["pools of float32 and int32 are the only ones the model shifts; others are not checked"]


class MoveRows:
    """Copies out of rows, into rows, over rows, and of columns."""

    name = "move_rows"
    implementations: tuple[str, ...] = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for width in (2, 7, 2560) if full else (2, 7):
            x = rows_of_kinds(rng, ROWS, width, kinds=ALL_KINDS)
            yield Case(f"width {width}", (1,) * ROWS, {"x": x, "column": width // 2})

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation != "cpu":
            raise KeyError(implementation)
        chosen, x = stream_of_row(plan), given(case.inputs["x"])
        taken = take_rows(x, chosen)
        sent = download(taken)
        left, right = split_columns(taken, case.inputs["column"])
        backwards = np.arange(len(chosen))[::-1]
        put, filled = in_place(zeros(taken.shape, taken.dtype)), in_place(taken)
        put_rows(put, backwards, taken[::-1])
        fill_rows(filled, backwards, FILL)
        return {"taken": to_host(taken), "sent": sent(), "left": left, "right": right, "put": put, "filled": filled}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        x, column = case.inputs["x"].astype(np.float64), case.inputs["column"]
        filled = np.full(x.shape, np.float64(FILL))
        return {"taken": x, "sent": x, "left": x[:, :column], "right": x[:, column:], "put": x, "filled": filled}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {name: np.zeros(()) for name in reference}

    def limits(self) -> list[str]:
        return ["copies have no limits of shape; an index outside the rows raises IndexError"]


register(ShiftRows())
register(JournaledOp(ShiftRows()))
register(MoveRows())
