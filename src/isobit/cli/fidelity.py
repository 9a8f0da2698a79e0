"""`isobit fidelity`: the checkpoint against transformers."""

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from isobit import settings
from isobit.cli.common import DeviceOption, Folder, MemoryOption
from isobit.errors import IsobitError

NEEDED = ("torch", "transformers", "huggingface_hub")


def fidelity(
    folder: Folder,
    tokens: Annotated[
        int | None,
        typer.Option(help="Positions to compare. Default: 96 past the indexer's budget.", min=1, show_default=False),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Take the tokens from this text file. Default: random ones.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.", min=0)] = 0,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Compare a checkpoint's logits with transformers' own model, which runs in float32 on the same device.

    Every position whose best token differs is traced to the near tie that explains it. Exit code 0 when all positions
    agree or are so explained, 1 otherwise. Needs the extra "fidelity": PyTorch and transformers.
    """
    from rich.console import Console

    from isobit.engine.placement import chosen_device

    check, print_report = _imports()
    computing = chosen_device(device)
    progress = Console(stderr=True, quiet=json)
    with progress.status("reading the checkpoint") as status:
        report = check(
            folder, tokens, text, seed, memory_gib, say=lambda step: status.update(f"running {step}"), device=computing
        )
    if json:
        typer.echo(json_format.dumps(report.to_json()))
    else:
        print_report(report, Console())
    if not report.passed:
        raise typer.Exit(1)


def _imports():
    try:
        from isobit.fidelity.check import check
        from isobit.fidelity.report import print_report
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in NEEDED:
            raise
        missing = "transformers >= 5.24" if error.name and error.name.startswith("transformers.") else name
        raise IsobitError(
            f"isobit fidelity needs {missing}, which is not installed: pip install 'isobit[fidelity]'"
        ) from None
    return check, print_report
