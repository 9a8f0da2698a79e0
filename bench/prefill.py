"""Where a prompt row's time goes: `python bench/prefill.py [FOLDER] [--rows N] [--repeats R] [--json]`.

Runs one prompt through the model in segments of 1, 64 and 1,024 rows, on one thread, and prints each op's processor
time a row. A call counts with its least time over the repeats, so that a busy machine disturbs little. FOLDER: a
checkpoint; without it the demo's. Exit code 1 if deep is slower than 0.97 times batched. (`isobit bench prefill` gives
the speeds on all threads.)
"""

import argparse
import json
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
from isobit.model.state import StatePool
from isobit.ops import load_ops, set_threads
from isobit.ops.batch import PAGE_ROWS
from op_times import Calls, timed

SEGMENTS = {"serial": 1, "batched": 64, "deep": 1024}
BATCHED_LIMIT = 0.97
SERIAL_ROWS = 150  # of the prompt; a serial row costs about the same everywhere
ELSEWHERE = "between ops"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint (default: the demo's)")
    parser.add_argument("--rows", type=int, default=3000, help="rows of the prompt (default 3000)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    set_threads(1)
    calls: Calls = []
    ops = load_ops("cpu")
    model = load_model(open_checkpoint(options.folder or demo_checkpoint()), ops, options.rows + PAGE_ROWS)
    ops.passes.enabled = False
    for name, function in list(vars(ops).items()):
        if callable(function) and not name.startswith("prepare"):
            setattr(ops, name, timed(name, function, calls))
    costs = {mode: cost(model, mode, options, calls) for mode in SEGMENTS}
    totals = {mode: sum(of_ops.values()) for mode, of_ops in costs.items()}
    to_serial, to_batched = totals["serial"] / totals["deep"], totals["batched"] / totals["deep"]
    result = {"microseconds_a_row": costs, "deep_to_serial": to_serial, "deep_to_batched": to_batched}
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if to_batched >= BATCHED_LIMIT else 1


def cost(model: FlashNext, mode: str, options: argparse.Namespace, calls: Calls) -> dict[str, float]:
    """Microseconds a row of every op, the dearest first."""
    rows = min(options.rows, SERIAL_ROWS) if mode == "serial" else options.rows
    state = model.new_state(1, -(-rows // PAGE_ROWS) + 1)
    tokens = tuple(np.random.default_rng(0).integers(0, model.config.vocab_size, rows).tolist())
    run(model, state, tokens, SEGMENTS[mode])
    times, rests = [], []
    for _ in range(options.repeats):
        calls.clear()
        begin = time.thread_time()
        run(model, state, tokens, SEGMENTS[mode])
        times.append([seconds for _, seconds in calls])
        rests.append(time.thread_time() - begin - sum(times[-1]))
    of_ops: dict[str, float] = defaultdict(float, {ELSEWHERE: min(rests) / rows * 1e6})
    for (name, _), seconds in zip(calls, np.min(times, axis=0), strict=True):
        of_ops[name] += float(seconds) / rows * 1e6
    return dict(sorted(of_ops.items(), key=lambda item: -item[1]))


def run(model: FlashNext, state: StatePool, tokens: tuple[int, ...], segment_rows: int) -> None:
    stream = state.open()
    for first in range(0, len(tokens), segment_rows):
        model.forward(state, Plan((Segment(stream, tokens[first : first + segment_rows]),)))
    state.close(stream)


def show(result: dict) -> None:
    costs = result["microseconds_a_row"]
    print(f"{'microseconds a row':20}" + "".join(f"{mode:>10}" for mode in costs))
    for name in costs["deep"]:
        print(f"{name:20}" + "".join(f"{of_ops.get(name, 0.0):10.1f}" for of_ops in costs.values()))
    print(f"{'all':20}" + "".join(f"{sum(of_ops.values()):10.1f}" for of_ops in costs.values()))
    print(f"deep is {result['deep_to_serial']:.1f} times as fast as serial")
    print(f"and {result['deep_to_batched']:.2f} times as fast as batched (limit {BATCHED_LIMIT:g})")


if __name__ == "__main__":
    sys.exit(main())
