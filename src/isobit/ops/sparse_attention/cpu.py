"""Sparse attention on the CPU."""

from dataclasses import dataclass

import numpy as np

from isobit.ops import threads
from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch, Selection
from isobit.ops.buffers import empty
from isobit.ops.sparse_attention.cpu_read import PART_KEYS, read_few, read_many
from isobit.ops.sparse_attention.cpu_select import select_few, select_many
from isobit.ops.sparse_attention.cpu_write import write_rows
from isobit.ops.sparse_attention.kernels import Sizes
from isobit.ops.sparse_attention.rotary import rotary_tables
from isobit.ops.sparse_attention.vectors import GROUP

__all__ = ["attention_cache", "attention_read", "attention_select", "attention_write", "prepare_attention"]

MANY_ROWS = 16  # from here on whole rows are dealt out to the threads, below a row is shared among them
PRODUCTS_PER_THREAD = 200_000  # fewer multiply-adds than this are done sooner by one thread
CACHE_LINE = 64


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
    budget: int

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

    Raises ValueError for sizes that do not fit each other.
    """
    _check_sizes(heads, kv_heads, head_dim, index_dim, budget, block, rotary_dim)
    cosines, sines = rotary_tables(int(rotary_dim), float(theta), int(positions))
    kept_blocks = budget // block
    sizes = Sizes(heads, kv_heads, head_dim, index_heads, index_dim, block, kept_blocks, rotary_dim // 2)
    weights = [_one_plus(weight) for weight in (q_norm, k_norm, index_q_norm, index_k_norm)]
    return Attention(Sizes(*map(int, sizes)), np.float32(eps), *weights, cosines, sines, int(budget))


def _check_sizes(heads, kv_heads, head_dim, index_dim, budget, block, rotary_dim) -> None:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads: expected a multiple")
    if PAGE_ROWS % block or budget % block or budget < block:
        raise ValueError(f"block {block} must divide {PAGE_ROWS} and the budget {budget}")
    if rotary_dim % 2 or not 0 <= rotary_dim <= min(head_dim, index_dim):
        raise ValueError(f"rotary_dim {rotary_dim} must be even and at most {min(head_dim, index_dim)}")


def _one_plus(weight) -> np.ndarray:
    return np.add(np.float32(1), np.asarray(weight, dtype=np.float32), dtype=np.float32)


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
    sizes = handle.sizes
    work = len(k) * (sizes.kv_heads * sizes.head_dim * 4 + sizes.index_dim)
    write_rows(
        _parts(work), sizes, handle.eps, k.reshape(-1), v.reshape(-1), index_k.reshape(-1), handle.k_weight,
        handle.index_k_weight, handle.cosines, handle.sines, batch.segment_of_row, batch.positions, batch.pages,
        cache.keys.reshape(-1), cache.values.reshape(-1), cache.index_raw.reshape(-1), cache.index_pooled.reshape(-1),
    )  # fmt: skip


def attention_select(
    index_q, handle: Attention, cache: AttentionCache, batch: Batch, keep_scores: bool = False
) -> Selection:
    """The blocks each row reads; the rows' own index keys must have been written."""
    run = select_many if len(index_q) >= MANY_ROWS else select_few
    return select_with(run, index_q, handle, cache, batch, keep_scores)


def select_with(run, index_q, handle: Attention, cache: AttentionCache, batch: Batch, keep_scores: bool) -> Selection:
    """`attention_select` by the kernel `run`, select_few or select_many."""
    sizes, rows = handle.sizes, len(index_q)
    blocks = empty((rows, sizes.kept_blocks), np.int32)
    counts = empty((rows,), np.int32)
    most = (int(batch.positions.max(initial=-1)) + 1) // sizes.block
    kept_starts = np.zeros(rows + 1, np.int64)
    if keep_scores:
        np.cumsum((batch.positions + 1) // sizes.block, out=kept_starts[1:])
    kept = empty((int(kept_starts[-1]),), np.float32)
    work = rows * most * sizes.index_heads * sizes.index_dim if most > sizes.kept_blocks or keep_scores else 0
    run(
        _parts(work), sizes, handle.eps, index_q.reshape(-1), handle.index_q_weight, handle.cosines, handle.sines,
        batch.starts, batch.segment_of_row, batch.positions, batch.pages, cache.index_pooled.reshape(-1),
        -(-most // GROUP) * GROUP, keep_scores, kept, kept_starts, blocks, counts,
    )  # fmt: skip
    scores = np.split(kept, kept_starts[1:-1]) if keep_scores else None
    return Selection(blocks, counts, scores)


def attention_read(q_gate, selection: Selection, handle: Attention, cache: AttentionCache, batch: Batch) -> np.ndarray:
    """Attend over the selected keys; float32 [R, heads * head_dim], times the sigmoid of the gates."""
    run = read_many if len(q_gate) >= MANY_ROWS else read_few
    return read_with(run, q_gate, selection, handle, cache, batch)


def read_with(run, q_gate, selection, handle: Attention, cache: AttentionCache, batch: Batch) -> np.ndarray:
    """`attention_read` by the kernel `run`, read_few or read_many."""
    sizes, rows = handle.sizes, len(q_gate)
    out = empty((rows, sizes.heads * sizes.head_dim))
    most_keys = min(int(batch.positions.max(initial=0)) + 1, handle.budget + sizes.block - 1)
    run(
        _parts(rows * most_keys * sizes.heads * sizes.head_dim * 2), sizes, handle.eps, q_gate.reshape(-1),
        handle.q_weight, handle.cosines, handle.sines, batch.segment_of_row, batch.positions, batch.pages,
        cache.keys.reshape(-1), cache.values.reshape(-1), selection.blocks, selection.counts,
        -(-most_keys // PART_KEYS), out.reshape(-1),
    )  # fmt: skip
    return out


def _parts(products: int) -> int:
    return max(1, min(threads(), products // PRODUCTS_PER_THREAD))
