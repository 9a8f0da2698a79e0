"""The four gates. Each returns None when the implementation passes, or what is wrong in one line."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isobit.contract.compare import bits_of, fingerprint, first_difference, place_of_first
from isobit.contract.guards import GuardedMemory
from isobit.contract.plans import QUICK_SIZES, Schedule, Sizes, batches, mixed, schedules, serial, together
from isobit.ops import set_threads, threads
from isobit.ops.contract import Case, Op, Outputs, Span
from isobit.ops.work import forced_pieces

Gate = Callable[..., str | None]  # (op, implementation, case, rng, sizes) -> problem

POISONS = (0xA5, 0x5A, 0xFF)
THREADS = (1, 2)
MOST_UNLIMITED = 0.5  # of an output's values may hang on a choice that rounding decides
MOST_STREAMS = 6  # that are run alone to see what each of them writes


@dataclass(frozen=True)
class Run:
    """What a schedule gave: every output row, stream after stream, and the state left behind."""

    outputs: Outputs
    state: Outputs


def begun(op: Op, case: Case) -> Any:
    """Fresh state; of an op whose calls leave nothing behind, what was prepared for the case before."""
    if case.prepared is None:
        state = op.begin(case)
        if case.leaves_state is None:
            case.leaves_state = bool(op.final_state(case, state))
        if case.leaves_state:
            return state
        case.prepared = state
    return case.prepared


def execute(op: Op, implementation: str, case: Case, schedule: Schedule) -> Run:
    """Run the schedule from fresh state and put the output rows in stream order."""
    state = begun(op, case)
    collected: Outputs = {}
    for plan in schedule:
        rows = rows_of(case, plan)
        for name, values in checked_call(op, implementation, case, state, plan).items():
            if name not in collected:
                collected[name] = np.zeros((sum(case.rows), *values.shape[1:]), values.dtype)
            collected[name][rows] = values
    return Run(collected, final_state(op, case, state))


def checked_call(op: Op, implementation: str, case: Case, state, plan: Sequence[Span]) -> Outputs:
    """One call; raises ValueError when an output has not one row for every row of the plan."""
    outputs = {name: np.asarray(values) for name, values in op.call(implementation, case, state, plan).items()}
    expected = sum(span.count for span in plan)
    for name, values in outputs.items():
        if len(values) != expected:
            raise ValueError(f"{op.name}: output {name} has {len(values)} rows for a plan of {expected}")
    return outputs


def rows_of(case: Case, plan: Sequence[Span]) -> np.ndarray:
    """int [R], where the plan's rows stand among all rows of the case, stream after stream."""
    streams, first, counts = np.array([(span.stream, span.first, span.count) for span in plan]).T
    ends = np.cumsum(counts)
    return np.repeat(case.offsets[streams] + first - (ends - counts), counts) + np.arange(ends[-1])


def final_state(op: Op, case: Case, state) -> Outputs:
    """A copy of what the calls left behind."""
    return {name: np.array(value) for name, value in op.final_state(case, state).items()}


def reference_gate(op: Op, implementation: str, case: Case, rng, sizes: Sizes = QUICK_SIZES) -> str | None:
    """Gate 1: within the stated limit of the float64 reference; not finite exactly where the reference is not."""
    outputs = execute(op, implementation, case, together(case)).outputs
    reference, limits = known_values(op, case)
    if reference.keys() != outputs.keys():
        return f"the reference gives {sorted(reference)}, the op {sorted(outputs)}"
    for name, expected in reference.items():
        if expected.shape != outputs[name].shape:
            return f"{name} has shape {list(outputs[name].shape)}, the reference {list(expected.shape)}"
        if (share := unlimited_share(expected, limits[name])) > MOST_UNLIMITED:
            return f"{share:.0%} of {name} has no error limit"
        wrong = ~acceptable(outputs[name], expected, np.asarray(limits[name]))
        if wrong.any():
            place = tuple(place_of_first(wrong))
            return f"{name}{list(place)} is {outputs[name][place]!r}, the reference {expected[place]!r}"
    return None


def known_values(op: Op, case: Case) -> tuple[Outputs, Outputs]:
    """The case's reference and its limits, computed once."""
    if case.known is None:
        with np.errstate(all="ignore"):
            reference = op.reference(case)
            case.known = reference, op.error_limit(case, reference)
    return case.known


def unlimited_share(expected: np.ndarray, limit: np.ndarray) -> float:
    """The share of the finite expected values that any finite value would do for."""
    finite = np.isfinite(np.asarray(expected, np.float64))
    unlimited = ~np.isfinite(np.broadcast_to(limit, expected.shape))
    return float(unlimited[finite].mean()) if finite.any() else 0.0


def acceptable(actual: np.ndarray, expected: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """bool: within the limit, or equally infinite, or both NaN. What float32 cannot hold may be infinite."""
    values, expected = actual.astype(np.float64), np.asarray(expected, np.float64)
    if actual.dtype == np.float32:
        overflows = np.isinf(values) & (np.abs(expected) + limit > np.finfo(np.float32).max)
        expected = np.where(overflows, np.copysign(np.inf, expected), expected)
    same = (values == expected) | (np.isnan(values) & np.isnan(expected))
    with np.errstate(all="ignore"):
        return same | (np.isfinite(expected) & (np.abs(values - expected) <= limit))


def rows_gate(op: Op, implementation: str, case: Case, rng, sizes: Sizes = QUICK_SIZES) -> str | None:
    """Gate 2: each row has the bytes it has alone, in every batch, place and company, on any number of threads."""
    with on_threads(1):
        alone = execute(op, implementation, case, serial(case))
    every_size = replace(sizes, rows=tuple(sorted({*sizes.rows, *edges(op)})))
    has_state = bool(alone.state) or max(case.rows) > 1
    for number, schedule in enumerate((schedules if has_state else batches)(case, rng, every_size)):
        for count in THREADS if number == 0 else THREADS[number % 2 :][:1]:
            with on_threads(count):
                problem = differs_from(alone, op, implementation, case, schedule)
            if problem:
                return f"{problem}, {count} threads, differs from the row alone"
    return None


def edges(op: Op) -> Iterator[int]:
    """The batch sizes around which the op says that its kernels change."""
    for edge in getattr(op, "row_edges", ()):
        yield from (size for size in (edge - 1, edge, edge + 1) if size > 0)


def differs_from(alone: Run, op: Op, implementation: str, case: Case, schedule: Schedule) -> str | None:
    """The first output row or state of the schedule with other bytes than `alone`, and the call it came from."""
    state = begun(op, case)
    for plan in schedule:
        outputs = checked_call(op, implementation, case, state, plan)
        rows = rows_of(case, plan)
        problem = first_difference({name: values[rows] for name, values in alone.outputs.items()}, outputs)
        if problem:
            return f"{problem} in a call of {len(rows)} rows of {len(plan)} streams"
    problem = first_difference(alone.state, final_state(op, case, state))
    largest = max(sum(span.count for span in plan) for plan in schedule)
    return f"state {problem} after calls of up to {largest} rows" if problem else None


def replaces_gate(op: Op, implementation: str, case: Case, rng, sizes: Sizes = QUICK_SIZES) -> str | None:
    """Gate 3: the bytes of the implementation it replaces, the first of the op's list; its state too."""
    for schedule in two_schedules(case, rng):
        oracle = known_run(op, case, schedule)
        run = execute(op, implementation, case, schedule)
        problem = first_difference(oracle.outputs, run.outputs) or first_difference(oracle.state, run.state)
        if problem:
            return f"{problem} differs from {op.implementations[0]}"
    return None


def two_schedules(case: Case, rng: np.random.Generator) -> tuple[Schedule, Schedule]:
    """All rows at once, and in calls of about a third of them."""
    return together(case), mixed(case, rng, max(2, sum(case.rows) // 3))


def known_run(op: Op, case: Case, schedule: Schedule) -> Run:
    """What the oracle gives, computed once."""
    key = tuple(map(tuple, schedule))
    if key not in case.oracle_runs:
        case.oracle_runs[key] = execute(op, op.implementations[0], case, schedule)
    return case.oracle_runs[key]


def hygiene_gate(op: Op, implementation: str, case: Case, rng, sizes: Sizes = QUICK_SIZES) -> str | None:
    """Gate 4: every output element written and nothing else; the same bytes on repeated runs; inputs untouched."""
    before = fingerprint(case.inputs)
    schedules = two_schedules(case, rng)
    first_runs: list[Run] = []
    for number, poison in enumerate(POISONS):
        # In turns, so that no run comes after as many calls as its like.
        step = -1 if number % 2 else 1
        with on_threads(2), GuardedMemory(poison) as memory, prepared_anew(case):
            runs = [execute(op, implementation, case, schedule) for schedule in schedules[::step]][::step]
        if problem := memory.problem():
            return problem
        first_runs = first_runs or runs
        for one, run in zip(first_runs, runs, strict=True):
            problem = first_difference(one.outputs, run.outputs) or first_difference(one.state, run.state)
            if problem:
                return f"{problem} depends on what memory held before, or on the run"
    if fingerprint(case.inputs) != before:
        return "an input was changed"
    return written_by_strangers(op, implementation, case)


@contextmanager
def prepared_anew(case: Case) -> Iterator[None]:
    """What is prepared within lies in the memory used there, and is forgotten afterwards."""
    before, case.prepared = case.prepared, None
    try:
        yield
    finally:
        case.prepared = before


def written_by_strangers(op: Op, implementation: str, case: Case) -> str | None:
    """State that two streams change, each run alone, or None: what one stream owns no other may write."""
    if case.leaves_state is False:
        return None
    initial = final_state(op, case, op.begin(case))
    owners = {name: np.full(values.shape, -1) for name, values in initial.items()}
    for stream in range(min(len(case.rows), MOST_STREAMS)):
        state = op.begin(case)
        op.call(implementation, case, state, [Span(stream, 0, case.rows[stream])])
        for name, values in final_state(op, case, state).items():
            changed = bits_of(values) != bits_of(initial[name])
            shared = changed & (owners[name] >= 0)
            if shared.any():
                place = place_of_first(shared)
                return f"state {name}{place} is written for streams {owners[name][tuple(place)]} and {stream}"
            owners[name][changed] = stream
    return None


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Kernels use `count` threads, also for work too small to be worth it."""
    before = threads()
    set_threads(count)
    try:
        with forced_pieces(count):
            yield
    finally:
        set_threads(before)


GATES: dict[str, Gate] = {
    "reference": reference_gate,
    "rows": rows_gate,
    "replaces": replaces_gate,
    "hygiene": hygiene_gate,
}
