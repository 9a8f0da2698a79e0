"""What a forward of few rows takes: `python bench/decode.py [FOLDER] [--window] [--repeats R] [--json]`.

One thread, processor time, row counts in turn: lanes of one row each, or with --window one lane's window of drafts, of
which one row is kept. Step by step and replayed, in microseconds (medians), and the medians of each repeat's ratios to
one row. Then the dearest ops of the forwards run step by step. FOLDER: a checkpoint; without it the demo's.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from isobit.checkpoint.opening import open_checkpoint
from isobit.cli.demo_checkpoint import demo_checkpoint
from isobit.model.flash_next import FlashNext
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import StatePool, Stream
from isobit.ops import load_ops, set_threads
from op_times import Calls, timed

ROW_COUNTS = (1, 2, 3, 4, 8)
PROMPT = 96  # tokens
CONTEXT = 4096
SHOWN_OPS = 8
WARM_UP = 3  # repeats that do not count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint (default: the demo's)")
    parser.add_argument("--window", action="store_true", help="rows of one lane instead of one row of each lane")
    parser.add_argument("--repeats", type=int, default=60, help="forwards of each kind (default 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    set_threads(1)
    ops = load_ops("cpu")
    model = load_model(open_checkpoint(options.folder or demo_checkpoint()), ops, CONTEXT)
    result = measure(model, options.window, options.repeats)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def measure(model: FlashNext, window: bool, repeats: int) -> dict:
    """Microseconds by way, row count and, step by step, op."""
    forwards = {rows: Forwards(model, rows, window) for rows in ROW_COUNTS}
    functions = {name: f for name, f in vars(model.ops).items() if callable(f) and not name.startswith("prepare")}
    calls: Calls = []
    timed_functions = {name: timed(name, function, calls) for name, function in functions.items()}
    times: dict[str, dict[int, list[float]]] = {way: defaultdict(list) for way in ("step by step", "replayed")}
    of_calls: dict[int, list[Calls]] = defaultdict(list)
    for _ in range(WARM_UP + repeats):
        for rows, forward in forwards.items():
            for way, seconds in times.items():
                model.ops.passes.enabled = way == "replayed"
                seconds[rows].append(forward.run())
            model.ops.passes.enabled = False
            vars(model.ops).update(timed_functions)
            calls.clear()
            forward.run()
            of_calls[rows].append(list(calls))
            vars(model.ops).update(functions)
    counted = {way: {rows: s[WARM_UP:] for rows, s in of_rows.items()} for way, of_rows in times.items()}
    return {
        "microseconds": {way: {r: 1e6 * statistics.median(s) for r, s in c.items()} for way, c in counted.items()},
        "to_one_row": {way: {r: ratio(s, c[1]) for r, s in c.items()} for way, c in counted.items()},
        "microseconds_of_ops": {rows: costs(runs[WARM_UP:]) for rows, runs in of_calls.items()},
    }


class Forwards:
    """Forwards of so many rows after a prompt: lanes of one row each, or one lane's window, settled to one row."""

    def __init__(self, model: FlashNext, rows: int, window: bool):
        self.model, self.window, self.rows = model, window, rows
        self.rng = np.random.default_rng(rows)
        lanes = 1 if window else rows
        self.state: StatePool = model.new_state(lanes, lanes * CONTEXT // 64)
        self.streams: list[Stream] = [self.state.open() for _ in range(lanes)]
        for stream in self.streams:
            model.forward(self.state, Plan((Segment(stream, self._tokens(PROMPT)),)))

    def run(self) -> float:
        """Seconds of processor time."""
        drafts = self.window and self.rows > 1
        tokens = [self._tokens(self.rows if self.window else 1) for _ in self.streams]
        begin = time.thread_time()
        pairs = zip(self.streams, tokens, strict=True)
        plan = Plan(tuple(Segment(stream, some, "all", journal=drafts) for stream, some in pairs))
        self.model.forward(self.state, plan)
        if drafts:
            self.state.settle(self.streams[0], 1)
        return time.thread_time() - begin

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, self.model.config.vocab_size, count).tolist())


def ratio(seconds: list[float], one_row: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, one_row, strict=True))


def costs(runs: list[Calls]) -> dict[str, float]:
    """Microseconds of each op in a forward, medians call by call, the dearest first."""
    of_ops: dict[str, float] = defaultdict(float)
    for (name, _), seconds in zip(runs[0], np.median([[s for _, s in run] for run in runs], axis=0), strict=True):
        of_ops[name] += 1e6 * float(seconds)
    return dict(sorted(of_ops.items(), key=lambda item: -item[1]))


def show(result: dict) -> None:
    def line(label: str, values: dict[int, float], digits: int) -> None:
        print(f"{label:30}" + "".join(f"{values[rows]:9.{digits}f}" for rows in ROW_COUNTS))

    print(f"{'rows':30}" + "".join(f"{rows:9}" for rows in ROW_COUNTS))
    for way, values in result["microseconds"].items():
        line(f"{way}, microseconds", values, 0)
        line("  to one row", result["to_one_row"][way], 2)
    of_ops = result["microseconds_of_ops"]
    for name in list(of_ops[1])[:SHOWN_OPS]:
        line(f"  {name}", {rows: of_ops[rows].get(name, 0.0) for rows in ROW_COUNTS}, 0)


if __name__ == "__main__":
    sys.exit(main())
