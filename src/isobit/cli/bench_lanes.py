"""`isobit bench concurrent`, `resume` and `drafts`: what lanes, kept states and drafts bring, as ratios of one run."""

import json
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobit import settings
from isobit.cli.bench import bench, prompt_tokens
from isobit.cli.common import DeviceOption, Folder, Json, MemoryOption, ThreadsOption, open_engine
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.engine.engine import Engine
    from isobit.engine.request import Event, Finished, Request

STREAMS = (1, 2, 4, 8)
PROMPTS = {"chat": 96, "code": 1024}  # tokens of a prompt
RESUMED_TAIL = 16  # tokens of a resumed prompt that were not there before

Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Alternating repeats; the median counts.")]
Reply = Annotated[int, typer.Option("--reply-tokens", min=2, help="Tokens of each reply.")]


@dataclass(frozen=True)
class Timed:
    """A request's end, and when its first and last token came, in seconds of one clock."""

    finished: "Finished"
    first: float
    last: float


@bench.command()
def concurrent(
    folder: Folder,
    repeats: Repeats = 3,
    reply_tokens: Reply = 48,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    as_json: Json = False,
) -> None:
    """Reply tokens a second of 1, 2, 4 and 8 streams together, and how long the first tokens take."""
    engine = open_engine(
        folder, device=device, memory_gib=memory_gib, threads=threads, parallel=max(STREAMS), drafts=False
    )
    try:
        submit_all(engine, requests(engine, "chat", 2, 4))
        runs: dict[tuple[str, int], list[list[Timed]]] = {}
        for _ in range(repeats):
            for kind in PROMPTS:
                for streams in STREAMS:
                    timed = submit_all(engine, requests(engine, kind, streams, reply_tokens))
                    runs.setdefault((kind, streams), []).append(timed)
        results = [concurrent_result(kind, streams, repeated, runs) for (kind, streams), repeated in runs.items()]
    finally:
        engine.close()
    report(
        as_json,
        f"Streams of {reply_tokens} reply tokens, together",
        ("prompts", "streams", "tokens_per_second", "to_one_stream", "first_token_median", "first_token_slowest"),
        results,
    )


@bench.command()
def resume(
    folder: Folder,
    length: Annotated[int, typer.Option("--length", min=64, help="Prompt length in tokens.")] = 3000,
    repeats: Repeats = 5,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    as_json: Json = False,
) -> None:
    """Time to the first token of a prompt that was computed before, but for its last tokens, against a fresh one."""
    from isobit.engine.request import Request

    engine = open_engine(folder, device=device, memory_gib=memory_gib, threads=threads, prompt_cache_gib=1.0)
    try:
        fresh, resumed, reused = [], [], 0
        for i in range(repeats + 1):
            tokens = prompt_tokens(engine, length, start=1 + 37 * i)
            first = submit_all(engine, [Request(tokens, 1)])[0].finished
            again = submit_all(engine, [Request((*tokens, *tokens[:RESUMED_TAIL]), 1)])[0].finished
            reused = again.rows_reused
            if i:
                fresh.append(first.timings.first_token)
                resumed.append(again.timings.first_token)
    finally:
        engine.close()
    ratio = statistics.median(a / b for a, b in zip(fresh, resumed, strict=True))
    row = {
        "tokens": length,
        "rows_reused": reused,
        "fresh_seconds": statistics.median(fresh),
        "resumed_seconds": statistics.median(resumed),
        "times_sooner": ratio,
    }
    report(as_json, "First token, fresh and resumed", tuple(row), [row])


@bench.command()
def drafts(
    folder: Folder,
    repeats: Repeats = 5,
    reply_tokens: Reply = 128,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    as_json: Json = False,
) -> None:
    """Reply speed with drafts and the prompt cache, against without: on, unused, and off, measured in turn."""
    variants: dict[str, dict[str, Any]] = {
        "neither": {"drafts": False},
        "cache": {"drafts": False, "prompt_cache_gib": 0.5},
        "drafts": {},
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    accepted = drafted = 0
    engines = {
        name: open_engine(folder, device=device, memory_gib=memory_gib, threads=threads, **v)
        for name, v in variants.items()
    }
    try:
        for i in range(repeats + 1):
            for name, engine in engines.items():
                finished = submit_all(engine, requests(engine, "chat", 1, reply_tokens, first=i))[0].finished
                if i:
                    rates[name].append(finished.timings.reply_rate)
                    accepted, drafted = accepted + finished.accepted, drafted + finished.drafted
    finally:
        for engine in engines.values():
            engine.close()
    results = [
        {
            "with": name,
            "tokens_per_second": statistics.median(rates[name]),
            "to_neither": statistics.median(a / b for a, b in zip(rates[name], rates["neither"], strict=True)),
            "drafted": drafted if name == "drafts" else 0,
            "accepted": accepted / max(drafted, 1) if name == "drafts" else 0.0,
        }
        for name in variants
    ]
    report(as_json, f"One stream of {reply_tokens} reply tokens", tuple(results[0]), results)


def requests(engine: "Engine", kind: str, count: int, reply_tokens: int, first: int = 0) -> list["Request"]:
    """Requests with prompts of a kind, each another part of the same text."""
    from isobit.engine.request import Request, Sampling

    length = PROMPTS[kind]
    return [
        Request(prompt_tokens(engine, length, start=(first + i) * length), reply_tokens, Sampling(seed=first + i))
        for i in range(count)
    ]


def submit_all(engine: "Engine", submitted: Sequence["Request"]) -> list[Timed]:
    """Send all requests at once and wait for their ends."""
    from isobit.engine.request import Finished, TokenEvent

    events: queue.Queue[tuple[int, float, Event]] = queue.Queue()
    for i, request in enumerate(submitted):
        engine.submit(request, lambda event, i=i: events.put((i, time.perf_counter(), event)))  # type: ignore[misc]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    ends: dict[int, Finished] = {}
    while len(ends) < len(submitted):
        i, moment, event = events.get()
        if isinstance(event, TokenEvent):
            first.setdefault(i, moment)
            last[i] = moment
        elif isinstance(event, Finished):
            if event.error is not None:
                raise IsobitError(f"a request could not be computed: {event.error}")
            ends[i] = event
    return [Timed(ends[i], first[i], last[i]) for i in range(len(submitted))]


def concurrent_result(
    kind: str, streams: int, repeated: list[list[Timed]], runs: dict[tuple[str, int], list[list[Timed]]]
) -> dict[str, Any]:
    """Medians over the repeats; the ratio to one stream is taken repeat by repeat."""
    waits = sorted(timed.finished.timings.first_token for run in repeated for timed in run)
    ratios = [rate(run) / rate(one) for run, one in zip(repeated, runs[kind, 1], strict=True)]
    return {
        "prompts": f"{kind} {PROMPTS[kind]}",
        "streams": streams,
        "tokens_per_second": statistics.median(rate(run) for run in repeated),
        "to_one_stream": statistics.median(ratios),
        "first_token_median": statistics.median(waits),
        "first_token_slowest": waits[-1],
    }


def rate(run: list[Timed]) -> float:
    """Reply tokens a second of all streams, from the moment that the first has its first token."""
    tokens = sum(len(timed.finished.tokens) for timed in run) - 1
    return tokens / (max(timed.last for timed in run) - min(timed.first for timed in run))


def report(as_json: bool, title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """The rows as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", "\n"), justify="right")
    for row in rows:
        table.add_row(*(f"{row[c]:,.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    Console(highlight=False).print(table)
