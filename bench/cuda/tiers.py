"""Kept states between this GPU and the host's memory: `python bench/cuda/tiers.py [--layers 48] [--rows 6144]`.

How long the engine's thread is held when a state leaves the device and when it is fetched back, after how long the
copies are done, when its first token is there, and what the rounds of three other lanes take meanwhile. Medians in
milliseconds. Real widths, weights made in memory. Exit code 1 when a state comes back with other bytes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from isobit.checkpoint.synth_memory import SyntheticCheckpoint
from isobit.engine.prompt_cache import PromptCache
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import Stream, pages_for
from isobit.ops import load_ops
from isobit.ops.sample import Draw

OTHERS = 3
OTHER_ROWS = 256
SEGMENT = 8192
DEVICE_CACHE, HOST_CACHE = 8 << 30, 4 << 30


class Lab:
    """A model, and one prompt's state that moves between the tiers."""

    def __init__(self, preset: str, layers: int | None, rows: int, repeats: int):
        most_others = OTHER_ROWS + 100 * repeats + 64
        context = max(rows, most_others) + 64
        self.model = load_model(SyntheticCheckpoint(preset, layers=layers), load_ops("cuda"), context)
        pages = 2 * pages_for(rows) + OTHERS * pages_for(most_others) + 4
        self.state = self.model.new_state(slots=OTHERS + 1, pages=pages)
        self.cache = PromptCache(self.state, DEVICE_CACHE, None, HOST_CACHE)
        self.rng = np.random.default_rng(0)
        self.tokens = self.random_tokens(rows)
        stream = self.prefill(self.tokens)
        self.cache.keep(self.tokens, stream)
        self.digest = self.state.digest(stream)
        self.state.close(stream)
        assert self.cache.host is not None
        self.host = self.cache.host
        # The first eviction tells how much memory states take; it comes beside the rounds.
        while not self.host.path(self.tokens):
            self.cache.evict_all()
            self.host.memory.settle()
            if not self.host.path(self.tokens):
                self.keep_again()

    def random_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, self.model.config.vocab_size, count).tolist())

    def prefill(self, tokens: tuple[int, ...]) -> Stream:
        stream = self.state.open()
        for first in range(0, len(tokens), SEGMENT):
            self.model.forward(self.state, Plan((Segment(stream, tokens[first : first + SEGMENT], "none"),)))
        return stream

    def keep_again(self) -> None:
        stream = self.prefill(self.tokens)
        self.cache.keep(self.tokens, stream)
        self.state.close(stream)

    def decode(self, streams: list[Stream]) -> None:
        """One row of each stream, to the tokens that are drawn."""
        plan = Plan(
            tuple(Segment(stream, (int(self.rng.integers(self.model.config.vocab_size)),)) for stream in streams)
        )
        logits = self.model.forward(self.state, plan)
        draws = [Draw(seed=1, position=stream.rows) for stream in streams]
        self.model.ops.to_host(self.model.ops.sample(logits, draws).tokens)

    def leave(self) -> Callable[[], bool]:
        """Begin to take the state off the device; whether it has left."""
        self.cache.evict_all()
        (state,) = self.host.path(self.tokens)
        return state.arrival.arrived

    def fetch(self) -> Stream:
        """Begin to bring the state back; its stream."""
        hit = self.cache.lookup((*self.tokens, 0))
        assert hit is not None
        return self.cache.restore(hit)

    def forget_on_host(self) -> None:
        """Have the next eviction copy again."""
        for state in self.host.path(self.tokens):
            self.host.drop(state)


def milliseconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0)


def alone(lab: Lab, repeats: int) -> Iterator[tuple[str, float]]:
    """What one state takes on its way, and its first token from the host and from the device."""
    stream = lab.fetch()
    for _ in range(repeats):
        lab.decode([stream])
        lab.state.close(stream)
        lab.forget_on_host()
        start = time.perf_counter()
        left = lab.leave()
        yield "leaving: the thread is held", 1e3 * (time.perf_counter() - start)
        until(left)
        yield "leaving: copies done", 1e3 * (time.perf_counter() - start)
        start = time.perf_counter()
        stream = lab.fetch()
        yield "fetching: the thread is held", 1e3 * (time.perf_counter() - start)
        lab.decode([stream])
        yield "fetching: first token", 1e3 * (time.perf_counter() - start)
        lab.state.close(stream)
        start = time.perf_counter()
        stream = lab.fetch()
        lab.decode([stream])
        yield "from the device: first token", 1e3 * (time.perf_counter() - start)
    lab.state.close(stream)


def beside_others(lab: Lab, repeats: int) -> Iterator[tuple[str, float]]:
    """Rounds of other lanes: undisturbed, and while the state leaves and is fetched."""
    others = [lab.prefill(lab.random_tokens(OTHER_ROWS)) for _ in range(OTHERS)]

    def round_of_others() -> None:
        lab.decode(others)

    for _ in range(4):
        round_of_others()
    for _ in range(repeats):
        for _ in range(10):
            yield "round of three others, undisturbed", milliseconds(round_of_others)
        lab.forget_on_host()
        left = lab.leave()
        yield "round of three others, a state leaving", milliseconds(round_of_others)
        until(left)
        stream = lab.fetch()
        yield "round of three others, a state being fetched", milliseconds(round_of_others)
        until(stream.arrival.arrived)
        lab.state.close(stream)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of the preset; all by default")
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--preset", default="full")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    lab = Lab(arguments.preset, arguments.layers, arguments.rows, arguments.repeats)
    stream = lab.fetch()
    equal = lab.state.digest(stream) == lab.digest
    lab.state.close(stream)
    print(f"a state of {arguments.rows} rows, {lab.host.nbytes / 2**20:.1f} MiB: equal bytes: {equal}", flush=True)
    times: dict[str, list[float]] = {}
    for measure in (alone, beside_others):
        for what, ms in measure(lab, arguments.repeats):
            times.setdefault(what, []).append(ms)
    for what, measured in times.items():
        worst = max(measured)
        print(
            f"{what:50} {statistics.median(measured):10.2f} ms, at most {worst:10.2f}, of {len(measured)}", flush=True
        )
    stream = lab.fetch()
    equal = equal and lab.state.digest(stream) == lab.digest
    print(f"equal bytes at the end: {equal}")
    lab.cache.close()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
