"""The four gates. Each returns None when the implementation passes, or what is wrong in one line."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isobit.contract.plans import Schedule, schedules, serial, together
from isobit.ops import buffers
from isobit.ops.contract import Case, Op, Outputs

GUARD = 256  # bytes before and after each guarded buffer
Gate = Callable[[Op, str, Case, np.random.Generator], str | None]


@dataclass(frozen=True)
class Run:
    """What a schedule gave: every output row, stream after stream, and the state left behind."""

    outputs: Outputs
    state: Outputs


def execute(op: Op, implementation: str, case: Case, schedule: Schedule) -> Run:
    """Run the schedule from fresh state and put the output rows in stream order."""
    state = op.begin(case)
    offsets = np.concatenate([[0], np.cumsum(case.rows)]).astype(int)
    collected: Outputs = {}
    for plan in schedule:
        outputs = op.call(implementation, case, state, plan)
        rows = np.concatenate([offsets[s.stream] + np.arange(s.first, s.first + s.count) for s in plan])
        for name, values in outputs.items():
            values = np.asarray(values)
            if len(values) != len(rows):
                raise ValueError(f"{op.name}: output {name} has {len(values)} rows for a plan of {len(rows)}")
            if name not in collected:
                collected[name] = np.zeros((offsets[-1], *values.shape[1:]), values.dtype)
            collected[name][rows] = values
    final = {name: np.array(value) for name, value in op.final_state(case, state).items()}
    return Run(collected, final)


def reference_gate(op: Op, implementation: str, case: Case, rng: np.random.Generator) -> str | None:
    """Gate 1: within the stated limit of the float64 reference."""
    outputs = execute(op, implementation, case, together(case)).outputs
    reference = op.reference(case)
    limits = op.error_limit(case, reference)
    for name, expected in reference.items():
        actual = outputs[name].astype(np.float64)
        finite = np.isfinite(expected)
        with np.errstate(invalid="ignore", over="ignore"):
            within = np.abs(actual - expected) <= limits[name]
        wrong = np.where(finite, ~within, np.isfinite(actual) & ~(np.isinf(expected) & within))
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"{name}{list(place)} is {actual[place]!r}, the reference {expected[place]!r}"
    return None


def rows_gate(op: Op, implementation: str, case: Case, rng: np.random.Generator) -> str | None:
    """Gate 2: each row has the bytes it has alone, in every batch, place and company; the state too."""
    alone = execute(op, implementation, case, serial(case))
    for schedule in schedules(case, rng):
        difference = first_difference(alone, execute(op, implementation, case, schedule))
        if difference:
            sizes = sorted({sum(span.count for span in plan) for plan in schedule})
            return f"{difference} in calls of {sizes[:8]} rows differs from the row alone"
    return None


def replaces_gate(op: Op, implementation: str, case: Case, rng: np.random.Generator) -> str | None:
    """Gate 3: the bytes of the implementation it replaces, the first of the op's list."""
    oracle = execute(op, op.implementations[0], case, together(case))
    difference = first_difference(oracle, execute(op, implementation, case, together(case)))
    return f"{difference} differs from {op.implementations[0]}" if difference else None


def hygiene_gate(op: Op, implementation: str, case: Case, rng: np.random.Generator) -> str | None:
    """Gate 4: every output element written and nothing else; the same bytes on repeated runs; inputs untouched."""
    before = fingerprint(case.inputs)
    runs = []
    for poison in (0xA5, 0x5A, 0xFF):
        with GuardedBuffers(poison) as guarded:
            runs.append(execute(op, implementation, case, together(case)))
        if guarded.broken():
            return f"wrote outside its output of shape {guarded.broken()}"
    for run in runs[1:]:
        difference = first_difference(runs[0], run)
        if difference:
            return f"{difference} depends on what its buffer held, or on the run"
    return "an input was changed" if fingerprint(case.inputs) != before else None


GATES: dict[str, Gate] = {
    "reference": reference_gate,
    "rows": rows_gate,
    "replaces": replaces_gate,
    "hygiene": hygiene_gate,
}


def first_difference(one: Run, other: Run) -> str | None:
    """The first output or state element whose bytes differ, by name and place, or None."""
    for kind, left, right in (("", one.outputs, other.outputs), ("state ", one.state, other.state)):
        if left.keys() != right.keys():
            return f"{kind}names {sorted(left.keys() ^ right.keys())}"
        for name, a in left.items():
            b = right[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{kind}{name} of {a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
            if a.tobytes() != b.tobytes():
                unequal = as_bytes(a) != as_bytes(b)
                place = np.argwhere(unequal.any(axis=-1))[0]
                return f"{kind}{name}{[int(i) for i in place]}"
    return None


def as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 [..., itemsize], the bytes of each element."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def fingerprint(value) -> bytes:
    """The bytes of every array in nested inputs, in order."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return b"".join(fingerprint(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return b"".join(fingerprint(item) for item in value)
    return b""


class GuardedBuffers:
    """A context in which op outputs are poisoned and stand between guard zones."""

    def __init__(self, poison: int):
        self.poison = poison
        self._buffers: list[tuple[np.ndarray, int, tuple[int, ...]]] = []

    def __enter__(self) -> "GuardedBuffers":
        self._previous = buffers.set_allocator(self._allocate)
        return self

    def __exit__(self, *_) -> None:
        buffers.set_allocator(self._previous)

    def _allocate(self, shape, dtype=np.float32) -> np.ndarray:
        shape = (shape,) if np.isscalar(shape) else tuple(int(n) for n in shape)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(size + 2 * GUARD, self.poison, np.uint8)
        self._buffers.append((raw, size, shape))
        return raw[GUARD : GUARD + size].view(dtype).reshape(shape)

    def broken(self) -> tuple[int, ...] | None:
        """The shape of a buffer whose guard zone was written, or None."""
        for raw, size, shape in self._buffers:
            if (raw[:GUARD] != self.poison).any() or (raw[GUARD + size :] != self.poison).any():
                return shape
        return None
