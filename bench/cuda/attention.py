"""Speed of sparse attention on this GPU at real widths: `python bench/cuda/attention.py [--quick]`.

Milliseconds a layer, beside the time that the bytes take (at the card's copy rate; keys and values that many rows share
at the rate of its second-level cache) or the operations at its float32 rate. Streams and selections are random, so that
neighbouring rows share few blocks but by chance; `alike` stands for rows that select the same ones.
"""

import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from timing import CLOCK, COPY_RATE, FLOAT_LANES, Entry, graph_milliseconds, show

from isobit.cuda import memory
from isobit.cuda.batch import placed
from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch, Selection
from isobit.ops.sparse_attention import cuda

HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, BUDGET, BLOCK, ROTARY = 24, 2, 256, 4, 128, 2048, 4, 64
KEPT = BUDGET // BLOCK
CACHE_RATE = 5.5e12  # bytes a second
LANE_SUM = INDEX_DIM + 31  # operations of one product of index keys
STAGINGS = (
    cuda.Staging(32, 3, rows=3, through_l1=True),
    cuda.Staging(32, 3, rows=3),
    cuda.Staging(32, 3, rows=2, through_l1=True),
    cuda.Staging(32, 3, rows=1, through_l1=True),
    cuda.Staging(32, 2, rows=4, through_l1=True),
    cuda.Staging(64, 2, rows=2, through_l1=True),
    cuda.Staging(64, 2, rows=1, through_l1=True),
)
ALIKE_ROWS = 64
Shape = tuple[int, int, int]  # streams, rows of each, the position of its first


def prepare(positions: int) -> cuda.Attention:
    widths = HEAD_DIM, HEAD_DIM, INDEX_DIM, INDEX_DIM
    q_norm, k_norm, index_q_norm, index_k_norm = (0.1 * np.random.default_rng(0).standard_normal(n) for n in widths)
    sizes = HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, BUDGET, BLOCK, ROTARY
    return cuda.prepare_attention(q_norm, k_norm, index_q_norm, index_k_norm, *sizes, 1e7, positions, 1e-6)


class Lab:
    """Streams of one shape with full caches, and inputs of their next rows."""

    def __init__(self, shape: Shape):
        streams, rows, first = shape
        pages = -(-(first + rows) // PAGE_ROWS)
        self.handle = prepare(pages * PAGE_ROWS)
        self.cache = filled(cuda.attention_cache(self.handle, streams * pages))
        self.batch = Batch(
            np.arange(streams, dtype=np.int32),
            np.arange(streams + 1, dtype=np.int32) * rows,
            np.full(streams, first, np.int32),
            np.random.default_rng(0).permutation(streams * pages).astype(np.int32).reshape(streams, pages),
        )
        placed(self.batch)
        all_rows, device = self.batch.rows, memory.device()
        self.k, self.v = torch.randn(2, all_rows, KV_HEADS * HEAD_DIM, device=device)
        self.index_k = torch.randn(all_rows, INDEX_DIM, device=device)
        self.index_q = torch.randn(all_rows, INDEX_HEADS * INDEX_DIM, device=device)
        self.q_gate = torch.randn(all_rows, HEADS * 2 * HEAD_DIM, device=device)

    @property
    def listed(self) -> np.ndarray:
        """How many keys each row reads."""
        finished, rest = np.divmod(self.batch.positions + 1, BLOCK)
        return np.minimum(finished, KEPT) * BLOCK + rest

    def write(self) -> None:
        cuda.attention_write(self.k, self.v, self.index_k, self.handle, self.cache, self.batch)

    def select(self) -> Selection:
        return cuda.attention_select(self.index_q, self.handle, self.cache, self.batch)

    def read(self, selection: Selection) -> torch.Tensor:
        return cuda.attention_read(self.q_gate, selection, self.handle, self.cache, self.batch)

    def write_floor(self) -> float:
        """Seconds."""
        return 1.5 * (self.k.nbytes + self.v.nbytes + 2 * self.index_k.nbytes) / COPY_RATE

    def select_floor(self) -> float:
        finished = (self.batch.positions.astype(np.int64) + 1) // BLOCK
        finished = finished[finished > KEPT]
        lanes = memory.multiprocessors() * FLOAT_LANES * CLOCK
        read = np.unique(finished).max(initial=0) * self.batch.segments * INDEX_DIM * 4 / COPY_RATE
        return max(read, float(finished.sum()) * INDEX_HEADS * LANE_SUM / lanes)

    def read_floor(self) -> float:
        moved = float(self.listed.sum()) * KV_HEADS * HEAD_DIM * 4
        return moved / (COPY_RATE if self.batch.rows <= cuda.MOST_FEW_ROWS else CACHE_RATE)

    def alike(self) -> Selection:
        """What rows would read if each of ALIKE_ROWS neighbours chose the same blocks; of one stream."""
        finished = (self.batch.positions + 1) // BLOCK
        blocks, counts = np.full((self.batch.rows, KEPT), -1, np.int32), np.minimum(finished, KEPT).astype(np.int32)
        for first in range(0, self.batch.rows, ALIKE_ROWS):
            group = slice(first, first + ALIKE_ROWS)
            common = np.sort(np.random.default_rng(first).permutation(finished[first])[:KEPT])
            for row in range(*group.indices(self.batch.rows)):
                own = common if len(common) == counts[row] else np.arange(counts[row])
                blocks[row, : counts[row]] = own
        return Selection(memory.to_device(blocks), memory.to_device(counts))


def filled(cache: AttentionCache) -> AttentionCache:
    for pool in (cache.keys, cache.values, cache.index_raw, cache.index_pooled):
        pool.normal_()
    return cache


def times_of(shape: Shape, stagings: bool) -> Iterator[Entry]:
    lab = Lab(shape)
    streams, rows, first = shape
    repeats = 20 if lab.batch.rows <= cuda.MOST_FEW_ROWS else 2
    selection = lab.select()
    actions = [
        ("attention_write", lab.write, lab.write_floor()),
        ("attention_select", lab.select, lab.select_floor()),
        ("attention_read", lambda: lab.read(selection), lab.read_floor()),
    ]
    where = f"{streams} streams of {rows} rows from {first}"
    for what, action, floor in actions:
        yield {"what": f"{what}, {where}", "ms": graph_milliseconds([action], repeats), "floor_ms": 1e3 * floor}
    if not stagings:
        return
    alike, chosen = lab.alike(), cuda.MANY
    try:
        for staging in STAGINGS:
            cuda.MANY = staging
            name = f"{staging.stages} stages of {staging.keys} keys, {staging.rows} rows a block"
            name += ", through L1" if staging.through_l1 else ""
            for what, picked in (("read", selection), ("read, alike", alike)):
                taken = graph_milliseconds([partial(lab.read, picked)], repeats)
                yield {"what": f"{what}, {where}, {name}", "ms": taken, "floor_ms": 1e3 * lab.read_floor()}
    finally:
        cuda.MANY = chosen


def times(quick: bool) -> Iterator[Entry]:
    """One entry an op and shape: what, ms, floor_ms."""
    shapes = [(1, 1, 255), (1, 1, 4095), (4, 1, 4095), (64, 1, 4095), (1, 6144, 0)]
    if not quick:
        shapes += [(1, 8, 4095), (8, 8, 4095), (1, 1, 131071), (1, 1, 262143), (1, 3001, 0), (1, 2048, 32768)]
    for shape in shapes:
        yield from times_of(shape, stagings=shape == (1, 6144, 0))


if __name__ == "__main__":
    show(times("--quick" in sys.argv))
