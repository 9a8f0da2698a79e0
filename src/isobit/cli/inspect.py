"""`isobit inspect`: what a checkpoint folder holds."""

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isobit.cli.common import Bar
from isobit.errors import counted

if TYPE_CHECKING:
    from isobit.checkpoint.inspect import ClassReport, Inspection

SHOWN_PROBLEMS = 20


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the checkpoint.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show a checkpoint's layers, widths, codebooks and sizes, and everything in it that cannot be used.

    Reads no weights. Exit code 1 if a tensor, the tokenizer or the chat template cannot be used.
    """
    from isobit.checkpoint.inspect import inspect_folder

    with Bar("reading headers", counts=True) as reading:
        inspection = inspect_folder(folder, reading)
    if json:
        typer.echo(json_text.dumps(inspection.as_dict(), indent=2))
    else:
        _print(inspection)
    if not inspection.usable:
        raise typer.Exit(1)


def _print(inspection: "Inspection") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=_title(inspection), title_justify="left")
    table.add_column("class", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    table.add_column("codebook", no_wrap=True)
    for column in ("weights", "stored", "memory", "mapped"):
        table.add_column(column, justify="right", no_wrap=True)
    for report in inspection.classes:
        table.add_row(*_row(report))
    table.add_section()
    totals = (inspection.stored_bytes, inspection.resident_bytes, inspection.mapped_bytes)
    weights = sum(report.weights for report in inspection.classes)
    table.add_row("all", f"{8 * inspection.stored_bytes / max(weights, 1):.2f}", "", *_sizes(weights, totals))
    console.print(table)
    for note in inspection.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    _print_problems(console, "missing", inspection.missing)
    _print_problems(console, "does not parse", inspection.problems)
    if inspection.usable:
        console.print("Every tensor group parses.")


def _print_problems(console, kind: str, problems: dict[str, str]) -> None:
    for name, problem in list(problems.items())[:SHOWN_PROBLEMS]:
        console.print(f"{name} {kind}: {problem}", markup=False, soft_wrap=True)
    if len(problems) > SHOWN_PROBLEMS:
        console.print(f"and {len(problems) - SHOWN_PROBLEMS} more; --json lists all")


def _title(inspection: "Inspection") -> str:
    layers = inspection.layers
    parts = [f"{layers['delta']} DeltaNet and {layers['attention']} sparse attention layers"]
    parts += [f"{layers['ngram']} n-gram embedding"] if layers["ngram"] else []
    parts += ["MTP head"] if layers["mtp"] else []
    source = "synthetic weights in memory" if inspection.synthetic else counted(inspection.files, "file")
    return f"{', '.join(parts)}\nwindow {inspection.window:,} tokens, {source}"


def _row(report: "ClassReport") -> tuple[str, ...]:
    shares = sorted(report.widths.items(), key=lambda item: -item[1])
    widths = "\n".join(f"{width:<4} {_percent(count, report.weights)}" for width, count in shares)
    totals = (report.stored_bytes, report.resident_bytes, report.mapped_bytes)
    return report.name, widths, ", ".join(sorted(report.codebooks)) or "-", *_sizes(report.weights, totals)


def _sizes(weights: int, totals: tuple[int, int, int]) -> tuple[str, ...]:
    return _scaled(weights, 1000, ("", "k", "M", "G")), *map(size, totals)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:>3.0f}%" if 200 * part >= whole else " <1%"


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least one, "-" for none."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB")) if nbytes else "-"


def _scaled(number: int, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while number >= base ** (power + 1) and power < len(units) - 1:
        power += 1
    value = number / base**power
    return f"{value:.{2 if power and value < 10 else 1 if power and value < 100 else 0}f} {units[power]}".rstrip()
