"""The row contract of shift_rows, the one row movement that carries state."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.ops.batch import Batch
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.rows.cpu import shift_rows
from isobit.ops.rows.reference import previous_rows


class ShiftRows:
    """Every row's predecessor: exact, so the error limit is zero."""

    name = "shift_rows"
    implementations = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for width in (1, 7, 2560) if full else (1, 7):
            rows = (1, 5, 3)
            inputs = {
                "x": [rng.standard_normal((n, 2, width)).astype(np.float32) for n in rows],
                "before": rng.standard_normal((len(rows), 2, width)).astype(np.float32),
            }
            yield Case(f"width {width}", rows, inputs)

    def begin(self, case: Case) -> Any:
        return case.inputs["before"].copy()

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation != "cpu":
            raise KeyError(implementation)
        x = np.concatenate([case.inputs["x"][span.stream][span.first : span.first + span.count] for span in plan])
        batch = Batch(
            slots=np.array([span.stream for span in plan], dtype=np.int32),
            starts=np.cumsum([0] + [span.count for span in plan], dtype=np.int32),
            first=np.array([span.first for span in plan], dtype=np.int32),
            pages=np.zeros((len(plan), 1), dtype=np.int32),
        )
        return {"previous": shift_rows(x, state, batch)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {"last": state}

    def reference(self, case: Case) -> Outputs:
        pairs = zip(case.inputs["x"], case.inputs["before"], strict=True)
        return {"previous": np.concatenate([previous_rows(x, before) for x, before in pairs]).astype(np.float64)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"previous": np.zeros(())}

    def limits(self) -> list[str]:
        return ["copies of rows have no shape limits; take_rows, put_rows and fill_rows are plain copies"]


register(ShiftRows())
