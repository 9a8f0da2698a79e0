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
    from collections.abc import Iterator

    from isobit.engine.origin import Origin
    from isobit.serve.verify import Recorded, Task, UnusableError, Verdict

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
    """Compute saved replies again and compare them: exit code 0 when all are equal, 1 when one is not.

    What another checkpoint, arithmetic version or device kind has computed cannot be compared; exit code 2 when that is
    so of all.
    """
    from isobit.checkpoint.opening import open_store
    from isobit.checkpoint.tokenizer import Tokenizer
    from isobit.engine.origin import origin_of
    from isobit.engine.placement import chosen_device
    from isobit.ops import device_kind
    from isobit.serve import verify as work

    records = work.read_records(file)
    if all(isinstance(record, work.UnusableError) for record in records):
        raise _none_comparable([str(record) for record in records])
    chosen = folder or _recorded_folder(file, records)
    computing = chosen_device(device)
    origin = origin_of(open_store(chosen), device_kind(computing))
    tokenizer = Tokenizer(chosen)
    prepared = [work.prepare(record, origin, tokenizer, prefill) for record in records]  # type: ignore[arg-type]
    if not any(isinstance(item, work.Task) or item.comparable for item in prepared):
        raise _none_comparable([item.problem or "" for item in prepared if isinstance(item, work.Verdict)])
    verdicts = []
    for verdict in _verdicts(prepared, chosen, origin, device=computing, memory_gib=memory_gib, threads=threads):
        verdicts.append(verdict)
        if not as_json:
            print(verdict, flush=True)
    print(json.dumps(_report(verdicts, origin, prefill)) if as_json else _summary(verdicts))
    if not all(verdict.equal for verdict in verdicts):
        raise typer.Exit(1)


def _verdicts(prepared: "list[Task | Verdict]", folder: Path, origin: "Origin", **chosen: Any) -> "Iterator[Verdict]":
    """The verdicts in order, each as soon as it is known. chosen: fields of EngineSettings."""
    from isobit.checkpoint.config import load_config
    from isobit.serve.verify import Task, judge

    rows = [item.rows for item in prepared if isinstance(item, Task)]
    if not rows:
        yield from (item for item in prepared if not isinstance(item, Task))
        return
    context = min(max(rows), load_config(folder).max_position_embeddings)
    engine = open_engine(folder, context=context, drafts=False, **chosen)
    try:
        if engine.origin != origin:
            raise IsobitError(f"{folder} was replaced while it was read: start again")
        for item in prepared:
            yield judge(item, partial(follow, engine)) if isinstance(item, Task) else item
    finally:
        engine.close()


def _recorded_folder(file: Path, records: "list[Recorded | UnusableError]") -> Path:
    folders = {folder for record in records if (folder := getattr(record, "folder", None)) is not None}
    if len(folders) == 1:
        return Path(folders.pop())
    raise IsobitError(f"{file} does not say which checkpoint it is of: name its folder, isobit verify FILE DIR")


def _none_comparable(problems: list[str]) -> IsobitError:
    more = f" (and {len(problems) - 1:,} more that cannot be compared)" if len(problems) > 1 else ""
    return IsobitError(f"{problems[0]}{more}")


def _summary(verdicts: "list[Verdict]") -> str:
    differing = sum(not verdict.equal and verdict.comparable for verdict in verdicts)
    incomparable = sum(not verdict.comparable for verdict in verdicts)
    if not differing and not incomparable:
        return f"All {len(verdicts):,} equal."
    differ = f"{differing:,} of {len(verdicts):,} {'differs' if differing == 1 else 'differ'}"
    return f"{differ}, {incomparable:,} cannot be compared." if incomparable else f"{differ}."


def _report(verdicts: "list[Verdict]", origin: "Origin", prefill: str) -> dict[str, Any]:
    from dataclasses import asdict

    replies = [
        {
            "where": verdict.where,
            "equal": verdict.equal,
            "token_hash": verdict.token_hash,
            "difference": None if verdict.difference is None else asdict(verdict.difference),
            "problem": verdict.problem,
        }
        for verdict in verdicts
    ]
    return {**asdict(origin), "prefill": prefill, "equal": all(v.equal for v in verdicts), "replies": replies}
