"""The promise at real widths on this GPU: every way of computing a prompt gives serial decoding's bytes.

`python bench/cuda/promise.py [--layers 8] [--tokens 3001 6144] [--kept 45] [--preset full]`: row by row, in batched
passes and deep at three segment sizes; the whole state at random rows, and every kept state resumed; four streams
together; windows of drafts of which the first rows are kept. Exit code 1 on any difference.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from isobit.checkpoint.synth_memory import SyntheticCheckpoint
from isobit.cuda import memory
from isobit.model.flash_next import FlashNext
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import StatePool, Stream, pages_for
from isobit.ops import load_ops

WAYS = {"batched": 64, "deep 512": 512, "deep 2048": 2048, "deep whole": 1 << 30}
REPLY = 24
WINDOW = 5


def hash_of(logits) -> str:
    return hashlib.sha256(np.ascontiguousarray(memory.to_host(logits)).tobytes()).hexdigest()


def cuts(rows: int, size: int, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Segments of at most `size` rows that also end at every kept row."""
    first = 0
    while first < rows:
        end = min([rows, first + size, *(row for row in kept if row > first)])
        yield first, end
        first = end


def prefill(model: FlashNext, state: StatePool, stream: Stream, tokens, size: int, kept, saved=None):
    """{row: digest of the state there} and the hash of the last row's logits."""
    digests = {}
    logits = None
    start = stream.rows
    for first, end in cuts(len(tokens) - start, size, [row - start for row in kept]):
        segment = tuple(tokens[start + first : start + end])
        logits = model.forward(state, Plan((Segment(stream, segment),)))
        if stream.rows in kept:
            digests[stream.rows] = state.digest(stream)
            if saved is not None:
                saved[stream.rows] = state.save(stream)
    return digests, hash_of(logits)


def reply(model: FlashNext, state: StatePool, stream: Stream, token: int, count: int) -> list[str]:
    """Logits hashes of greedy decoding, row by row."""
    hashes = []
    for _ in range(count):
        logits = model.forward(state, Plan((Segment(stream, (token,)),)))
        hashes.append(hash_of(logits))
        token = int(memory.to_host(logits)[0].argmax())
    return hashes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="full")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3001, 6144])
    parser.add_argument("--kept", type=int, default=45)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    start = time.monotonic()
    most = max(arguments.tokens) + 64
    ops = load_ops(arguments.device)
    model = load_model(SyntheticCheckpoint(arguments.preset, layers=arguments.layers), ops, context=most)
    print(f"loaded in {time.monotonic() - start:.1f} s", flush=True)
    rng = np.random.default_rng(1)
    failures = 0

    def check(what: str, equal: bool) -> None:
        nonlocal failures
        failures += not equal
        print(f"{'equal' if equal else 'DIFFERENT'}  {what}", flush=True)

    for count in arguments.tokens:
        tokens = rng.integers(0, model.config.vocab_size, count).tolist()
        kept = sorted({int(row) for row in rng.integers(1, count, arguments.kept * 2)})[: arguments.kept]
        state = model.new_state(slots=6, pages=3 * pages_for(most) * 4)
        stream = state.open()
        began = time.monotonic()
        oracle, last = prefill(model, state, stream, tokens, 1, kept)
        print(f"{count} tokens row by row: {time.monotonic() - began:.1f} s", flush=True)
        serial_reply = reply(model, state, stream, 7, REPLY)
        state.close(stream)
        saved: dict = {}
        for way, size in WAYS.items():
            stream = state.open()
            digests, found = prefill(model, state, stream, tokens, size, kept, saved if way == "deep 512" else None)
            wrong = [row for row in kept if digests[row] != oracle[row]]
            check(f"{count} tokens, {way}: {len(kept)} states, first wrong {wrong[:1]}", not wrong)
            check(f"{count} tokens, {way}: last logits", found == last)
            if way == "deep whole":
                check(
                    f"{count} tokens, {way}: {REPLY} rows decoded after it",
                    reply(model, state, stream, 7, REPLY) == serial_reply,
                )
            state.close(stream)
        wrong = []
        for row, kept_state in saved.items():
            stream = state.restore(kept_state)
            _, found = prefill(model, state, stream, tokens, 2048, [])
            wrong += [row] if found != last else []
            state.close(stream)
            state.drop(kept_state)
        check(f"{count} tokens: {len(saved)} kept states resumed, wrong {wrong}", not wrong)
        check(f"{count} tokens: four streams together", together(model, state, tokens, rng))
        check(f"{count} tokens: windows of which some rows are kept", windows(model, state, tokens, rng))
    print(f"{failures} differences, {time.monotonic() - start:.0f} s")
    return bool(failures)


def together(model: FlashNext, state: StatePool, tokens, rng) -> bool:
    """Four streams at different rows decode together as each does alone."""
    lengths = [int(n) for n in rng.integers(10, len(tokens), 4)]
    following = rng.integers(0, model.config.vocab_size, (8, 4)).tolist()
    alone, streams = [], []
    for lane, length in enumerate(lengths):
        stream = state.open()
        prefill(model, state, stream, tokens[:length], 2048, [])
        kept = state.save(stream)
        alone.append([hash_of(model.forward(state, Plan((Segment(stream, (row[lane],)),)))) for row in following])
        state.close(stream)
        streams.append(state.restore(kept))
        state.drop(kept)
    equal = True
    for step, row in enumerate(following):
        plan = Plan(tuple(Segment(stream, (token,)) for stream, token in zip(streams, row, strict=True)))
        logits = model.forward(state, plan)
        equal &= [hash_of(logits[lane : lane + 1]) for lane in range(4)] == [hashes[step] for hashes in alone]
    for stream in streams:
        state.close(stream)
    return equal


def windows(model: FlashNext, state: StatePool, tokens, rng) -> bool:
    """Rows fed in journaled windows, of which only some are kept, leave what single rows leave."""
    length = min(len(tokens), 700)
    stream, other = state.open(), state.open()
    prefill(model, state, stream, tokens[: length - 60], 2048, [])
    prefill(model, state, other, tokens[: length - 60], 2048, [])
    while stream.rows + WINDOW <= length:
        window = tokens[stream.rows : stream.rows + WINDOW]
        keep = int(rng.integers(1, WINDOW + 1))
        wrong = [*window[:keep], *[(token + 1) % model.config.vocab_size for token in window[keep:]]]
        model.forward(state, Plan((Segment(stream, tuple(wrong), "all", journal=True),)))
        state.settle(stream, keep)
    for token in tokens[other.rows : stream.rows]:
        model.forward(state, Plan((Segment(other, (token,)),)))
    equal = state.digest(stream) == state.digest(other)
    state.close(stream)
    state.close(other)
    return equal


if __name__ == "__main__":
    sys.exit(main())
