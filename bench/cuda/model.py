"""Speed of the whole model on this GPU: `python bench/cuda/model.py [--layers 48] [--quick] [--profile]`.

Real widths, experts 3 bits, rest 4, head 5; weights are made in memory. Medians of repeats, in milliseconds, beside the
time that the bytes or operations take at the card's measured rates. --profile adds the GPU time of each kernel.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from timing import COPY_RATE, TENSOR_RATE, wall_milliseconds

from isobit.checkpoint.synth_memory import SyntheticCheckpoint
from isobit.cuda import kernels
from isobit.model.flash_next import FlashNext
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import StatePool, Stream, pages_for
from isobit.ops import load_ops
from isobit.ops.sample import Draw

DENSE_MACS = 6.0e9 / 48  # of a token and layer
CONTEXT = 12_288


class Lab:
    def __init__(self, layers: int):
        start = time.monotonic()
        self.model: FlashNext = load_model(SyntheticCheckpoint("full", layers=layers), load_ops("cuda"), CONTEXT)
        torch.cuda.synchronize()
        self.load_seconds = time.monotonic() - start
        self.state: StatePool = self.model.new_state(slots=8, pages=5 * pages_for(CONTEXT))
        self.rng = np.random.default_rng(0)
        self.launch_ms: list[float] = []  # of each decoded round, what the host takes until all of it is launched

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, self.model.config.vocab_size, count).tolist())

    def prefill(self, tokens: tuple[int, ...], segment: int) -> Stream:
        stream = self.state.open()
        for first in range(0, len(tokens), segment):
            plan = Plan((Segment(stream, tokens[first : first + segment]),))
            _, samples = self.model.draw(self.state, plan, [Draw(position=len(tokens))])
        self.model.ops.samples_to_host(samples)
        return stream

    def decode(self, streams: list[Stream]) -> None:
        start = time.perf_counter()
        plan = Plan(tuple(Segment(stream, (int(self.rng.integers(1000)),)) for stream in streams))
        draws = [Draw(seed=1, position=stream.rows + 1) for stream in streams]
        _, samples = self.model.draw(self.state, plan, draws)
        self.launch_ms.append(1e3 * (time.perf_counter() - start))
        self.model.ops.samples_to_host(samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--early", action="store_true", help="decode once more with kernels that begin early")
    parser.add_argument("--segment", type=int, default=8192)
    parser.add_argument("--after", type=Path, help="load at once, but measure only when this file exists")
    arguments = parser.parse_args()
    lab = Lab(arguments.layers)
    print(f"loaded {torch.cuda.memory_allocated() / 1e9:.1f} GB in {lab.load_seconds:.1f} s", flush=True)
    while arguments.after and not arguments.after.exists():
        time.sleep(0.5)
    results: list[dict] = []

    def note(what: str, ms: float, floor_ms: float) -> None:
        results.append({"what": what, "ms": ms, "floor_ms": floor_ms})
        print(f"{what:50} {ms:10.2f} ms   floor {floor_ms:8.2f}   x{ms / floor_ms:.1f}", flush=True)

    repeats = 2 if arguments.quick else 5
    for count in (6144,) if arguments.quick else (3001, 6144, 12001, 100, 256, 1024):
        tokens = lab.tokens(count)

        def run(segment: int, tokens: tuple[int, ...] = tokens) -> None:
            lab.state.close(lab.prefill(tokens, segment))

        floor = 2e3 * DENSE_MACS * arguments.layers * count / TENSOR_RATE
        run(arguments.segment)
        note(
            f"prompt {count}, segments of {arguments.segment}",
            wall_milliseconds(lambda: run(arguments.segment), repeats),
            floor,
        )
        if count == 6144:
            run(64)
            note(f"prompt {count}, batched", wall_milliseconds(lambda: run(64), 1), floor)
    weight_bytes = 4.2e9 / 48 * arguments.layers
    for early in (False, True) if arguments.early else (kernels.EARLY_IN_GRAPHS,):
        lab.model.ops.passes.release()
        with patch.object(kernels, "EARLY_IN_GRAPHS", early):
            decoding(lab, ", early kernels" if early else "", 1e3 * weight_bytes / COPY_RATE, note)
    stream = lab.prefill(lab.tokens(6144), 8192)
    kept = lab.state.save(stream)

    def resume() -> None:
        resumed = lab.state.restore(kept)
        lab.decode([resumed])
        lab.state.close(resumed)

    resume()
    resume()
    note("resume of a prompt of 6144", wall_milliseconds(resume, 10), 1e3 * weight_bytes / COPY_RATE)
    if arguments.profile:
        profile(lab, stream)
    print(json.dumps(results))
    return 0


def decoding(lab: Lab, how: str, floor_ms: float, note: Callable[[str, float, float], None]) -> None:
    """A row of each of one and of four streams, after short and long texts."""
    for count in (256, 4096):
        streams = [lab.prefill(lab.tokens(count), 8192) for _ in range(4)]
        for lanes in (1, 4):
            for _ in range(4):
                lab.decode(streams[:lanes])
            lab.launch_ms.clear()
            took = wall_milliseconds(partial(lab.decode, streams[:lanes]), 20)
            note(f"decode, {lanes} streams at {count}{how}", took, floor_ms)
            print(f"    of it the host, until all is launched: {statistics.median(lab.launch_ms):.2f} ms", flush=True)
        for stream in streams:
            lab.state.close(stream)


def profile(lab: Lab, stream: Stream) -> None:
    """GPU time by kernel of one prompt segment and one decoded row, run step by step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    lab.model.ops.passes.enabled = False
    tokens = lab.tokens(6144)
    actions = {"prompt 6144": lambda: lab.state.close(lab.prefill(tokens, 8192)), "row": lambda: lab.decode([stream])}
    for name, action in actions.items():
        action()
        with torch_profile(activities=[ProfilerActivity.CUDA]) as trace:
            action()
            torch.cuda.synchronize()
        print(name)
        rows = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)
        for row in rows[:40]:
            print(f"  {row.self_device_time_total / 1e3:9.3f} ms {row.count:6}  {row.key[:90]}")


if __name__ == "__main__":
    sys.exit(main())
