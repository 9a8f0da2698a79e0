"""Speed of the whole model on this GPU: `python bench/cuda/model.py [--layers 48] [--quick] [--profile]`.

Of long texts: `--prompts 32768 131072 --contexts 131072`; of many streams: `--lanes 8 16`.

Real widths, experts 3 bits, rest 4, head 5; weights are made in memory. Medians of repeats, in milliseconds, beside the
time that the bytes or operations take at the card's measured rates. --profile adds the GPU time of each kernel.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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
PROMPTS = (3001, 6144, 12001, 100, 256, 1024)
BATCHED_PROMPT = RESUMED_PROMPT = 6144
CONTEXTS = (256, 4096)  # that rows are decoded after
LANES = (1, 4)  # streams of which a row each is decoded at a time
FIRST_ROUNDS, ROUNDS = 4, 20  # of decoding: what is captured and forgotten, and what is measured


class Lab:
    def __init__(self, layers: int, context: int, pages: int, streams: int):
        """context: the most rows of a stream; pages: of all streams at a time."""
        start = time.monotonic()
        self.model: FlashNext = load_model(SyntheticCheckpoint("full", layers=layers), load_ops("cuda"), context)
        torch.cuda.synchronize()
        self.load_seconds = time.monotonic() - start
        self.state: StatePool = self.model.new_state(streams, pages)
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
        plan = Plan(tuple(Segment(stream, self.tokens(1)) for stream in streams))
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
    parser.add_argument("--prompts", type=int, nargs="+", metavar="TOKENS", help=f"default {PROMPTS}")
    parser.add_argument("--contexts", type=int, nargs="+", metavar="TOKENS", default=CONTEXTS, help="of decoding")
    parser.add_argument("--lanes", type=int, nargs="+", metavar="STREAMS", default=LANES, help="of decoding")
    parser.add_argument("--after", type=Path, help="load at once, but measure only when this file exists")
    arguments = parser.parse_args()
    prompts = arguments.prompts or ((BATCHED_PROMPT,) if arguments.quick else PROMPTS)
    lanes, decoded_rows = max(arguments.lanes), len(arguments.lanes) * (FIRST_ROUNDS + ROUNDS)
    decoded, longest = max(arguments.contexts) + decoded_rows, max(*prompts, RESUMED_PROMPT)
    pages = max(lanes * pages_for(decoded), pages_for(longest)) + 2 * pages_for(RESUMED_PROMPT + decoded_rows)
    lab = Lab(arguments.layers, max(longest, decoded, RESUMED_PROMPT + decoded_rows), pages, lanes + 2)
    print(f"loaded {torch.cuda.memory_allocated() / 1e9:.1f} GB in {lab.load_seconds:.1f} s", flush=True)
    while arguments.after and not arguments.after.exists():
        time.sleep(0.5)
    results: list[dict] = []

    def note(what: str, ms: float, floor_ms: float) -> None:
        results.append({"what": what, "ms": ms, "floor_ms": floor_ms})
        print(f"{what:50} {ms:10.2f} ms   floor {floor_ms:8.2f}   x{ms / floor_ms:.1f}", flush=True)

    repeats = 2 if arguments.quick else 5
    for count in prompts:
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
        if count == BATCHED_PROMPT:
            run(64)
            note(f"prompt {count}, batched", wall_milliseconds(lambda: run(64), 1), floor)
    weight_bytes = 4.2e9 / 48 * arguments.layers
    for early in (False, True) if arguments.early else (kernels.EARLY_IN_GRAPHS,):
        lab.model.ops.passes.release()
        with patch.object(kernels, "EARLY_IN_GRAPHS", early):
            how = ", early kernels" if early else ""
            for count in arguments.contexts:
                decoding(lab, count, arguments.lanes, how, 1e3 * weight_bytes / COPY_RATE, note)
    stream = lab.prefill(lab.tokens(RESUMED_PROMPT), 8192)
    kept = lab.state.save(stream)

    def resume() -> None:
        resumed = lab.state.restore(kept)
        lab.decode([resumed])
        lab.state.close(resumed)

    resume()
    resume()
    note(f"resume of a prompt of {RESUMED_PROMPT}", wall_milliseconds(resume, 10), 1e3 * weight_bytes / COPY_RATE)
    if arguments.profile:
        profile(lab, max(arguments.prompts or [RESUMED_PROMPT]), stream)
    print(json.dumps(results))
    return 0


def decoding(
    lab: Lab, count: int, lanes: Sequence[int], how: str, floor_ms: float, note: Callable[[str, float, float], None]
) -> None:
    """A row of each of some streams, after texts of so many tokens."""
    streams = [lab.prefill(lab.tokens(count), 8192) for _ in range(max(lanes))]
    for together in lanes:
        for _ in range(FIRST_ROUNDS):
            lab.decode(streams[:together])
        lab.launch_ms.clear()
        took = wall_milliseconds(partial(lab.decode, streams[:together]), ROUNDS)
        note(f"decode, {together} streams at {count}{how}", took, floor_ms)
        print(f"    of it the host, until all is launched: {statistics.median(lab.launch_ms):.2f} ms", flush=True)
    for stream in streams:
        lab.state.close(stream)


def profile(lab: Lab, count: int, stream: Stream) -> None:
    """GPU time by kernel of a prompt of so many tokens and one decoded row, run step by step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    lab.model.ops.passes.enabled = False
    tokens = lab.tokens(count)
    actions = {
        f"prompt {count}": lambda: lab.state.close(lab.prefill(tokens, 8192)),
        "row": lambda: lab.decode([stream]),
    }
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
