"""Speed of the row-wise ops on this GPU at real widths: `python bench/cuda/rows.py [--quick]`.

Norm, embedding, row movement, gated residual streams and sampling: milliseconds a call, beside the time that the bytes
take at the card's copy rate (or products at its tensor rate, where that is more). Few rows run in a graph over read
sites that together are larger than the second-level cache.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from timing import COPY_RATE, TENSOR_RATE, Action, Entry, graph_milliseconds, show

from isobit.checkpoint.weights import PlainEmbedding
from isobit.cuda import memory
from isobit.cuda.batch import placed
from isobit.ops.batch import Batch
from isobit.ops.embedding import cuda as embedding
from isobit.ops.gated_residual import cuda as residual
from isobit.ops.linear.cuda_layers import TILE, HalfLayer
from isobit.ops.norm import cuda as norm
from isobit.ops.rows import cuda as rows_ops
from isobit.ops.sample import Draw, packed_draws
from isobit.ops.sample import cuda as sampling

STREAMS, HIDDEN, RANK, VOCABULARY = 4, 2560, 320, 248_320
WIDE = STREAMS * HIDDEN
FLOAT = 4
SITES = 16  # of 13 MB of weights each
EPS = 1e-6


def entry(what: str, actions: Sequence[Action], nbytes: float, operations: float = 0.0, rounds: int = 1) -> Entry:
    floor = max(nbytes / COPY_RATE, operations / TENSOR_RATE)
    return {"what": what, "ms": graph_milliseconds(actions, rounds), "floor_ms": 1e3 * floor}


def layer(inputs: int, outputs: int) -> HalfLayer:
    """A random plain layer, made on the device."""
    columns = -(-outputs // TILE)
    fragments = (torch.randn((columns, inputs // TILE, 32, 8), device=memory.device()) / inputs**0.5).half()
    counters = memory.zeros((2 * columns,), torch.int32)
    parts = 2 if outputs <= 512 else 1
    return HalfLayer(inputs, outputs, inputs, columns * TILE, None, parts, fragments, counters)


def site() -> residual.GatedResidual:
    weight = 0.1 * np.random.default_rng(0).standard_normal(WIDE)
    return residual.prepare_gated_residual(
        weight, layer(WIDE, RANK), layer(RANK, WIDE), layer(WIDE, STREAMS), STREAMS, EPS
    )


def read_entries(sites: list[residual.GatedResidual], rows: int) -> Iterator[Entry]:
    """The gated read in each way that takes the rows, and of many rows its steps."""
    streams = torch.randn((rows, STREAMS, HIDDEN), device=memory.device())
    weights = 2 * (RANK + STREAMS + RANK) * WIDE
    activations = rows * FLOAT * (WIDE + HIDDEN)
    operations = 2.0 * rows * WIDE * (2 * (RANK + STREAMS) + RANK)
    few = rows <= residual.MOST_FEW_ROWS
    ways = {"whole": residual.BY_ROW_COUNT, "layer by layer": residual.LAYER_BY_LAYER}
    for name, how in ways.items():
        actions = [partial(residual.gated_read, streams, one, how=how) for one in (sites if few else sites[:1])]
        yield entry(f"gated_read, {rows} rows, {name}", actions, weights + (1 if few else 2) * activations, operations)
    y, injection = (
        torch.randn((rows, HIDDEN), device=memory.device()),
        torch.randn((rows, STREAMS), device=memory.device()),
    )
    actions = [partial(residual.gated_write_read, streams, injection, y, one) for one in (sites if few else sites[:1])]
    moved = weights + (1 if few else 2) * activations + 2 * streams.nbytes
    yield entry(f"gated_write_read, {rows} rows", actions, moved, operations)
    if few:
        return
    one = sites[0]
    inverse = residual.inverse_norms(streams, EPS)
    sums = residual.down_sums(streams, inverse, one)
    low = residual.finish_down(sums, one, None)
    mixed = memory.empty((rows, HIDDEN))
    stream_bytes = rows * WIDE * FLOAT
    yield entry(f"  its norms, {rows} rows", [lambda: residual.inverse_norms(streams, EPS)], stream_bytes)
    yield entry(
        f"  its down and inject, {rows} rows",
        [lambda: residual.down_sums(streams, inverse, one)],
        stream_bytes,
        4.0 * rows * WIDE * (RANK + STREAMS),
    )
    yield entry(f"  its silu, {rows} rows", [lambda: residual.finish_down(sums, one, None)], sums.nbytes + low.nbytes)
    yield entry(
        f"  its up and mix, {rows} rows",
        [lambda: residual.mix_rows(low, streams, inverse, one, mixed)],
        stream_bytes + mixed.nbytes,
        2.0 * rows * WIDE * RANK,
    )


def write_entries(rows: int) -> Iterator[Entry]:
    streams, y = (torch.randn((rows, n), device=memory.device()) for n in (WIDE, HIDDEN))
    injection = torch.randn((rows, STREAMS), device=memory.device())
    streams = streams.view(rows, STREAMS, HIDDEN)
    rounds = 20 if rows <= 64 else 2
    moved = 2 * streams.nbytes + y.nbytes
    writes: dict[str, Action] = {
        "gated_write": lambda: residual.gated_write(streams, injection, y),
        "gated_write_normed": lambda: residual.gated_write_normed(streams, injection, y, EPS),
        "add_streams": lambda: residual.add_streams(streams, y),
    }
    for name, action in writes.items():
        yield entry(f"{name}, {rows} rows", [action], moved, rounds=rounds)
    yield entry(
        f"expand_streams, {rows} rows", [lambda: residual.expand_streams(y, STREAMS)], streams.nbytes + y.nbytes
    )


def row_entries(rows: int) -> Iterator[Entry]:
    """Norms, the embedding and row movement."""
    rounds = 20 if rows <= 64 else 2
    for width in (HIDDEN, WIDE):
        x, weight = torch.randn((rows, width), device=memory.device()), torch.zeros(width, device=memory.device())
        yield entry(f"norm, {rows} x {width}", [partial(norm.norm, x, weight, EPS)], 2 * x.nbytes, rounds=rounds)
    table = np.zeros((VOCABULARY // 8, HIDDEN), np.float16)
    handle = embedding.prepare_embedding(PlainEmbedding("embed", table, HIDDEN))
    ids = torch.randint(0, len(table), (rows,), dtype=torch.int32, device=memory.device())
    yield entry(f"embed, {rows} rows", [lambda: embedding.embed(ids, handle)], rows * HIDDEN * 6, rounds=rounds)
    streams = torch.randn((rows, STREAMS, HIDDEN), device=memory.device())
    last = torch.zeros((2, STREAMS, HIDDEN), device=memory.device())
    first, starts = np.zeros(1, np.int32), np.array([0, rows], np.int32)
    batch = Batch(first, starts, first, first[:, None])
    placed(batch)
    yield entry(
        f"shift_rows, {rows} rows",
        [lambda: rows_ops.shift_rows(streams, last, batch)],
        2 * streams.nbytes,
        rounds=rounds,
    )
    index = torch.arange(rows, device=memory.device())
    yield entry(
        f"take_rows, {rows} rows", [lambda: rows_ops.take_rows(streams, index)], 2 * streams.nbytes, rounds=rounds
    )


DRAWS = {
    "greedy": Draw(temperature=0.0),
    "temperature 1": Draw(seed=7, position=9),
    "temperature 0.7, top_k 20, top_p 0.8": Draw(temperature=0.7, top_k=20, top_p=0.8, seed=7, position=9),
    "temperature 1, top_p 0.95, min_p 0.05": Draw(top_p=0.95, min_p=0.05, seed=7, position=9),
}
DEVIATIONS = {"": 2.5, ", flat": 0.5, ", equal": 0.0}


def sample_entries(rows: int) -> Iterator[Entry]:
    for kind, deviation in DEVIATIONS.items():
        logits = deviation * torch.randn((rows, VOCABULARY), device=memory.device())
        for name, draw in DRAWS.items():
            draws = memory.to_device(packed_draws([draw] * rows))
            yield entry(f"sample, {rows} rows{kind}, {name}", [partial(sampling.sample, logits, draws)], logits.nbytes)
        yield entry(f"top_logprobs, {rows} rows{kind}", [partial(sampling.top_logprobs, logits, 20)], logits.nbytes)


def times(quick: bool) -> Iterator[Entry]:
    """One entry an op and shape: what, ms, floor_ms."""
    sites = [site() for _ in range(SITES)]
    few, many = ((1, 8), (6144,)) if quick else ((1, 2, 4, 8, 16, 32, 64), (512, 2048, 6144, 8192))
    for rows in (*few, *many):
        yield from read_entries(sites, rows)
        yield from write_entries(rows)
        yield from row_entries(rows)
    for rows in (1, 4) if quick else (1, 4, 16, 64):
        yield from sample_entries(rows)


if __name__ == "__main__":
    show(times("--quick" in sys.argv))
