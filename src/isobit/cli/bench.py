"""`isobit bench`: speeds of this machine, as ratios of one run."""

import json
import statistics
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobit import settings
from isobit.cli.common import (
    DeviceOption,
    Folder,
    Json,
    MemoryOption,
    ProfileOption,
    SegmentRowsOption,
    ThreadsOption,
    follow,
    open_engine,
)
from isobit.cli.profile import print_profile, profile_of, start_over
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.engine.engine import Engine

LENGTHS = "256,1024,3000"
CAPTION = "serial: one row a forward, batched: 64, deep: whole segments; ratios are medians of each repeat's own"
MODES = ("serial", "batched", "deep")

bench = typer.Typer(name="bench", help="Measure speeds on this machine.")

Rates = dict[str, list[float]]


LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help=f"Prompt lengths in tokens, with commas. Default: {LENGTHS}, as far as the window goes.",
        show_default=False,
    ),
]


@bench.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.command()
def prefill(
    folder: Folder,
    lengths: LengthsOption = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Alternating repeats; the median counts.")] = 3,
    segment_rows: SegmentRowsOption = settings.SEGMENT_ROWS.default,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    profile: ProfileOption = settings.PROFILE.default,
    as_json: Json = False,
) -> None:
    """Prompt speed of serial, batched and deep at several lengths, measured in turn.

    serial: one row a forward; batched: 64; deep: --segment-rows. The columns are medians of prompt tokens a second,
    then medians of the ratios that each repeat gave.
    """
    counts = _counts(LENGTHS if lengths is None else lengths)
    engine = open_engine(
        folder, device=device, memory_gib=memory_gib, segment_rows=segment_rows, threads=threads, profile=profile
    )
    try:
        counts = _within(engine.context, counts, named=lengths is not None)
        tokens = prompt_tokens(engine, max(counts))
        _warm_up(engine, tokens)
        start_over(engine)
        results = [_result(count, _measure(engine, tokens[:count], repeats)) for count in counts]
    finally:
        engine.close()
    timed = profile_of(engine)
    if as_json:
        measured = {"segment_rows": segment_rows, "repeats": repeats, "lengths": results}
        print(json.dumps(measured if timed is None else {**measured, "profile": timed}))
    else:
        _report(results)
        print_profile(timed)


def _counts(lengths: str) -> list[int]:
    try:
        counts = [int(length) for length in lengths.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise IsobitError(f"--lengths is {lengths!r}: expected numbers above 0 with commas, such as {LENGTHS}")
    return counts


def _within(window: int, counts: list[int], named: bool) -> list[int]:
    """Prompt lengths that leave a row for the reply; IsobitError where the user has `named` others, or one cut."""
    longest = max(counts)
    if longest < window:
        return counts
    if named:
        raise IsobitError(f"--lengths has {longest}: expected less than the window of {window}")
    print(f"isobit: {longest:,} tokens are beyond the window: measuring {window - 1:,} instead", file=sys.stderr)
    return sorted({min(count, window - 1) for count in counts})


def shortened(what: str, default: int, most: int) -> int:
    """A default length, or the `most` tokens that the window leaves for it, which the user is then told."""
    if default <= most:
        return default
    print(f"isobit: {what} of {default:,} tokens is beyond the window: measuring {most:,} instead", file=sys.stderr)
    return most


def prompt_tokens(engine: "Engine", count: int, start: int = 0) -> tuple[int, ...]:
    """`count` tokens of real text from token `start` on; the text is repeated as often as need be."""
    from isobit.cli.prompt_text import standard_library_text

    tokens = engine.tokenizer.encode(standard_library_text(8192))
    start %= len(tokens)
    return tuple((tokens * ((start + count) // len(tokens) + 1))[start : start + count])


def _warm_up(engine: "Engine", tokens: tuple[int, ...]) -> None:
    """Have the kernels compiled."""
    for mode in MODES:
        _rate(engine, tokens[:4] if mode == "serial" else tokens[: engine.settings.segment_rows], mode)


def _measure(engine: "Engine", tokens: tuple[int, ...], repeats: int) -> Rates:
    rates: Rates = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            rates[mode].append(_rate(engine, tokens, mode))
    return rates


def _rate(engine: "Engine", tokens: tuple[int, ...], mode: str) -> float:
    """Prompt tokens a second of one request."""
    from isobit.engine.request import Finished, Request

    request = Request(tokens=tokens, max_tokens=1, prefill=mode)  # type: ignore[arg-type]
    *_, finished = follow(engine, request)
    assert isinstance(finished, Finished)
    if finished.error is not None:
        raise IsobitError(f"the prompt could not be computed: {finished.error}")
    return finished.timings.prompt_rate


def _result(count: int, rates: Rates) -> dict[str, Any]:
    """Median speeds, and the median over repeats of each repeat's ratios."""
    median = statistics.median
    return {
        "tokens": count,
        "tokens_per_second": {mode: median(rates[mode]) for mode in MODES},
        "batched_to_serial": _ratio(rates, "batched", "serial"),
        "deep_to_serial": _ratio(rates, "deep", "serial"),
        "deep_to_batched": _ratio(rates, "deep", "batched"),
    }


def _ratio(rates: Rates, one: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def _report(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Prompt tokens a second", caption=CAPTION, caption_justify="left")
    for name in ("tokens", *MODES, "batched\n/serial", "deep\n/serial", "deep\n/batched"):
        table.add_column(name, justify="right")
    for result in results:
        speeds = [f"{result['tokens_per_second'][mode]:,.0f}" for mode in MODES]
        ratios = [f"{result[f'{a}_to_{b}']:.2f}" for a, b in (("batched", "serial"), ("deep", "serial"))]
        table.add_row(f"{result['tokens']:,}", *speeds, *ratios, f"{result['deep_to_batched']:.2f}")
    Console(highlight=False).print(table)
