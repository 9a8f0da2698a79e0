"""`isobit contract`: the kernel contract."""

import json as json_text
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from isobit.cli.common import Json
from isobit.errors import IsobitError, counted

if TYPE_CHECKING:
    from rich.console import Console

    from isobit.contract.report import Check, OpReport, Report

DEVICES = ("cpu", "cuda")

Filter = Annotated[
    str,
    typer.Option("--filter", metavar="PATTERN", help="Only ops of that name, or with that part or pattern in it."),
]
Full = Annotated[
    bool,
    typer.Option(
        "--full", help="Also batches of up to 1,025 rows, on a GPU of up to 8,192; takes several times as long."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Only narrow shapes and a few batch sizes.")]
Device = Annotated[str, typer.Option("--device", metavar="|".join(DEVICES), help="Whose kernels to check.")]


def contract(
    filter: Filter = "", full: Full = False, quick: Quick = False, json: Json = False, device: Device = "cpu"
) -> None:
    """Check every kernel: the right values, and bytes that depend on nothing but the row.

    Each gate is also shown defects that it must catch. Exit code 1 if a gate is red or misses a defect.
    """
    from isobit.contract.run import FULL, NORMAL, QUICK, run_contract
    from isobit.engine.placement import chosen_device
    from isobit.ops.contract import registered

    if device not in DEVICES:
        raise IsobitError(f"--device is {device}: expected one of {', '.join(DEVICES)}")
    chosen_device(device)
    names = list(registered(device))
    chosen = _matching(filter, names)
    if not chosen:
        raise IsobitError(f"--filter {filter} matches no op: expected part of one of {', '.join(names)}")
    depth = FULL if full else QUICK if quick else NORMAL
    if full and device == "cuda":
        depth = depth.with_prompts()
    with _Progress() as progress:
        report = run_contract(depth, device, chosen.__contains__, progress)
    if json:
        typer.echo(json_text.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _matching(pattern: str, names: list[str]) -> list[str]:
    """The op of that very name, or else those that contain the pattern or match it."""
    if pattern in names:
        return [pattern]
    return [name for name in names if pattern in name or fnmatchcase(name, pattern)]


def _print(report: "Report") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from isobit.contract.gates import GATES

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("op", no_wrap=True)
    table.add_column("implementation", no_wrap=True)
    for gate in GATES:
        table.add_column(gate, no_wrap=True)
    table.add_column("controls", justify="right", no_wrap=True)
    for op in report.ops:
        for number, implementation in enumerate(op.implementations):
            gates = (_verdict(op.verdict(implementation, gate), number == 0) for gate in GATES)
            name, controls = (op.name, _controls(op)) if number == 0 else ("", "")
            table.add_row(name, implementation, *gates, controls)
    console.print(table)
    console.print()
    _print_limits(console, report)
    for problem in report.problems():
        console.print(f"[red]failed[/red]: {_escaped(problem)}", soft_wrap=True)
    console.print(_conclusion(report), soft_wrap=True)


def _verdict(check: "Check | None", is_oracle: bool) -> str:
    if check is None:
        return "-"
    if not check.green:
        return "[red]red[/red]"
    return "oracle" if check.gate == "replaces" and is_oracle else "[green]green[/green]"


def _controls(op: "OpReport") -> str:
    red = sum(control.red for control in op.controls)
    return f"{red} red" if red == len(op.controls) else f"[red]{red}/{len(op.controls)} red[/red]"


def _print_limits(console: "Console", report: "Report") -> None:
    console.print("Not covered:")
    for limit in report.limits():
        console.print(f"  {limit}", markup=False, soft_wrap=True)
    for op in report.ops:
        for limit in op.limits:
            console.print(f"  {op.name}: {limit}", markup=False, soft_wrap=True)
    console.print()


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _conclusion(report: "Report") -> str:
    cases = sum(len(op.cases) for op in report.ops)
    gates = sum(len(op.checks) for op in report.ops)
    controls = sum(len(op.controls) for op in report.ops)
    failed = len(report.problems())
    verdict = "The contract holds" if report.passed else f"The contract is broken in {counted(failed, 'place')}"
    return (
        f"{verdict}: {counted(len(report.ops), 'op')}, {counted(cases, 'case')}, {counted(gates, 'gate')}, "
        f"{counted(controls, 'control')}; "
        f"{report.seconds:.0f} s on the {report.device}."
    )


class _Progress:
    """A progress bar on stderr, fed with (what is being checked, share done)."""

    def __enter__(self) -> "_Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=1.0)
        self._bar.start()
        return self

    def __call__(self, text: str, share: float) -> None:
        self._bar.update(self._task, completed=share, description=text)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
