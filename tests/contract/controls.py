"""Defects that can be planted into any op: each must turn its gate red."""

from collections.abc import Callable, Sequence

import numpy as np

from isobit.ops import buffers
from isobit.ops.contract import Case, Control, Op, Outputs, Span

Mutation = Callable[["Planted", Outputs, Case, Sequence[Span]], Outputs]


class Planted:
    """An op whose every call is changed by a mutation; the second implementation is the changed one."""

    def __init__(self, op: Op, mutation: Mutation):
        self._op = op
        self._mutation = mutation
        self.calls = 0
        self.name = op.name
        self.implementations = (op.implementations[0], "planted")

    def __getattr__(self, name: str):
        return getattr(self._op, name)

    def call(self, implementation: str, case: Case, state, plan: Sequence[Span]) -> Outputs:
        self.calls += 1
        outputs = self._op.call(self._op.implementations[0], case, state, plan)
        if implementation != "planted":
            return outputs
        return self._mutation(self, {name: np.array(values) for name, values in outputs.items()}, case, plan)


def changed(values: np.ndarray) -> np.ndarray:
    """A copy in which each element's lowest bit is flipped."""
    flipped = np.ascontiguousarray(values).copy()
    flipped.view(np.uint8).reshape(-1, values.dtype.itemsize)[:, 0] ^= 1
    return flipped


def far_off(op, outputs, case, plan):
    return {name: (values + np.asarray(1 + np.abs(values)).astype(values.dtype)) for name, values in outputs.items()}


def nan_for_finite(op, outputs, case, plan):
    def spoil(values):
        return np.full_like(values, np.nan) if values.dtype.kind == "f" else values + 1

    return {name: spoil(values) for name, values in outputs.items()}


def batch_size_dependence(op, outputs, case, plan):
    rows = sum(span.count for span in plan)
    return outputs if rows == 1 else {name: changed(values) for name, values in outputs.items()}


def neighbour_leak(op, outputs, case, plan):
    return {name: np.roll(values, 1, axis=0) for name, values in outputs.items()}


def last_bit(op, outputs, case, plan):
    return {name: changed(values) for name, values in outputs.items()}


def last_row_only(op, outputs, case, plan):
    return {name: np.concatenate([values[:-1], changed(values[-1:])]) for name, values in outputs.items()}


def run_dependence(op, outputs, case, plan):
    return outputs if op.calls % 2 else {name: changed(values) for name, values in outputs.items()}


def unwritten_element(op, outputs, case, plan):
    def lose_last(values):
        buffer = buffers.empty(values.shape, values.dtype)
        buffer.reshape(-1)[:-1] = values.reshape(-1)[:-1]
        return buffer

    return {name: lose_last(values) for name, values in outputs.items()}


def write_past_the_end(op, outputs, case, plan):
    def overrun(values):
        buffer = buffers.empty(values.shape, values.dtype)
        buffer[...] = values
        raw = buffer.base
        while raw is not None and raw.base is not None:
            raw = raw.base
        if raw is not None:
            end = buffer.__array_interface__["data"][0] - raw.__array_interface__["data"][0] + buffer.nbytes
            raw[end : end + 1] ^= 0xFF
        return buffer

    return {name: overrun(values) for name, values in outputs.items()}


GENERIC: dict[str, tuple[Mutation, ...]] = {
    "reference": (far_off, nan_for_finite),
    "rows": (batch_size_dependence, neighbour_leak),
    "replaces": (last_bit, last_row_only),
    "hygiene": (unwritten_element, write_past_the_end, run_dependence),
}


def generic_controls(op: Op) -> list[Control]:
    """Every generic defect, planted into an op."""
    return [
        Control(op.name, gate, mutation.__name__, lambda op=op, mutation=mutation: Planted(op, mutation))
        for gate, mutations in GENERIC.items()
        for mutation in mutations
    ]
