"""Running the contract: every gate of every implementation, every control, and what is left uncovered."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from isobit.contract.controls import controls_of, two_threads
from isobit.contract.controls.generic import nothing
from isobit.contract.controls.planted import PLANTED, Planted
from isobit.contract.coverage import called_functions, op_functions
from isobit.contract.gates import GATES
from isobit.contract.plans import DEVICE_SIZES, FULL_SIZES, QUICK_SIZES, SIZES, WIDE_SIZES, Sizes, fitting
from isobit.contract.report import Check, ControlResult, OpReport, Report
from isobit.ops.contract import Case, Control, Op, registered

CASE_SEED, SCHEDULE_SEED = 7, 3
NULL_CONTROL = "null control"  # planted without a defect: red would mean that the planting itself is seen

Progress = Callable[[str, float], None]  # (what is being checked, share of the work done)


@dataclass(frozen=True)
class Depth:
    """How much to check.

    narrow: the batches of narrow cases. wide: of cases of a real checkpoint's widths, None to leave those out. long:
    streams longer than any batch of FULL_SIZES.
    """

    narrow: Sizes
    wide: Sizes | None
    long: bool

    def with_prompts(self) -> "Depth":
        """The same, and batches of as many rows as a prompt's segment has."""
        return replace(self, narrow=self.narrow.also(DEVICE_SIZES), wide=self.wide and self.wide.also(DEVICE_SIZES))


QUICK = Depth(QUICK_SIZES, wide=None, long=False)
NORMAL = Depth(SIZES, WIDE_SIZES, long=False)
FULL = Depth(FULL_SIZES, QUICK_SIZES, long=True)


def run_contract(
    depth: Depth = NORMAL,
    device: str = "cpu",
    chosen: Callable[[str], bool] = lambda name: True,
    progress: Progress = lambda text, share: None,
) -> Report:
    """Run the gates and controls of every op whose name is `chosen`."""
    start = time.monotonic()
    every_op = registered(device)
    ops = [op for name, op in every_op.items() if chosen(name)]
    report = Report(device, 2 if two_threads() else 1, list(depth.narrow.rows))
    for number, op in enumerate(ops):
        report.ops.append(run_op(op, depth, device, partial(_at_share, progress, number / len(ops))))
    if len(ops) == len(every_op):
        covered = {name for op_report in report.ops for name in op_report.functions}
        report.uncovered = sorted(set(op_functions(device)) - covered)
    report.seconds = time.monotonic() - start
    return report


def _at_share(progress: Progress, share: float, text: str) -> None:
    progress(text, share)


def run_op(op: Op, depth: Depth, device: str = "cpu", progress: Callable[[str], None] = lambda text: None) -> OpReport:
    """All gates of all implementations of one op, then its controls on the narrow cases."""
    start = time.monotonic()
    progress(op.name)
    report = OpReport(op.name, list(op.implementations), limits=op.limits())
    report.functions = called_functions(op, op_functions(device))
    narrow = cases_of(op, wide=False)
    sized = sized_cases(op, depth, narrow)
    report.cases = [case.label for case, _ in sized]
    for implementation in op.implementations:
        for gate in GATES:
            progress(f"{op.name}, {implementation}: {gate}")
            problem = first_problem(gate, op, implementation, sized)
            report.checks.append(Check(implementation, gate, len(sized), problem))
    for gate in GATES:
        progress(f"{op.name}, {NULL_CONTROL}: {gate}")
        problem = first_problem(gate, Planted(op, nothing), PLANTED, [(narrow[0], QUICK_SIZES)])
        report.checks.append(Check(NULL_CONTROL, gate, 1, problem))
    for control in controls_of(op):
        progress(f"{op.name}, control of {control.gate}: {control.defect}")
        report.controls.append(run_control(control, narrow))
    report.seconds = time.monotonic() - start
    return report


def sized_cases(op: Op, depth: Depth, narrow: list[Case]) -> list[tuple[Case, Sizes]]:
    """The op's cases with the batches to run of each; `narrow` are those that the op gives first, full or not."""
    if depth.wide is None:
        return [(case, depth.narrow) for case in narrow]
    every_case = cases_of(op, wide=True)
    narrow_labels = {case.label for case in narrow}
    wide = [(case, depth.wide) for case in every_case if case.label not in narrow_labels]
    if depth.long:
        narrow = [case for case in every_case if case.label in narrow_labels]
    return [(case, fitting(case, sizes)) for case, sizes in (*((case, depth.narrow) for case in narrow), *wide)]


def run_control(control: Control, cases: Iterable[Case]) -> ControlResult:
    """Plant the defect and look whether its gate turns red; a defect that raises has not been seen by the gate."""
    planted = control.plant()
    seen = None
    for case in cases:
        try:
            seen = run_gate(control.gate, planted, PLANTED, case, QUICK_SIZES)
        except Exception as error:
            return ControlResult(control.gate, f"{control.defect} (raised {error!r})", None)
        if seen:
            break
    return ControlResult(control.gate, control.defect, seen)


def first_problem(gate: str, op: Op, implementation: str, cases: Iterable[tuple[Case, Sizes]]) -> str | None:
    """What the gate finds wrong with the first case that fails it, or None."""
    for case, sizes in cases:
        try:
            problem = run_gate(gate, op, implementation, case, sizes)
        except Exception as error:
            problem = f"raised {error!r}"
        if problem:
            return f"{case.label}: {problem}"
    return None


def run_gate(gate: str, op: Op, implementation: str, case: Case, sizes: Sizes) -> str | None:
    """What the gate finds wrong with the case, or None."""
    return GATES[gate](op, implementation, case, np.random.default_rng(SCHEDULE_SEED), sizes)


def cases_of(op: Op, wide: bool) -> list[Case]:
    """The op's cases, the same in every run."""
    return list(op.cases(np.random.default_rng(CASE_SEED), full=wide))
