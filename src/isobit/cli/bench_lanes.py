"""`isobit bench concurrent`, `resume` and `drafts`: what lanes, kept states and drafts bring, as ratios of one run."""

import json
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobit import settings
from isobit.cli.bench import bench, prompt_tokens, shortened
from isobit.cli.common import DeviceOption, Folder, Json, MemoryOption, ProfileOption, ThreadsOption, open_engine
from isobit.cli.profile import print_profile, profile_of, start_over
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.engine.engine import Engine
    from isobit.engine.request import Event, Finished, Request

STREAMS = (1, 2, 4, 8)
PROMPTS = {"chat": 96, "code": 1024}  # tokens of a prompt
LENGTH = 3000  # tokens of a resumed prompt
RESUMED_TAIL = 16  # tokens of a resumed prompt that were not there before
CONCURRENT_REPLY, DRAFTED_REPLY = 96, 128  # tokens of a reply

Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Alternating repeats; the median counts.")]


def reply_option(default: int) -> Any:
    return typer.Option(
        "--reply-tokens",
        min=2,
        help=f"Tokens of each reply. Default: {default}, as far as the window goes.",
        show_default=False,
    )


LengthOption = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=64,
        help=f"Prompt length in tokens. Default: {LENGTH:,}, as far as the window goes.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Timed:
    """A request's end, and when its tokens came, in seconds of one clock."""

    finished: "Finished"
    moments: tuple[float, ...]


@bench.command()
def concurrent(
    folder: Folder,
    repeats: Repeats = 3,
    reply_tokens: Annotated[int | None, reply_option(CONCURRENT_REPLY)] = None,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    profile: ProfileOption = settings.PROFILE.default,
    as_json: Json = False,
) -> None:
    """Reply tokens a second of 1, 2, 4 and 8 streams while all of them reply, and how long their first tokens take."""
    engine = open_engine(
        folder,
        device=device,
        memory_gib=memory_gib,
        threads=threads,
        parallel=max(STREAMS),
        drafts=False,
        profile=profile,
    )
    try:
        reply = fitting_reply(engine.context, reply_tokens, CONCURRENT_REPLY)
        prompts = {kind: fitting_prompt(engine.context, kind, reply) for kind in PROMPTS}
        for streams in STREAMS:
            submit_all(engine, requests(engine, prompts["chat"], streams, min(4, reply)))
        start_over(engine)
        runs: dict[tuple[str, int], list[list[Timed]]] = {}
        for _ in range(repeats):
            for kind, length in prompts.items():
                for streams in STREAMS:
                    timed = submit_all(engine, requests(engine, length, streams, reply))
                    runs.setdefault((f"{kind} {length}", streams), []).append(timed)
        results = [concurrent_result(kind, streams, repeated, runs) for (kind, streams), repeated in runs.items()]
    finally:
        engine.close()
    report(
        as_json,
        f"Streams of {reply} reply tokens, together",
        tuple(results[0]),
        results,
        profile_of(engine),
    )


@bench.command()
def resume(
    folder: Folder,
    length: LengthOption = None,
    repeats: Repeats = 5,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    profile: ProfileOption = settings.PROFILE.default,
    as_json: Json = False,
) -> None:
    """Time to the first token of a prompt that was computed before, but for its last tokens, against a fresh one."""
    from isobit.engine.request import Request

    engine = open_engine(
        folder, device=device, memory_gib=memory_gib, threads=threads, prompt_cache_gib=1.0, profile=profile
    )
    try:
        fresh, resumed, reused = [], [], 0
        rows = fitting_length(engine.context, length)
        for i in range(repeats + 1):
            tokens = prompt_tokens(engine, rows, start=1 + 37 * i)
            first = submit_all(engine, [Request(tokens, 1)])[0].finished
            again = submit_all(engine, [Request((*tokens, *tokens[:RESUMED_TAIL]), 1)])[0].finished
            reused = again.rows_reused
            if not i:
                start_over(engine)
            else:
                fresh.append(first.timings.first_token)
                resumed.append(again.timings.first_token)
    finally:
        engine.close()
    ratio = statistics.median(a / b for a, b in zip(fresh, resumed, strict=True))
    row = {
        "tokens": rows,
        "rows_reused": reused,
        "fresh_seconds": statistics.median(fresh),
        "resumed_seconds": statistics.median(resumed),
        "times_sooner": ratio,
    }
    report(as_json, "First token, fresh and resumed", tuple(row), [row], profile_of(engine))


@bench.command()
def drafts(
    folder: Folder,
    repeats: Repeats = 9,
    reply_tokens: Annotated[int | None, reply_option(DRAFTED_REPLY)] = None,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    profile: ProfileOption = settings.PROFILE.default,
    as_json: Json = False,
) -> None:
    """Reply speed with a prompt cache that nothing uses, with drafts, and with wrong drafts, against neither.

    --profile times them all and prints the one with drafts.
    """
    variants: dict[str, dict[str, Any]] = {
        "neither": {"drafts": False},
        "cache, unused": {"drafts": False, "prompt_cache_gib": 0.5},
        "drafts": {},
        "drafts, wrong": {},
    }
    ends: dict[str, list[Finished]] = {name: [] for name in variants}
    engines = {
        name: open_engine(folder, device=device, memory_gib=memory_gib, threads=threads, profile=profile, **v)
        for name, v in variants.items()
    }
    spoil_drafts(engines["drafts, wrong"])
    try:
        window = engines["neither"].context
        reply = fitting_reply(window, reply_tokens, DRAFTED_REPLY)
        length = fitting_prompt(window, "chat", reply)
        for i in range(repeats + 1):
            for name in rotated(list(variants), i):
                engine = engines[name]
                finished = submit_all(engine, requests(engine, length, 1, reply, first=i))[0].finished
                if i:
                    ends[name].append(finished)
                else:
                    start_over(engine)
    finally:
        for engine in engines.values():
            engine.close()
    results = [drafts_result(name, ends[name], ends["neither"]) for name in variants]
    timed = profile_of(engines["drafts"])
    report(as_json, f"One stream of {reply} reply tokens", tuple(results[0]), results, timed)


def fitting_length(window: int, asked: int | None) -> int:
    """Tokens of a resumed prompt that leave room for its tail and a reply; IsobitError where others were asked for."""
    most = window - RESUMED_TAIL - 1
    if asked is not None and asked > most:
        raise IsobitError(f"--length is {asked}: expected {most} or less, for {RESUMED_TAIL + 1} more in the window")
    if most < 1:
        raise IsobitError(f"the window of {window} is too short to resume a prompt: expected more than {window - most}")
    return shortened("a prompt", LENGTH, most) if asked is None else asked


def fitting_reply(window: int, asked: int | None, default: int) -> int:
    """Tokens of a reply that leave as many for its prompt, or those asked for; IsobitError where they leave none."""
    if asked is not None and asked >= window:
        raise IsobitError(f"--reply-tokens is {asked}: expected less than the window of {window}")
    return shortened("a reply", default, window // 2) if asked is None else asked


def fitting_prompt(window: int, kind: str, reply: int) -> int:
    """Tokens of a prompt of the kind, as many as the reply leaves room for."""
    return shortened(f"a {kind} prompt beside its reply", PROMPTS[kind], window - reply)


def rotated(names: list[str], places: int) -> list[str]:
    """The names from another one on, so that none always follows the same one."""
    start = places % len(names)
    return names[start:] + names[:start]


def drafts_result(name: str, ends: "list[Finished]", without: "list[Finished]") -> dict[str, Any]:
    """Medians over the repeats; the ratio is taken repeat by repeat."""
    rates, rates_without = ([end.timings.reply_rate for end in some] for some in (ends, without))
    drafted = sum(end.drafted for end in ends)
    return {
        "with": name,
        "tokens_per_second": statistics.median(rates),
        "to_neither": statistics.median(a / b for a, b in zip(rates, rates_without, strict=True)),
        "drafted": drafted,
        "accepted": sum(end.accepted for end in ends) / max(drafted, 1),
    }


def spoil_drafts(engine: "Engine") -> None:
    """Have each drafted token be the one after the token that was proposed: as costly, but hardly ever right."""
    vocabulary = engine.config.vocab_size

    def spoiled(propose: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
        return lambda *given: [[(token + 1) % vocabulary for token in draft] for draft in propose(*given)]

    for proposer in engine.rounds.drafter.proposers:
        proposer.propose = spoiled(proposer.propose)  # type: ignore[method-assign]


def requests(engine: "Engine", length: int, count: int, reply_tokens: int, first: int = 0) -> list["Request"]:
    """Requests with prompts of `length` tokens, each another part of the same text."""
    from isobit.engine.request import Request, Sampling

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
    moments: list[list[float]] = [[] for _ in submitted]
    ends: dict[int, Finished] = {}
    while len(ends) < len(submitted):
        i, moment, event = events.get()
        if isinstance(event, TokenEvent):
            moments[i].append(moment)
        elif isinstance(event, Finished):
            if event.error is not None:
                raise IsobitError(f"a request could not be computed: {event.error}")
            ends[i] = event
    return [Timed(ends[i], tuple(moments[i])) for i in range(len(submitted))]


def concurrent_result(
    kind: str, streams: int, repeated: list[list[Timed]], runs: dict[tuple[str, int], list[list[Timed]]]
) -> dict[str, Any]:
    """Medians over the repeats; the ratio to one stream is taken repeat by repeat."""
    waits = sorted(timed.finished.timings.first_token for run in repeated for timed in run)
    ratios = [rate(run) / rate(one) for run, one in zip(repeated, runs[kind, 1], strict=True)]
    return {
        "prompts": kind,
        "streams": streams,
        "tokens_per_second": statistics.median(rate(run) for run in repeated),
        "to_one_stream": statistics.median(ratios),
        "first_token_median": statistics.median(waits),
        "first_token_90%": waits[-(-9 * len(waits) // 10) - 1],
        "first_token_slowest": waits[-1],
    }


def rate(run: list[Timed]) -> float:
    """Reply tokens a second of all streams while all of them reply: from the last first token to the first last one.

    Raises IsobitError when they never all do.
    """
    begin, end = max(timed.moments[0] for timed in run), min(timed.moments[-1] for timed in run)
    tokens = sum(begin < moment <= end for timed in run for moment in timed.moments)
    if not tokens:
        raise IsobitError(
            f"a reply of {len(run)} streams ended before the last one began: raise --reply-tokens, so that they overlap"
        )
    return tokens / (end - begin)


def report(
    as_json: bool,
    title: str,
    columns: Sequence[str],
    rows: list[dict[str, Any]],
    profile: list[dict[str, Any]] | None = None,
) -> None:
    """The rows as a table, or as JSON: a list, or with a profile an object of both."""
    if as_json:
        print(json.dumps(rows if profile is None else {"results": rows, "profile": profile}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", "\n"), justify="right")
    for row in rows:
        table.add_row(*(f"{row[c]:,.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    Console(highlight=False).print(table)
    print_profile(profile)
