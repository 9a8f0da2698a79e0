"""isobit exact: the exactness matrix."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from isobit import settings
from isobit.cli.common import DeviceOption
from isobit.errors import counted


def exact(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    minutes: Annotated[float, typer.Option(min=0, help="Go on with random cells for so long.")] = 2.0,
    context: Annotated[int | None, typer.Option(min=64, help="Rows of one request at most.")] = None,
    device: DeviceOption = settings.DEVICE.default,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests and of the cells' choice.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a cell.")] = False,
) -> None:
    """Compute random requests in every way there is and compare all bytes with row-by-row decoding.

    Prefill, company, drafts, kept states, sampling and threads are varied; every pair of their values occurs. Exits
    with 1 when any token, logit or final state differs.
    """
    import numpy as np

    from isobit.exact.matrix import run_matrix
    from isobit.exact.workload import Laboratory

    rng = np.random.default_rng(seed)
    laboratory = Laboratory(folder, rng, context, device)
    count = different = 0
    try:
        for outcome in run_matrix(laboratory, rng, minutes):
            count += 1
            different += outcome.difference is not None
            if json:
                fields = {
                    **vars(outcome.cell),
                    "prompt_tokens": outcome.prompt_tokens,
                    "difference": outcome.difference,
                }
                print(json_module.dumps(fields), flush=True)
            else:
                print(f"{'equal' if outcome.difference is None else 'DIFFERENT'}  {outcome.cell}", flush=True)
                if outcome.difference is not None:
                    print(f"           {outcome.difference}", flush=True)
    finally:
        laboratory.close()
    if not json:
        verdict = "every pair of values agrees" if not different else "not exact"
        print(f"{counted(count, 'cell')}, {different} different: {verdict}")
    raise typer.Exit(1 if different else 0)
