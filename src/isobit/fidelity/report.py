"""The report in words."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isobit.errors import counted
from isobit.fidelity.agreement import Agreement
from isobit.fidelity.choices import Root
from isobit.fidelity.compare import Difference, Report

SHOWN = 12


def print_report(report: Report, console: Console) -> None:
    """The table, the near ties, the differing positions, and the verdict."""
    if report.free is not None:
        console.print(_table(report))
    for line in report_lines(report):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(verdict_line(report), style="bold", soft_wrap=True, markup=False, highlight=False)


def report_lines(report: Report) -> Iterator[str]:
    """What is to be said between the table and the verdict."""
    yield f"{counted(report.tokens, 'position')}, {report.past_budget:,} past the indexer's budget"
    if report.parts:
        worst = max(report.parts, key=lambda part: part.error)
        yield f"part by part, the furthest off is {worst.name}: {worst.error:.2e}"
    for what, lines in (
        ("near ties", [_root(root) for root in report.roots]),
        ("differing positions", [_in_words(difference) for difference in report.differences]),
        ("failures", [f"FAILED: {failure}" for failure in report.failures]),
    ):
        yield from lines[:SHOWN]
        if len(lines) > SHOWN:
            yield f"and {len(lines) - SHOWN} more {what}; all are in --json"


def _root(root: Root) -> str:
    verdict = "a near tie" if root.is_near_tie else "no near tie"
    return (
        f"{root.place}: isobit took {list(root.taken)}, the reference {list(root.dropped)}: "
        f"margin {root.margin:.3g}, its measured error {root.error:.3g}, {verdict}"
    )


def verdict_line(report: Report) -> str:
    """The pass line."""
    if report.free is None:
        return "FAIL: isobit's run is not a valid one"
    agreement = f"top-1 agreement {report.free.top1}/{report.free.positions}"
    if not report.passed:
        return f"FAIL: {agreement}, {len(report.failures)} failures"
    if report.differences:
        return f"PASS: {agreement}, every other position explained by a near tie and equal once it is forced"
    return f"PASS: {agreement}"


def _table(report: Report) -> Table:
    table = Table(
        "transformers",
        "top-1",
        "KL",
        "worst",
        "error",
        "worst",
        "scores",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name, agreement in (
        ("as it is", report.free),
        ("choices forced", report.forced),
        ("part by part", report.part_by_part),
    ):
        if agreement is not None:
            table.add_row(name, *_cells(agreement))
    return table


def _cells(agreement: Agreement) -> list[str]:
    numbers = (agreement.kl_mean, agreement.kl_max, agreement.error_mean, agreement.error_max, agreement.score_error)
    return [f"{agreement.top1}/{agreement.positions}", *(f"{number:.2e}" for number in numbers)]


def _in_words(difference: Difference) -> str:
    head = (
        f"position {difference.position}: isobit {difference.token}, the reference {difference.reference_token} "
        f"by {difference.margin:.3g}"
    )
    if difference.agrees_when_forced:
        nearest = difference.causes[0] if difference.causes else None
        others = f" and {len(difference.causes) - 1} before it" if len(difference.causes) > 1 else ""
        return f"{head}; traced to the {nearest.place}{others}, equal once forced" if nearest else head
    verdict = "a near tie of the argmax" if difference.explained else "not explained"
    return f"{head}; with choices forced still by {difference.argmax_margin:.3g}: {verdict}"
