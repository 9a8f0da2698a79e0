"""`isobit demo`: the promise, shown on this machine."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from isobit.cli.common import Json, ThreadsOption
from isobit.errors import IsobitError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

PROMPT_CHARACTERS = 3072
PROMPT_TOKENS = 3000
WARM_CHARACTERS = 700
REPLY_TOKENS = 64
SEED = 20240229
SHOWN = 12
EQUAL = "All three agree: the same {tokens} reply tokens, and the same logits of the last prompt row, bit for bit."
UNEQUAL = "They do NOT agree: this breaks isobit's promise; please report it with the lines above."

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Way:
    """One way to compute the prompt."""

    prefill: str
    segment_rows: int | None
    label: str


@dataclass(frozen=True)
class Run:
    """What one way gave: seconds, tokens a second, and the two hashes."""

    prefill: str
    segment_rows: int
    prompt_tokens: int
    reply_tokens: int
    first_token: float
    prompt_rate: float
    reply_rate: float
    token_hash: str
    logits_hash: str


WAYS = (
    Way("serial", None, "row by row"),
    Way("batched", 64, "64 rows at a time"),
    Way("deep", None, "deep"),
)


def demo(threads: ThreadsOption = None, as_json: Json = False) -> None:
    """Serve a small checkpoint and compute one long prompt in three ways: the replies must be equal."""
    from rich.console import Console

    from isobit.cli.demo_checkpoint import kept_or_temporary
    from isobit.cli.prompt_text import standard_library_text
    from isobit.serve.child import running_server

    console = Console(stderr=True)
    text = standard_library_text(PROMPT_CHARACTERS)
    with ExitStack() as held, console.status("Making the demo checkpoint (once)") as status:
        folder = held.enter_context(kept_or_temporary())
        status.update("Starting the server")
        with running_server(folder, [] if threads is None else ["--threads", str(threads)]) as url:
            status.update("Compiling kernels (the first run takes longer)")
            _warm_up(url, text[:WARM_CHARACTERS])
            status.stop()
            runs = _runs(url, text, console)
    equal = len({(run.token_hash, run.logits_hash) for run in runs}) == 1
    if as_json:
        print(json.dumps({"checkpoint": str(folder), "runs": [asdict(run) for run in runs], "equal": equal}))
    else:
        _report(runs, equal)
    if not equal:
        raise typer.Exit(1)


def _warm_up(url: str, text: str) -> None:
    """Have every kernel compiled, so that the runs measure computing alone."""
    for way in WAYS:
        rows = 8 if way.prefill == "serial" else len(text)
        _request(url, text[:rows], way, 2, lambda done, total: None)


def _runs(url: str, text: str, console: "Console") -> list[Run]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = []
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(way.label, total=None, start=False) for way in WAYS]
        for way, bar in zip(WAYS, bars, strict=True):
            progress.start_task(bar)

            def show(done: int, total: int, bar=bar) -> None:
                progress.update(bar, completed=done, total=total)

            runs.append(_request(url, text, way, REPLY_TOKENS, show))
            progress.stop_task(bar)
    if runs[0].prompt_tokens < PROMPT_TOKENS:
        raise IsobitError(f"the prompt has {runs[0].prompt_tokens} tokens: expected at least {PROMPT_TOKENS}")
    return runs


def _request(url: str, text: str, way: Way, reply_tokens: int, progress: Progress) -> Run:
    """Send one streamed request and read it to its end."""
    import httpx

    body = {
        "prompt": text,
        "max_tokens": reply_tokens,
        "temperature": 1,
        "seed": SEED,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prefill": way.prefill,
        "segment_rows": way.segment_rows,
    }
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None, trust_env=False) as response:
            last = _last_chunk(response, progress)
    except httpx.HTTPError as error:
        raise IsobitError(f"the server stopped answering: {error}") from None
    usage, isobit = last["usage"], last["isobit"]
    timings = isobit["timings"]
    return Run(
        prefill=way.prefill,
        segment_rows=isobit["segment_rows"],
        prompt_tokens=usage["prompt_tokens"],
        reply_tokens=usage["completion_tokens"],
        first_token=timings["first_token"],
        prompt_rate=timings["prompt_rate"],
        reply_rate=timings["reply_rate"],
        token_hash=isobit["token_hash"],
        logits_hash=isobit["logits_hash"],
    )


def _last_chunk(response: "httpx.Response", progress: Progress) -> dict[str, Any]:
    """Read a stream, telling `progress` of the prompt; the chunk with the usage."""
    last: dict[str, Any] = {}
    if response.is_error:
        response.read()
        raise IsobitError(f"the server refused: {response.json()['error']['message']}")
    for line in response.iter_lines():
        if line.startswith(": prompt "):
            done, total = line.removeprefix(": prompt ").split("/")
            progress(int(done), int(total))
        elif line.startswith("data: {"):
            last = json.loads(line.removeprefix("data: "))
            if "error" in last:
                raise IsobitError(f"the server failed: {last['error']['message']}")
    if not last.get("usage"):
        raise IsobitError("the server ended the reply early")
    return last


def _report(runs: list[Run], equal: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"One prompt of {runs[0].prompt_tokens:,} tokens, computed in three ways")
    table.add_column("prompt")
    for name in ("rows a forward", "first token", "prompt tokens/s", "reply tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("token hash")
    table.add_column("logits SHA-256")
    for run in runs:
        table.add_row(
            run.prefill,
            f"{run.segment_rows:,}",
            f"{run.first_token:.2f} s",
            f"{run.prompt_rate:,.0f}",
            f"{run.reply_rate:,.0f}",
            run.token_hash[:SHOWN],
            run.logits_hash[:SHOWN],
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    for run in runs[:1] if equal else runs:
        console.print(f"token hash      {run.token_hash}", soft_wrap=True)
        console.print(f"logits SHA-256  {run.logits_hash}", soft_wrap=True)
    serial, deep = (next(run for run in runs if run.prefill == prefill) for prefill in ("serial", "deep"))
    console.print(f"Deep computed the prompt {deep.prompt_rate / serial.prompt_rate:.1f} times as fast as row by row.")
    verdict = EQUAL.format(tokens=runs[0].reply_tokens) if equal else UNEQUAL
    console.print(verdict, style="green" if equal else "bold red", soft_wrap=True)
