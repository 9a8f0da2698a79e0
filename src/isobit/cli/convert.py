"""`isobit convert`: a Hugging Face folder to EXL3."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isobit import settings
from isobit.cli.common import DeviceOption
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.checkpoint.convert import Plan

Source = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="Folder of the original model, as Hugging Face has it.", show_default=False),
]
Target = Annotated[
    Path, typer.Argument(metavar="DST", help="Folder to make; it must not exist yet.", show_default=False)
]
BitsOption = Annotated[
    str,
    typer.Option(
        metavar="WIDTH",
        help="Bits a weight: 1 to 8, or 1.5, 2.5, 3.5 with codebook mul1. 4 is nearly lossless, 3 a good compromise.",
        show_default=False,
    ),
]
HeadBitsOption = Annotated[
    str | None, typer.Option(metavar="WIDTH", help="Width of the output head. Default: as --bits.", show_default=False)
]
MtpBitsOption = Annotated[
    str | None,
    typer.Option(metavar="WIDTH", help="Width of the MTP (draft) head. Default: as --bits.", show_default=False),
]
NgramBitsOption = Annotated[
    int | None,
    typer.Option(help="Width of the n-gram table: 1 to 8. Default: the table stays plain.", show_default=False),
]
CodebookOption = Annotated[str, typer.Option(metavar="3inst|mcg|mul1", help="Codebook of the quantized linears.")]


def convert(
    source: Source,
    target: Target,
    bits: BitsOption,
    head_bits: HeadBitsOption = None,
    mtp_bits: MtpBitsOption = None,
    ngram_bits: NgramBitsOption = None,
    codebook: CodebookOption = "mul1",
    device: DeviceOption = settings.DEVICE.default,
) -> None:
    """Quantize a model to EXL3, without calibration. The device changes no bit; the CPU is for small models.

    DST appears when all is done. Interrupted at any time, the same command goes on from the tensors that were finished.
    """
    from isobit.checkpoint.convert import ConvertOptions
    from isobit.checkpoint.convert import convert as run
    from isobit.engine.placement import chosen_device

    options = ConvertOptions(
        bits=_width(bits, "--bits"),
        head_bits=None if head_bits is None else _width(head_bits, "--head-bits"),
        mtp_bits=None if mtp_bits is None else _width(mtp_bits, "--mtp-bits"),
        ngram_bits=ngram_bits,
        codebook=codebook,
    )
    options.check()
    computing = chosen_device(device)
    with _Progress() as progress:

        def announce(plan: "Plan") -> None:
            progress.say(
                f"Quantizing {plan.weights / 1e6:,.2f} M weights on the {plan.bench.place_name}: "
                f"{_spoken(plan.seconds(codebook))} in all, {plan.nbytes / 1e6:,.0f} MB."
                + (" The CPU is for small models." if computing == "cpu" else "")
            )
            for note in plan.notes:
                progress.say(f"note: {note}")

        try:
            run(source, target, options, device=computing, announce=announce, progress=progress)
        except KeyboardInterrupt:
            progress.say("Interrupted; finished tensors are kept. Run the same command to go on.")
            raise
    written = sum(file.stat().st_size for file in target.iterdir())
    typer.echo(f"Wrote {target} ({written / 1e6:,.1f} MB). See what it holds: isobit inspect {target}")


def _width(text: str, flag: str) -> float:
    try:
        width = float(text)
    except ValueError:
        raise IsobitError(f"{flag} is {text}: expected a width such as 3 or 3.5") from None
    return int(width) if width.is_integer() else width


def _spoken(seconds: float) -> str:
    """A duration to one significant unit."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"about {seconds / length:.0f} {unit}"
    return f"about {max(1, round(seconds))} s"


class _Progress:
    """A progress bar on stderr, fed with (weights done, weights in all)."""

    def __enter__(self) -> "_Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("quantizing"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)
        self._bar.start()
        return self

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
