"""Speed of the linear op beside NumPy's float32 product: `python bench/linear.py [--bits B] [--threads T] [--json]`.

Prints, for a random EXL3 layer: the many-row product, tile decoding and rotations included, as a ratio to NumPy's `@`
of the same shape (medians of alternating runs; NumPy uses the threads it was started with); values decoded and
multiplied a second for one row; the time a row takes at growing row counts, which should fall steadily; and at few rows
the panels' time as a ratio to row by row. Exit code 1 if the first ratio or the one-row speed misses its limit.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from isobit.ops import set_threads, threads
from isobit.ops.linear.contract import random_trellis
from isobit.ops.linear.cpu import IN_PANELS, ROW_BY_ROW, linear, prepare_linear

RATIO_LIMIT = 0.8  # of NumPy's speed
VALUES_LIMIT = 0.8e9  # a second, for one row on two cores
PAUSE = 0.3  # seconds after which NumPy's threads no longer spin on a core that others need
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, default=3, help="width of the layer (default 3)")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the many-row product (default 1024)")
    parser.add_argument("--inputs", type=int, default=2560)
    parser.add_argument("--outputs", type=int, default=2560)
    parser.add_argument("--threads", type=int, default=threads(), help="threads of isobit's kernels")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each (default 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    set_threads(options.threads)
    result = measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["ratio_to_numpy"] >= RATIO_LIMIT and result["values_a_second"] >= VALUES_LIMIT else 1


def measure(options: argparse.Namespace) -> dict:
    rng = np.random.default_rng(1)
    k, n = options.inputs, options.outputs
    bits = int(options.bits) if options.bits == int(options.bits) else options.bits
    handle = prepare_linear(random_trellis(rng, k, n, "mul1", bits))
    x = rng.standard_normal((options.rows, k)).astype(np.float32)
    matrix = rng.standard_normal((k, n)).astype(np.float32)
    numpy_time, many_time = medians([lambda: x @ matrix, lambda: linear(x, handle)], options.repeats, PAUSE)
    a_row = {
        rows: medians([lambda rows=rows: linear(x[:rows], handle)], 3 * options.repeats)[0] / rows
        for rows in ROW_COUNTS
    }
    few = {}
    for rows in ROW_COUNTS[1:5]:
        ways = [lambda how=how, rows=rows: linear(x[:rows], handle, how) for how in (ROW_BY_ROW, IN_PANELS)]
        one_by_one, panels = medians(ways, 3 * options.repeats)
        few[rows] = panels / one_by_one
    return {
        "shape": [options.rows, k, n],
        "bits": bits,
        "threads": threads(),
        "ratio_to_numpy": numpy_time / many_time,
        "gflops": 2 * options.rows * k * n / many_time / 1e9,
        "values_a_second": k * n / a_row[1],
        "microseconds_a_row": {rows: 1e6 * seconds for rows, seconds in a_row.items()},
        "panels_to_row_by_row": few,
    }


def medians(calls: list[Callable[[], object]], repeats: int, pause: float = 0.0) -> list[float]:
    """Median seconds of each call, the calls taking turns, `pause` seconds apart; the first turn is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, seconds in zip(calls, times, strict=True):
            time.sleep(pause)
            start = time.perf_counter()
            call()
            if turn:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def show(result: dict) -> None:
    rows, k, n = result["shape"]
    print(f"{k} x {n}, {result['bits']} bits, {result['threads']} threads")
    ratio = f"{result['ratio_to_numpy']:.2f} of NumPy's speed (limit {RATIO_LIMIT})"
    print(f"{rows} rows: {ratio}, {result['gflops']:.0f} GFLOP/s")
    print(f"1 row: {result['values_a_second'] / 1e9:.2f} G values a second (limit {VALUES_LIMIT / 1e9})")
    for count, microseconds in result["microseconds_a_row"].items():
        ratio = result["panels_to_row_by_row"].get(count)
        beside = f"  panels take {ratio:.2f} of row by row" if ratio else ""
        print(f"{count:4} rows: {microseconds:8.1f} us a row{beside}")


if __name__ == "__main__":
    sys.exit(main())
