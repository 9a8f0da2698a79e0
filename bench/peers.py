"""isobit beside exllamav3 on one checkpoint folder in one run: `python bench/peers.py DIR [--rounds R] [--json]`.

Each engine runs in a process of its own, one after the other, in turns, with the same token ids: prompts to the first
token, and decoding of given tokens (1 and 4 streams, no drafts), greedy sampling and its way to the host included.
Medians in milliseconds, and the medians of each round's ratios. DIR: an EXL3 folder, such as `isobit synth` writes.
Exit code 1 if an engine failed, 2 if exllamav3 is not there (--only isobit does without it).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

import peer_exllamav3

ENGINES = ("isobit", "exllamav3")
PROMPTS = (3001, 6144, 12001, 256)  # tokens
CONTEXTS = (256, 4096)  # tokens
LANES = (1, 4)
WARM_UP_STEPS = 8


class Engine(Protocol):
    """What is measured of an engine; tokens are drawn greedily and come to the host."""

    version: str

    def open(self, prompts: Sequence[Sequence[int]], room: int = 1) -> list[int]: ...

    def step(self, tokens: Sequence[int]) -> list[int]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Work:
    """What to measure. prompts, contexts: tokens; lanes: streams at once; vocabulary: token ids are below it."""

    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    lanes: tuple[int, ...]
    steps: int
    repeats: int
    vocabulary: int

    @property
    def rows(self) -> int:
        """The most rows that streams have together."""
        reply = WARM_UP_STEPS + self.steps + 1
        return max([*(n + 1 for n in self.prompts), *(max(self.lanes) * (n + reply) for n in self.contexts)])

    def tokens(self, count: int, stream: int) -> list[int]:
        """Token ids that depend on nothing but these numbers."""
        return np.random.default_rng((count, stream)).integers(0, self.vocabulary, count).tolist()


def measure(engine: Engine, work: Work) -> dict:
    """Milliseconds by what was measured, in order, and the first token of every prompt."""
    times: dict[str, float] = {}
    first_tokens: dict[str, int] = {}
    for count in work.prompts:
        prompt = [work.tokens(count, 0)]
        first_tokens[str(count)] = engine.open(prompt)[0]
        times[f"prompt of {count:,} tokens"] = median_ms([lambda prompt=prompt: engine.open(prompt)] * work.repeats)
    for context in work.contexts:
        for lanes in work.lanes:
            room = WARM_UP_STEPS + work.steps
            engine.open([work.tokens(context, lane) for lane in range(lanes)], room)
            fed = [work.tokens(room, lane) for lane in range(lanes)]
            steps = [lambda row=row: engine.step(row) for row in zip(*fed, strict=True)]
            for step in steps[:WARM_UP_STEPS]:
                step()
            what = f"decode at {context:,} tokens, {lanes} stream{'s' if lanes > 1 else ''}"
            times[what] = median_ms(steps[WARM_UP_STEPS:])
    engine.close()
    return {"version": engine.version, "ms": times, "first_tokens": first_tokens}


def median_ms(actions: Iterable[Callable[[], object]]) -> float:
    times = []
    for action in actions:
        begin = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def run_engine(name: str, folder: Path, work: Work, device: str) -> dict:
    """Load one engine in this process and measure it."""
    begin = time.perf_counter()
    engine: Engine
    if name == "isobit":
        from peer_isobit import Isobit

        engine = Isobit(folder, work.rows, max(work.lanes), device)
    else:
        engine = peer_exllamav3.Exllamav3(folder, work.rows, max(work.lanes))
    loaded = time.perf_counter() - begin
    return {**measure(engine, work), "load_seconds": loaded}


def in_own_process(name: str, arguments: list[str]) -> dict | str:
    """What `run_engine` found, or in one line why it could not."""
    with tempfile.TemporaryDirectory() as kept:
        result = Path(kept) / "result.json"
        command = [sys.executable, __file__, *arguments, "--engine", name, "--result", str(result)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode == 0:
            return json.loads(result.read_text())
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    return f"{name} ended with code {ended.returncode}: {said[-1] if said else 'it said nothing'}"


def compared(rounds: list[dict[str, dict]]) -> dict:
    """Of each measurement: medians of milliseconds by engine, and exllamav3's over isobit's of each round."""
    names = list(rounds[0])
    table = {}
    for what in rounds[0][names[0]]["ms"]:
        by_engine = {name: [found[name]["ms"][what] for found in rounds] for name in names}
        row: dict[str, float | None] = {name: statistics.median(times) for name, times in by_engine.items()}
        row["ratio"] = None
        if len(names) == 2:
            row["ratio"] = statistics.median(b / a for a, b in zip(*by_engine.values(), strict=True))
        table[what] = row
    firsts = [found[name]["first_tokens"] for found in rounds for name in names]
    agreeing = sum(all(first[prompt] == firsts[0][prompt] for first in firsts) for prompt in firsts[0])
    versions = {name: rounds[0][name]["version"] for name in names}
    loads = {name: statistics.median(found[name]["load_seconds"] for found in rounds) for name in names}
    return {
        "versions": versions,
        "rounds": len(rounds),
        "load_seconds": loads,
        "ms": table,
        "same_first_token": f"{agreeing}/{len(firsts[0])}",
    }


def show(result: dict) -> None:
    names = list(result["versions"])
    titles = "".join(f"{name + ' ' + result['versions'][name]:>20}" for name in names)
    print(f"{'milliseconds':36}{titles}" + ("   ratio" if len(names) == 2 else ""))
    for what, row in result["ms"].items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.2f}"
        print(f"{what:36}" + "".join(f"{row[name]:20.2f}" for name in names) + ratio)
    print(f"{'loading, seconds':36}" + "".join(f"{result['load_seconds'][name]:20.1f}" for name in names))
    if len(names) == 2:
        print(
            f"the same first token after {result['same_first_token']} prompts; rounds: {result['rounds']}", flush=True
        )


def main() -> int:
    options = parsed()
    if not (options.folder / "config.json").is_file():
        print(f"{options.folder}: no checkpoint folder, it has no config.json", file=sys.stderr)
        return 2
    work = Work(
        tuple(options.prompts),
        tuple(options.contexts),
        tuple(options.lanes),
        options.steps,
        options.repeats,
        vocabulary_of(options.folder),
    )
    if options.engine:
        found = run_engine(options.engine, options.folder, work, options.device)
        options.result.write_text(json.dumps(found))
        return 0
    names = [options.only] if options.only else list(ENGINES)
    lacking = peer_exllamav3.what_lacks(options.folder) if "exllamav3" in names else None
    if lacking:
        print(f"{lacking}; or measure --only isobit", file=sys.stderr)
        return 2
    return compare(names, options, sys.argv[1:])


def compare(names: list[str], options: argparse.Namespace, arguments: list[str]) -> int:
    """Rounds of all engines in turn; what was measured is shown at once, what failed is said and left out."""
    rounds: list[dict[str, dict]] = []
    failed = False
    for _ in range(options.rounds):
        found: dict[str, dict] = {}
        for name in list(names):
            one = in_own_process(name, arguments)
            if isinstance(one, str):
                print(one, file=sys.stderr, flush=True)
                names.remove(name)
                failed = True
            else:
                found[name] = one
                if len(names) > 1 and not options.json:
                    # The next engine may take longer than whoever waits.
                    show(compared([{name: one}]))
        rounds = [{name: earlier[name] for name in names} for earlier in (*rounds, found)]
        if names and not options.json:
            show(compared(rounds))
    if names and options.json:
        print(json.dumps(compared(rounds)))
    return int(failed)


def vocabulary_of(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, metavar="TOKENS")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--lanes", type=int, nargs="+", default=LANES, metavar="STREAMS")
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens of each stream (default 32)")
    parser.add_argument("--repeats", type=int, default=3, help="of each prompt in each round (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of the engines (default 2)")
    parser.add_argument("--only", choices=ENGINES, help="measure one engine alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="isobit's (default cuda)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
