"""Speed of the Gated DeltaNet's ops on this GPU at real widths: `python bench/cuda/delta_rule.py [--quick]`.

Milliseconds a layer, beside the time that the bytes take at the card's copy rate or the operations at its float32 rate.
"""

import sys
from collections.abc import Iterator

import numpy as np
import torch
from timing import CLOCK, COPY_RATE, FLOAT_LANES, Action, Entry, graph_milliseconds, show

from isobit.cuda import memory
from isobit.cuda.batch import placed
from isobit.ops.batch import Batch
from isobit.ops.delta_rule import cuda
from isobit.ops.ngram_embedding import cuda as ngram

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 48, 128, 4
CHANNELS, VALUES = (2 * KEY_HEADS + VALUE_HEADS) * DIM, VALUE_HEADS * DIM
STREAMS, HIDDEN, DILATION = 4, 2560, 3
SLOTS = 8


def batch_of(segments: int, rows: int) -> Batch:
    """`segments` streams of `rows` rows each, placed."""
    starts = np.arange(segments + 1, dtype=np.int32) * rows
    none = np.zeros(segments, np.int32)
    batch = Batch(np.arange(segments, dtype=np.int32), starts, none, np.zeros((segments, 1), np.int32))
    placed(batch)
    return batch


class Lab:
    def __init__(self, most_rows: int):
        normal = np.random.default_rng(0).standard_normal
        constants = normal((CHANNELS, TAPS)), normal(VALUE_HEADS), normal(VALUE_HEADS), normal(DIM)
        self.handle = cuda.prepare_delta(*constants, KEY_HEADS, VALUE_HEADS, DIM, DIM, 1e-6, "sigmoid")
        wide = STREAMS * HIDDEN
        norms = [0.1 * normal(wide) for _ in range(3)]
        self.ple = ngram.prepare_ple(*norms, normal((wide, TAPS)), STREAMS, DILATION, 1e-6)
        device = memory.device()
        self.qkv, self.key = (
            torch.randn(most_rows, CHANNELS, device=device),
            torch.randn(most_rows, wide, device=device),
        )
        self.a, self.b = torch.randn(2, most_rows, VALUE_HEADS, device=device)
        self.x, self.z = torch.randn(2, most_rows, VALUES, device=device)
        self.streams = torch.randn(most_rows, STREAMS, HIDDEN, device=device)
        self.value = torch.randn(most_rows, HIDDEN, device=device)
        self.conv_state = memory.zeros((SLOTS, TAPS - 1, CHANNELS))
        self.states = memory.zeros((SLOTS, VALUE_HEADS, DIM, DIM))
        self.ngram_state = memory.zeros((SLOTS, DILATION * (TAPS - 1), wide))

    def actions(self, batch: Batch) -> Iterator[tuple[str, Action, float]]:
        """(op, what to run, the time in milliseconds that it cannot fall below)."""
        rows, segments, handle = batch.rows, batch.segments, self.handle
        state_bytes = segments * VALUE_HEADS * DIM * DIM * 4
        lanes = memory.multiprocessors() * FLOAT_LANES * CLOCK
        recurrence = 2 * state_bytes / COPY_RATE + 4 * rows * VALUE_HEADS * DIM * DIM / lanes
        x, qkv, a, b = self.x[:rows], self.qkv[:rows], self.a[:rows], self.b[:rows]
        yield (
            "causal_conv",
            lambda: cuda.causal_conv(qkv, handle, self.conv_state, batch),
            2e3 * qkv.nbytes / COPY_RATE,
        )
        yield "delta_rule", lambda: cuda.delta_rule(qkv, a, b, handle, self.states, batch), 1e3 * recurrence
        yield "gated_norm", lambda: cuda.gated_norm(x, self.z[:rows], handle), 3e3 * x.nbytes / COPY_RATE
        streams, key, value = self.streams[:rows], self.key[:rows], self.value[:rows]
        yield (
            "ple_inject",
            lambda: ngram.ple_inject(streams, key, value, self.ple, self.ngram_state, batch),
            1e3 * (3 * streams.nbytes + value.nbytes) / COPY_RATE,
        )


def times(quick: bool) -> Iterator[Entry]:
    """One entry an op and shape: what, ms, floor_ms."""
    shapes = [(1, 1), (8, 1), (1, 8), (1, 64), (1, 6144)]
    if not quick:
        shapes += [(4, 1), (8, 8), (1, 512), (1, 2048), (2, 3072), (1, 8192)]
    lab = Lab(max(segments * rows for segments, rows in shapes))
    for segments, rows in shapes:
        batch = batch_of(segments, rows)
        repeats = 20 if batch.rows <= 64 else 2
        for op, action, floor in lab.actions(batch):
            what = f"{op}, {segments} streams of {rows} rows"
            yield {"what": what, "ms": graph_milliseconds([action], repeats), "floor_ms": floor}


if __name__ == "__main__":
    show(times("--quick" in sys.argv))
