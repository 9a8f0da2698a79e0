"""The row contract of the gated residual: reading through the mix, and writing back."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.checkpoint.weights import PlainLinear
from isobit.ops.cases import ALL_KINDS, SMALLEST, UNIT, given, in_place, rows_of_kinds, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.gated_residual import cpu, reference
from isobit.ops.gated_residual.cpu import add_streams, expand_streams, gated_read, gated_write, prepare_gated_residual
from isobit.ops.linear.cpu import prepare_linear
from isobit.ops.norm import reference as norm_reference
from isobit.ops.work import forced_pieces

PIECES = {"one_thread": 1, "three_threads": 3}
READS = {
    "by_row_count": (cpu.BY_ROW_COUNT, 1),
    "layer_by_layer": (cpu.LAYER_BY_LAYER, 3),
    "blockwise": (cpu.BLOCKWISE, 1),
    "blockwise_three_threads": (cpu.BLOCKWISE, 3),
}
ROWS = 16


class GatedRead:
    """The read of every kind of site, its linear layers plain."""

    name = "gated_read"
    implementations = tuple(READS)
    row_edges = (cpu.MANY_ROWS - 1, cpu.MANY_ROWS, cpu.MOST_NEAR_ROWS, cpu.MOST_NEAR_ROWS + 1)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        shapes = [(4, 40, 24, True), (3, 33, 5, True), (4, 32, 8, False)] + ([(4, 2560, 320, True)] if full else [])
        for streams, hidden, rank, writes in shapes:
            wide = streams * hidden

            def matrix(outputs: int, inputs: int) -> np.ndarray:
                return (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

            inputs = {
                "streams": rows_of_kinds(rng, ROWS, streams, hidden, kinds=ALL_KINDS),
                "norm_weight": (0.3 * rng.standard_normal(wide)).astype(np.float32),
                "down": matrix(rank, wide),
                "up": matrix(wide, rank),
                "inject": matrix(streams, wide) if writes else None,
                "eps": 1e-6,
            }
            yield Case(f"{streams} streams of {hidden}, rank {rank}, writes: {writes}", (1,) * ROWS, inputs)

    def begin(self, case: Case) -> Any:
        down, up = (prepare_linear(PlainLinear(name, case.inputs[name])) for name in ("down", "up"))
        inject = None if case.inputs["inject"] is None else prepare_linear(PlainLinear("inject", case.inputs["inject"]))
        streams = case.inputs["streams"].shape[1]
        return prepare_gated_residual(case.inputs["norm_weight"], down, up, inject, streams, case.inputs["eps"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        how, pieces = READS[implementation]
        with forced_pieces(pieces):
            mixed, injection = gated_read(given(case.inputs["streams"][stream_of_row(plan)]), state, how)
        return {"mixed": mixed} if injection is None else {"mixed": mixed, "injection": injection}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        mixed, injection = reference.gated_read(*self._arguments(case))
        return {"mixed": mixed} if injection is None else {"mixed": mixed, "injection": injection}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """The bound of each step's rounding, carried through the slopes of silu (1.1) and sigmoid (1/4)."""
        streams, norm_weight, down, up, inject, eps = self._arguments(case)
        rows, count, hidden = streams.shape
        normed = np.abs(norm_reference.norm(streams, norm_weight.reshape(count, hidden), eps))
        flat, wide, rank = normed.reshape(rows, -1), count * hidden, len(down)
        norm_error = (hidden / 32 + 16) * UNIT
        low = flat @ np.abs(down).T / count
        up_error = (low * (norm_error + (wide + 8) * UNIT) * 1.1) @ np.abs(up).T + low @ np.abs(up).T * rank * UNIT
        mix_error = (up_error / 4 + 4 * UNIT).reshape(normed.shape)
        limits = {"mixed": (normed * (mix_error + norm_error + 8 * UNIT)).mean(axis=1) + 8 * SMALLEST}
        if inject is not None:
            limits["injection"] = flat @ np.abs(inject).T / count * (norm_error + wide * UNIT) / 2 + 8 * UNIT
        return limits

    def limits(self) -> list[str]:
        return ["the linear layers are plain here; quantized ones are checked under linear"]

    def _arguments(self, case: Case) -> tuple:
        return tuple(case.inputs[name] for name in ("streams", "norm_weight", "down", "up", "inject", "eps"))


class ReadAfterWrite:
    """A read op's cases after a write: both in one call, and in two. A case's `streams` are what is written."""

    name = "gated_write_read"
    implementations: tuple[str, ...] = ("apart", "joined")

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for case in super().cases(rng, full):  # type: ignore[misc]
            before = case.inputs["streams"]
            rows, streams, hidden = before.shape
            injection = rows_of_kinds(rng, rows, streams, largest=1e3)[rng.permutation(rows)]
            y = rows_of_kinds(rng, rows, hidden)[rng.permutation(rows)]
            written = before.copy()
            gated_write(written, injection, y)
            inputs = {**case.inputs, "streams": written, "before": before, "injection": injection, "y": y}
            yield Case(case.label, case.rows, inputs)

    def reference(self, case: Case) -> Outputs:
        return {**super().reference(case), "written": case.inputs["streams"].astype(np.float64)}  # type: ignore[misc]

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {**super().error_limit(case, reference), "written": np.zeros(())}  # type: ignore[misc]


class GatedWriteRead(ReadAfterWrite, GatedRead):
    """The write and the read of the CPU."""

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        streams = in_place(case.inputs["before"][rows])
        injection, y = (given(case.inputs[name][rows]) for name in ("injection", "y"))
        if implementation == "joined":
            mixed, following = cpu.gated_write_read(streams, injection, y, state)
        else:
            gated_write(streams, injection, y)
            mixed, following = gated_read(streams, state)
        outputs = {"mixed": mixed} if following is None else {"mixed": mixed, "injection": following}
        return {**outputs, "written": streams}


class GatedWrite:
    """The writes that need no linear layer: the injection, the addition to every stream, the copy into streams."""

    name = "gated_write"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for streams, hidden in ((4, 40), (3, 1), (2, 65)) + (((4, 2560),) if full else ()):
            inputs = {
                "streams": rows_of_kinds(rng, ROWS, streams, hidden, kinds=ALL_KINDS),
                "injection": rows_of_kinds(rng, ROWS, streams, largest=1e3)[rng.permutation(ROWS)],
                "y": rows_of_kinds(rng, ROWS, hidden)[rng.permutation(ROWS)],
            }
            yield Case(f"{streams} streams of {hidden}", (1,) * ROWS, inputs)

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        streams, added = (in_place(case.inputs["streams"][rows]) for _ in range(2))
        injection, y = (given(case.inputs[name][rows]) for name in ("injection", "y"))
        with forced_pieces(PIECES[implementation]):
            gated_write(streams, injection, y)
            add_streams(added, y)
            return {"written": streams, "added": added, "expanded": expand_streams(y, streams.shape[1])}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        streams, injection, y = (case.inputs[name] for name in ("streams", "injection", "y"))
        return {
            "written": reference.gated_write(streams, injection, y),
            "added": reference.gated_write(streams, np.ones_like(injection), y),
            "expanded": np.repeat(y[:, None].astype(np.float64), streams.shape[1], axis=1),
        }

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        limits = {name: np.abs(values) * UNIT + SMALLEST for name, values in reference.items()}
        return {**limits, "expanded": np.zeros(())}

    def limits(self) -> list[str]:
        return ["sums above float32's range become infinite"]


register(GatedRead())
register(GatedWrite())
register(GatedWriteRead())
