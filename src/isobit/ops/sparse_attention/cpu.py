"""Sparse attention on the CPU."""

from dataclasses import dataclass

import numpy as np

from isobit.errors import CheckpointError
from isobit.ops import threads
from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch, Selection
from isobit.ops.buffers import empty, scratch
from isobit.ops.lanes import LANES
from isobit.ops.sparse_attention.cpu_read import PART_KEYS, finish_rows, read_parts
from isobit.ops.sparse_attention.cpu_select import choose_blocks, score_rows
from isobit.ops.sparse_attention.cpu_write import write_rows
from isobit.ops.sparse_attention.kernels import Sizes, padded
from isobit.ops.sparse_attention.rotary import rotary_tables
from isobit.ops.sparse_attention.vectors import GROUP
from isobit.ops.work import run_split

__all__ = ["attention_cache", "attention_read", "attention_select", "attention_write", "prepare_attention"]

MANY_ROWS = 16  # from here on rows share the scan of the index keys
TOGETHER = 8  # that many rows
CACHE_LINE = 64
SCRATCH_FLOATS = 1 << 22  # rows are computed in chunks whose scratch is about this large


@dataclass(frozen=True)
class Attention:
    """One attention layer, prepared: its norm weights as 1 + w, and tables of `positions` positions."""

    sizes: Sizes
    eps: np.float32
    q_weight: np.ndarray
    k_weight: np.ndarray
    index_q_weight: np.ndarray
    index_k_weight: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray

    @property
    def positions(self) -> int:
        return len(self.cosines)

    @property
    def nbytes(self) -> int:
        """Bytes held, the tables that all layers share included."""
        weights = (self.q_weight, self.k_weight, self.index_q_weight, self.index_k_weight)
        return sum(array.nbytes for array in (*weights, self.cosines, self.sines))


def prepare_attention(
    q_norm, k_norm, index_q_norm, index_k_norm, heads: int, kv_heads: int, head_dim: int, index_heads: int,
    index_dim: int, budget: int, block: int, rotary_dim: int, theta: float, positions: int, eps: float,
) -> Attention:  # fmt: skip
    """Prepare one attention layer; norm weights float32 [head_dim] and [index_dim], stored around 0.

    Raises CheckpointError for sizes that do not fit each other, and for weights of another shape.
    """
    _check_sizes(heads, kv_heads, head_dim, index_dim, budget, block, rotary_dim)
    cosines, sines = rotary_tables(int(rotary_dim), float(theta), int(positions))
    sizes = Sizes(heads, kv_heads, head_dim, index_heads, index_dim, block, budget // block)
    return Attention(
        sizes=Sizes(*map(int, sizes)),
        eps=np.float32(eps),
        q_weight=_one_plus("q_norm", q_norm, head_dim),
        k_weight=_one_plus("k_norm", k_norm, head_dim),
        index_q_weight=_one_plus("the indexer's q_norm", index_q_norm, index_dim),
        index_k_weight=_one_plus("the indexer's k_norm", index_k_norm, index_dim),
        cosines=cosines,
        sines=sines,
    )


def _check_sizes(heads, kv_heads, head_dim, index_dim, budget, block, rotary_dim) -> None:
    if heads % kv_heads:
        raise CheckpointError(f"attention: {heads} query heads, expected a multiple of the {kv_heads} key-value heads")
    if PAGE_ROWS % block or budget % block or budget < block:
        raise CheckpointError(f"attention: blocks of {block} keys, expected a divisor of {PAGE_ROWS} and of {budget}")
    if rotary_dim % 2 or not 0 <= rotary_dim <= min(head_dim, index_dim):
        raise CheckpointError(
            f"attention: {rotary_dim} rotary dims, expected an even number up to {min(head_dim, index_dim)}"
        )


def _one_plus(name: str, weight, width: int) -> np.ndarray:
    weight = np.asarray(weight, dtype=np.float32)
    if weight.shape != (width,):
        raise CheckpointError(f"attention: {name} has shape {list(weight.shape)}, expected [{width}]")
    return np.add(np.float32(1), weight, dtype=np.float32)


def attention_cache(handle: Attention, pages: int) -> AttentionCache:
    """Pools of `pages` pages of PAGE_ROWS rows, all zero (memory is taken as pages are written)."""
    sizes = handle.sizes
    kept = (pages, PAGE_ROWS, sizes.kv_heads, sizes.head_dim)
    return AttentionCache(
        keys=np.zeros(kept, np.uint16),
        values=np.zeros(kept, np.uint16),
        index_raw=np.zeros((pages, PAGE_ROWS, sizes.index_dim), np.float32),
        index_pooled=_aligned_zeros((pages, PAGE_ROWS // sizes.block, sizes.index_dim)),
    )


def _aligned_zeros(shape) -> np.ndarray:
    """float32 zeros that begin on a cache line, so that vector loads do not cross lines."""
    count = int(np.prod(shape))
    memory = np.zeros(count + CACHE_LINE // 4, np.float32)
    start = -memory.ctypes.data % CACHE_LINE // 4
    return memory[start : start + count].reshape(shape)


def attention_write(k, v, index_k, handle: Attention, cache: AttentionCache, batch: Batch) -> None:
    """Store the rows' keys, values and raw index keys, and pool the blocks that they finish; in place."""
    arguments = (
        handle.sizes, handle.eps, k.reshape(-1), v.reshape(-1), index_k.reshape(-1), handle.k_weight,
        handle.index_k_weight, handle.cosines, handle.sines, batch.segment_of_row, batch.positions, batch.pages,
        cache.keys.reshape(-1), cache.values.reshape(-1), cache.index_raw.reshape(-1), cache.index_pooled.reshape(-1),
    )  # fmt: skip
    _run_parts(write_rows, k.size * 4, *arguments)


def attention_select(
    index_q, handle: Attention, cache: AttentionCache, batch: Batch, keep_scores: bool = False
) -> Selection:
    """The blocks each row reads; the rows' own index keys must have been written."""
    together = TOGETHER if len(index_q) >= MANY_ROWS else 1
    return select_together(together, index_q, handle, cache, batch, keep_scores)


def select_together(together: int, index_q, handle, cache, batch, keep_scores: bool = False) -> Selection:
    """`attention_select` with scans of the index keys by `together` rows; scans by one row are cut up as well."""
    sizes, rows = handle.sizes, len(index_q)
    blocks, counts = empty((rows, sizes.kept_blocks), np.int32), empty((rows,), np.int32)
    most = (batch.most_rows // (sizes.block * GROUP) + 1) * GROUP
    scored = most > sizes.kept_blocks or keep_scores
    scores: list[np.ndarray] | None = [] if keep_scores else None
    query = index_q.reshape(-1)
    for first, last in _chunks(rows, most if scored else 1):
        totals = scratch((last - first, most))
        if scored:
            span = most if together > 1 else max(GROUP, -(-most // threads() // GROUP) * GROUP)
            work = (last - first) * most * sizes.index_heads * sizes.index_dim // 4
            _run_parts(
                score_rows, work, sizes, handle.eps, query, handle.index_q_weight, handle.cosines, handle.sines,
                batch.starts, batch.positions, batch.pages, cache.index_pooled.reshape(-1),
                first, last, together, span, totals,
            )  # fmt: skip
        _run_parts(choose_blocks, totals.size * 4, sizes, batch.positions, first, last, totals, blocks, counts)
        if scores is not None:
            finished = (batch.positions[first:last] + 1) // sizes.block
            scores += [row[:count].copy() for row, count in zip(totals, finished, strict=True)]
    return Selection(blocks, counts, scores)


def attention_read(q_gate, selection: Selection, handle: Attention, cache: AttentionCache, batch: Batch) -> np.ndarray:
    """Attend over the selected keys; float32 [R, heads * head_dim], times the sigmoid of the gates."""
    sizes, rows = handle.sizes, len(q_gate)
    out = empty((rows, sizes.heads * sizes.head_dim))
    most_keys = min(batch.most_rows, (sizes.kept_blocks + 1) * sizes.block - 1)
    most_parts = -(-most_keys // PART_KEYS)
    row_floats = sizes.heads * most_parts * (LANES + padded(sizes.head_dim))
    q_gate, flat_out = q_gate.reshape(-1), out.reshape(-1)
    keys, values = cache.keys.reshape(-1), cache.values.reshape(-1)
    for first, last in _chunks(rows, row_floats):
        records = scratch((last - first) * row_floats)
        _run_parts(
            read_parts, (last - first) * most_keys * sizes.heads * sizes.head_dim // 4, sizes, handle.eps, q_gate,
            handle.q_weight, handle.cosines, handle.sines, batch.segment_of_row, batch.positions, batch.pages,
            keys, values, selection.blocks, selection.counts, first, last, most_parts, records,
        )  # fmt: skip
        _run_parts(
            finish_rows, records.size * 2, sizes, q_gate, batch.positions, selection.counts,
            first, last, most_parts, records, flat_out,
        )  # fmt: skip
    return out


def _chunks(rows: int, row_floats: int) -> list[tuple[int, int]]:
    """Consecutive ranges of rows whose scratch stays near SCRATCH_FLOATS, in whole scans of TOGETHER rows."""
    size = max(1, SCRATCH_FLOATS // row_floats // TOGETHER) * TOGETHER
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _run_parts(kernel, work: int, *arguments) -> None:
    """Run a kernel that deals its units of work out to as many parts as there are threads."""
    parts = threads()
    run_split(kernel, work, parts, *arguments, parts)
