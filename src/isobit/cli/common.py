"""What the commands share: options made from settings, an engine, and the way from a request to its events."""

import queue
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobit import kernels, settings
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.engine.engine import Engine
    from isobit.engine.request import Event, Request

COMPILING = "isobit: compiling kernels, once: the first reply takes a minute or two longer"
COMPILING_AGAIN = (
    "isobit: compiling kernels, a minute or two at every start, since {} cannot be written: set NUMBA_CACHE_DIR to a "
    "folder that can"
)
KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the checkpoint.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def option(setting: settings.Setting) -> Any:
    """The command-line option of a setting: its flag, bounds and help."""
    if setting.kind is bool:
        return typer.Option(setting.flag, help=setting.help)
    unset = f" Default: {setting.unset}." if setting.default is None and setting.unset else ""
    return typer.Option(
        setting.flag,
        help=setting.help + unset,
        metavar="|".join(setting.choices) or KINDS[setting.kind],
        callback=_checked(setting),
        show_default=setting.default is not None,
    )


def _checked(setting: settings.Setting) -> Any:
    def check(value: Any) -> Any:
        if value is not None and not setting.allows(value):
            raise IsobitError(f"{setting.flag} is {value}: expected {setting.bounds}")
        return value

    return check


ContextOption = Annotated[int | None, option(settings.CONTEXT)]
DeviceOption = Annotated[str, option(settings.DEVICE)]
MemoryOption = Annotated[float | None, option(settings.MEMORY_GIB)]
ThreadsOption = Annotated[int | None, option(settings.THREADS)]
SegmentRowsOption = Annotated[int | None, option(settings.SEGMENT_ROWS)]
MtpDraftsOption = Annotated[int, option(settings.MTP_DRAFTS)]
NoDraftsOption = Annotated[bool, option(settings.NO_DRAFTS)]
ProfileOption = Annotated[bool, option(settings.PROFILE)]


def open_engine(folder: Path, always_tell: bool = False, profile: bool = False, **chosen: Any) -> "Engine":
    """Load the checkpoint; IsobitError when it cannot be served.

    always_tell: on standard error that kernels are compiled first, where that is no terminal too. profile: whether its
    ops are timed, for `isobit.cli.profile`. chosen: fields of EngineSettings. Unless they say otherwise, there is one
    lane and nothing is kept, which is what a command needs that sends one request after the other.
    """
    from isobit.engine.engine import Engine, EngineSettings
    from isobit.engine.profile import ProfiledRounds
    from isobit.engine.rounds import Rounds

    if (always_tell or sys.stderr.isatty()) and kernels.none_kept():
        refused = kernels.refused_folder()
        print(COMPILING_AGAIN.format(refused) if refused else COMPILING, file=sys.stderr, flush=True)
    options = EngineSettings(**{"parallel": 1, "prompt_cache_gib": 0.0, **chosen})
    with Bar("loading") as loading:
        return Engine(folder, options, rounds=ProfiledRounds if profile else Rounds, progress=loading)


class Bar:
    """A progress bar on standard error, where that is a terminal, fed with (done, in all): bytes, or `counts`.

    Until it is fed it moves to and fro.
    """

    def __init__(self, label: str, counts: bool = False):
        self._label, self._counts = label, counts

    def __enter__(self) -> "Bar":
        from rich import progress
        from rich.console import Console

        amount = progress.MofNCompleteColumn() if self._counts else progress.DownloadColumn()
        columns = (progress.TextColumn(self._label), progress.BarColumn(), amount, progress.TimeRemainingColumn())
        console = Console(stderr=True)
        self._bar = progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)
        self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def follow(engine: "Engine", request: "Request") -> Iterator["Event"]:
    """Submit a request and yield its events, Finished last. Leaving early cancels it."""
    from isobit.engine.request import Finished

    events: queue.Queue[Event] = queue.Queue()
    ticket = engine.submit(request, events.put)
    try:
        while not isinstance(event := events.get(), Finished):
            yield event
        yield event
    finally:
        ticket.cancel()


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, replaced by U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
