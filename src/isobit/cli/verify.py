"""`isobit verify`: saved replies, computed again."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobit import settings
from isobit.cli.common import DeviceOption, Json, MemoryOption, ThreadsOption, follow, open_engine, option
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobit.engine.engine import Engine
    from isobit.engine.origin import Origin
    from isobit.serve.verify import Difference, Recorded, Task

RECORDS = "Outputs of generate --json, or {request, response} objects of a server; one, or one a line."
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help=RECORDS, show_default=False)]
OptionalFolder = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Folder of the checkpoint. Default: as FILE says.", show_default=False),
]
PrefillOption = Annotated[str, option(settings.PREFILL)]


def verify(
    file: FileArgument,
    folder: OptionalFolder = None,
    prefill: PrefillOption = settings.PREFILL.default,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    as_json: Json = False,
) -> None:
    """Compute saved replies again and compare them: exit code 0 when all are equal, 1 when one differs.

    Refuses, with exit code 2, what another checkpoint, arithmetic version or device kind has computed.
    """
    from isobit.checkpoint.store import TensorStore
    from isobit.checkpoint.tokenizer import Tokenizer
    from isobit.engine.origin import origin_of
    from isobit.engine.placement import chosen_device
    from isobit.ops import device_kind
    from isobit.serve import verify as work

    records = work.read_records(file)
    chosen = folder or _recorded_folder(file, records)
    computing = chosen_device(device)
    origin = origin_of(TensorStore(chosen), device_kind(computing))
    work.check_origin(records, origin)
    tokenizer = Tokenizer(chosen)
    tasks = [work.task_of(record, tokenizer, prefill) for record in records]  # type: ignore[arg-type]
    engine = partial(open_engine, device=computing, memory_gib=memory_gib, threads=threads)
    differing = _compare(tasks, chosen, engine, as_json)
    if as_json:
        print(json.dumps(_report(tasks, differing, origin, prefill)))
    else:
        _print_verdict(differing)
    if any(differing):
        raise typer.Exit(1)


def _compare(
    tasks: "list[Task]", folder: Path, open_for: "Callable[..., Engine]", quiet: bool
) -> "list[Difference | None]":
    """The difference of each reply, told as soon as it is known unless `quiet`."""
    from isobit.checkpoint.config import load_config
    from isobit.serve.verify import difference, recompute

    context = min(max(task.rows for task in tasks), load_config(folder).max_position_embeddings)
    engine = open_for(folder, context=context, drafts=False)
    differing = []
    try:
        for task in tasks:
            record = task.recorded
            differing.append(difference(record, recompute(task, partial(follow, engine))))
            if not quiet:
                equal = f"equal ({record.receipt.reply_tokens:,} tokens, token hash {record.token_hash})"
                print(f"{record.where}: {differing[-1] or equal}", flush=True)
    finally:
        engine.close()
    return differing


def _recorded_folder(file: Path, records: "list[Recorded]") -> Path:
    folders = {record.folder for record in records if record.folder is not None}
    if len(folders) == 1:
        return Path(folders.pop())
    raise IsobitError(f"{file} does not say which checkpoint it is of: name its folder, isobit verify FILE DIR")


def _print_verdict(differing: "list[Difference | None]") -> None:
    count = sum(difference is not None for difference in differing)
    print(f"{count} of {len(differing)} differ." if count else f"All {len(differing)} equal.")


def _report(
    tasks: "list[Task]", differing: "list[Difference | None]", origin: "Origin", prefill: str
) -> dict[str, Any]:
    from dataclasses import asdict

    replies = [
        {
            "where": task.recorded.where,
            "equal": difference is None,
            "token_hash": task.recorded.token_hash,
            "difference": None if difference is None else asdict(difference),
        }
        for task, difference in zip(tasks, differing, strict=True)
    ]
    return {**asdict(origin), "prefill": prefill, "equal": not any(differing), "replies": replies}
