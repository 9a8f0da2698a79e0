"""What the measurements of this folder share: times of actions on the GPU, the card's rates, and a line for each entry.

An entry is a dict: what, ms, floor_ms, and where it has them rate and checked.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

COPY_RATE = 4.3e12  # bytes a second
TENSOR_RATE = 7.0e14  # operations a second
FLOAT_LANES, CLOCK = 128, 1.75e9  # of a multiprocessor
GRAPH_REPEATS = 7

Action = Callable[[], object]
Entry = dict[str, Any]


def event_times(action: Action) -> float:
    """Milliseconds that the GPU takes for what one call of an action enqueues."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def milliseconds(action: Action, repeats: int = GRAPH_REPEATS) -> float:
    """Median milliseconds of an action on the GPU, called once before it is timed."""
    action()
    return statistics.median(event_times(action) for _ in range(repeats))


def graph_milliseconds(actions: Sequence[Action], rounds: int = 1) -> float:
    """Median milliseconds of one of the actions, run in turn so many times in a graph."""
    for action in actions:
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for action in actions:
                action()
    return milliseconds(graph.replay) / (rounds * len(actions))


def wall_milliseconds(action: Action, repeats: int) -> float:
    """Median milliseconds of an action on the clock, the host's share included; nothing is run before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def show(entries: Iterable[Entry]) -> None:
    """A line for each entry, as soon as it is there."""
    for entry in entries:
        line = f"{entry['what']:88} {entry['ms']:10.4f} ms   floor {entry['floor_ms']:9.4f}"
        print("   ".join([line, *(entry[part] for part in ("rate", "checked") if part in entry)]), flush=True)
