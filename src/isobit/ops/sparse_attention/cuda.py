"""Sparse attention on CUDA. The selection has the CPU's bytes; the read is defined in docs/arithmetic.md, *On CUDA*."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.cuda.batch import placed
from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch, Selection
from isobit.ops.sparse_attention import cpu
from isobit.ops.sparse_attention.kernels import Sizes
from isobit.ops.sparse_attention.rotary import rotary_tables

__all__ = ["attention_cache", "attention_read", "attention_select", "attention_write", "prepare_attention"]

MOST_FEW_ROWS = 64
FOLDER = "ops/sparse_attention"
WARP = 32
MOST_THREADS = 1024

WRITE_WARPS = 16  # a block, at most
FEW_THREADS = MANY_THREADS = 256  # of the scoring kernels
CHOOSING_THREADS = 512  # of a row among few
SCORE_TILE = 64  # blocks that are scored at a time
SCORE_TILE_ROWS = 16
SCORE_BLOCKS_A_PROCESSOR = 12
SCRATCH_FLOATS = 1 << 26  # rows are selected in chunks whose scores are about this many

PART_KEYS = 128  # keys of one part of a row's list; part of the op's definition
READ_THREADS = 128  # of one row


class Staging(NamedTuple):
    """How keys and values are loaded: `keys` at a time, memory for `stages` of these, by `rows` rows a block."""

    keys: int
    stages: int
    rows: int = 1
    through_l1: bool = False


FEW_ALONE = Staging(64, 4)  # where there is a multiprocessor for each block
FEW = Staging(64, 2)
MANY = Staging(32, 3, rows=1, through_l1=True)


@dataclass(frozen=True)
class Attention:
    """One attention layer on the device: its norm weights as 1 + w, and tables of `positions` positions."""

    sizes: Sizes
    rotary_dim: int
    eps: float
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    index_q_weight: torch.Tensor
    index_k_weight: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor

    @property
    def positions(self) -> int:
        return len(self.cosines)

    @property
    def nbytes(self) -> int:
        """Bytes held, the tables that all layers share included."""
        weights = (self.q_weight, self.k_weight, self.index_q_weight, self.index_k_weight)
        return sum(tensor.nbytes for tensor in (*weights, self.cosines, self.sines))


def prepare_attention(
    q_norm, k_norm, index_q_norm, index_k_norm, heads: int, kv_heads: int, head_dim: int, index_heads: int,
    index_dim: int, budget: int, block: int, rotary_dim: int, theta: float, positions: int, eps: float,
) -> Attention:  # fmt: skip
    """Prepare one attention layer; norm weights float32 [head_dim] and [index_dim], stored around 0.

    Raises CheckpointError for sizes that do not fit each other, and for weights of another shape.
    """
    host = cpu.prepare_attention(
        q_norm, k_norm, index_q_norm, index_k_norm, heads, kv_heads, head_dim, index_heads, index_dim, budget, block,
        rotary_dim, theta, positions, eps,
    )  # fmt: skip
    cosines, sines = _placed_tables(int(rotary_dim), float(theta), int(positions), memory.is_emulated())
    return Attention(
        sizes=host.sizes,
        rotary_dim=int(rotary_dim),
        eps=float(host.eps),
        q_weight=memory.to_device(host.q_weight),
        k_weight=memory.to_device(host.k_weight),
        index_q_weight=memory.to_device(host.index_q_weight),
        index_k_weight=memory.to_device(host.index_k_weight),
        cosines=cosines,
        sines=sines,
    )


@lru_cache(maxsize=4)
def _placed_tables(rotary_dim: int, theta: float, positions: int, emulated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary tables of the CPU on the device; layers share them."""
    cosines, sines = rotary_tables(rotary_dim, theta, positions)
    return memory.to_device(cosines), memory.to_device(sines)


def attention_cache(handle: Attention, pages: int) -> AttentionCache:
    """Pools of `pages` pages of PAGE_ROWS rows, all zero."""
    sizes = handle.sizes
    kept = (pages, PAGE_ROWS, sizes.kv_heads, sizes.head_dim)
    return AttentionCache(
        keys=memory.zeros(kept, torch.float16),
        values=memory.zeros(kept, torch.float16),
        index_raw=memory.zeros((pages, PAGE_ROWS, sizes.index_dim)),
        index_pooled=memory.zeros((pages, PAGE_ROWS // sizes.block, sizes.index_dim)),
    )


def attention_write(k, v, index_k, handle: Attention, cache: AttentionCache, batch: Batch) -> None:
    """Store the rows' keys, values and raw index keys, and pool the blocks that they finish; in place."""
    sizes, at = handle.sizes, placed(batch)
    if not at.rows:
        return
    k, v, index_k = _rows(k), _rows(v), _rows(index_k)
    warps = min(2 * sizes.kv_heads + 1, WRITE_WARPS)
    kernel = kernels.load(
        f"{FOLDER}/write.cu", "write_rows", KV_HEADS=sizes.kv_heads, HEAD_DIM=sizes.head_dim,
        INDEX_DIM=sizes.index_dim, BLOCK=sizes.block, ROTARY=handle.rotary_dim,
    )  # fmt: skip
    kernel(
        at.rows, warps * WARP, k, k.stride(0), v, v.stride(0), index_k, index_k.stride(0), handle.k_weight,
        handle.index_k_weight, handle.eps, handle.cosines, handle.sines, at.segment_of_row, at.starts, at.positions,
        at.pages, at.pages.shape[1], cache.keys, cache.values, cache.index_raw, cache.index_pooled,
        shared=warps * max(sizes.head_dim, sizes.index_dim) * 4, early=True,
    )  # fmt: skip


def attention_select(
    index_q, handle: Attention, cache: AttentionCache, batch: Batch, keep_scores: bool = False
) -> Selection:
    """The blocks each row reads; the rows' own index keys must have been written."""
    select = select_few if batch.rows <= MOST_FEW_ROWS else select_many
    return select(index_q, handle, cache, batch, keep_scores)


def select_few(index_q, handle: Attention, cache: AttentionCache, batch: Batch, keep_scores: bool = False) -> Selection:
    """`attention_select`, each row by itself; launches depend on the number of rows and pages alone."""
    sizes, at = handle.sizes, placed(batch)
    blocks, counts = _empty_selection(at.rows, sizes)
    if not at.rows:
        return Selection(blocks, counts, [] if keep_scores else None)
    width = at.pages.shape[1] * PAGE_ROWS // sizes.block
    scored = width > sizes.kept_blocks or keep_scores
    scores = memory.empty((at.rows, width if scored else 0))
    if scored:
        index_q = _rows(index_q)
        tiles = min(-(-width // SCORE_TILE), -(-SCORE_BLOCKS_A_PROCESSOR * memory.multiprocessors() // at.rows))
        _scorer(handle, "score_few")(
            (tiles, at.rows), FEW_THREADS, index_q, index_q.stride(0), handle.index_q_weight, handle.eps,
            handle.cosines, handle.sines, at.segment_of_row, at.positions, at.pages, at.pages.shape[1],
            cache.index_pooled, _index_scale(sizes), keep_scores, scores, width, shared=_few_scoring_bytes(sizes),
            early=True,
        )  # fmt: skip
    threads = CHOOSING_THREADS if scored else 4 * WARP
    _chooser(sizes)(at.rows, threads, scores, scores.shape[1], at.positions, blocks, counts, early=True)
    return Selection(blocks, counts, _finished_alone(scores, batch, sizes) if keep_scores else None)


def select_many(
    index_q, handle: Attention, cache: AttentionCache, batch: Batch, keep_scores: bool = False
) -> Selection:
    """`attention_select` with tiles of rows that share the index keys; reads the positions on the host."""
    sizes, at = handle.sizes, placed(batch)
    blocks, counts = _empty_selection(at.rows, sizes)
    index_q = _rows(index_q)
    kept_scores: list[torch.Tensor] = []
    width = (int(batch.positions.max(initial=0)) + 1) // sizes.block
    scored = width > sizes.kept_blocks or keep_scores
    chunk = max(1, SCRATCH_FLOATS // max(width, 1) // SCORE_TILE_ROWS) * SCORE_TILE_ROWS
    for first in range(0, at.rows, chunk):
        last = min(first + chunk, at.rows)
        scores = memory.empty((last - first, width if scored else 0))
        if scored:
            row_tiles = -(-(last - first) // SCORE_TILE_ROWS)
            wanted = -(-SCORE_BLOCKS_A_PROCESSOR * memory.multiprocessors() // row_tiles)
            tiles = max(1, min(-(-width // SCORE_TILE), wanted))
            _scorer(handle, "score_many")(
                (row_tiles, tiles), MANY_THREADS, index_q, index_q.stride(0), handle.index_q_weight, handle.eps,
                handle.cosines, handle.sines, at.segment_of_row, at.starts, at.positions, at.pages, at.pages.shape[1],
                cache.index_pooled, _index_scale(sizes), keep_scores, first, last, scores, width,
                shared=_many_scoring_bytes(sizes),
            )  # fmt: skip
            if keep_scores:
                kept_scores += scores
        _chooser(sizes)(
            last - first, min(MOST_THREADS, _warps_for(-(-width // 4))), scores, scores.shape[1],
            at.positions[first:last], blocks[first:last], counts[first:last],
        )  # fmt: skip
    return Selection(blocks, counts, _finished_alone(kept_scores, batch, sizes) if keep_scores else None)


def _empty_selection(rows: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    return memory.empty((rows, sizes.kept_blocks), torch.int32), memory.empty((rows,), torch.int32)


def _finished_alone(scores: Iterable[torch.Tensor], batch: Batch, sizes: Sizes) -> list[torch.Tensor]:
    """Of each row's scores those of its finished blocks."""
    finished = (batch.positions + 1) // sizes.block
    return [row[: int(count)] for row, count in zip(scores, finished, strict=True)]


def _warps_for(count: int) -> int:
    """Threads for `count` things, in whole warps; at least four warps."""
    return max(4 * WARP, -(-count // WARP) * WARP)


def _scorer(handle: Attention, name: str) -> kernels.Kernel:
    sizes = handle.sizes
    return kernels.load(
        f"{FOLDER}/{name}.cu", name, INDEX_HEADS=sizes.index_heads, INDEX_DIM=sizes.index_dim, BLOCK=sizes.block,
        KEPT=sizes.kept_blocks, ROTARY=handle.rotary_dim,
        SCRATCH_BYTES=_few_scoring_bytes(sizes) if name == "score_few" else _many_scoring_bytes(sizes),
    )  # fmt: skip


def _chooser(sizes: Sizes) -> kernels.Kernel:
    return kernels.load(f"{FOLDER}/choose.cu", "choose_blocks", BLOCK=sizes.block, KEPT=sizes.kept_blocks)


def _few_scoring_bytes(sizes: Sizes) -> int:
    width = _rounded(sizes.index_dim, WARP)
    return 4 * (SCORE_TILE * (width + 4) + sizes.index_heads * (width + SCORE_TILE))


def _many_scoring_bytes(sizes: Sizes) -> int:
    width, heads = _rounded(sizes.index_dim, WARP), _rounded(sizes.index_heads, 4)
    columns = SCORE_TILE_ROWS * heads + 4 + SCORE_TILE + 4
    return _rounded(4 * (width * columns + MANY_THREADS // WARP * sizes.index_dim), 4)


def attention_read(
    q_gate, selection: Selection, handle: Attention, cache: AttentionCache, batch: Batch
) -> torch.Tensor:
    """Attend over the selected keys; float32 [R, heads * head_dim], times the sigmoid of the gates."""
    read = read_few if batch.rows <= MOST_FEW_ROWS else read_many
    return read(q_gate, selection, handle, cache, batch)


def read_few(q_gate, selection: Selection, handle: Attention, cache: AttentionCache, batch: Batch) -> torch.Tensor:
    """`attention_read` with a block of threads a part; launches depend on the number of rows and pages alone."""
    sizes, at = handle.sizes, placed(batch)
    out = memory.empty((at.rows, sizes.heads * sizes.head_dim))
    if not at.rows:
        return out
    q_gate = _rows(q_gate)
    most_keys = min(at.pages.shape[1] * PAGE_ROWS, (sizes.kept_blocks + 1) * sizes.block - 1)
    parts = -(-most_keys // PART_KEYS)
    sums = memory.empty((at.rows, sizes.heads, parts, sizes.head_dim))
    edges = memory.empty((at.rows, sizes.heads, parts, 2))
    is_alone = parts * _units(sizes) * at.rows <= memory.multiprocessors()
    staging = FEW_ALONE if is_alone and _part_bytes(sizes, FEW_ALONE) <= memory.most_shared_bytes() else FEW
    shared = _part_bytes(sizes, staging)
    macros = _reading_macros(handle, staging) | {"SCRATCH_BYTES": shared}
    kernels.load(f"{FOLDER}/read_few.cu", "read_parts", **macros)(
        (parts, _units(sizes), at.rows), READ_THREADS, q_gate, q_gate.stride(0), handle.q_weight, handle.eps,
        handle.cosines, handle.sines, at.segment_of_row, at.positions, at.pages, at.pages.shape[1], selection.blocks,
        selection.counts, cache.keys, cache.values, _scale(sizes.head_dim), sums, edges, shared=shared, early=True,
    )  # fmt: skip
    kernels.load(f"{FOLDER}/read_few.cu", "merge_parts", **macros)(
        (sizes.heads, at.rows), min(_rounded(sizes.head_dim, WARP), MOST_THREADS), sums, edges, parts, q_gate,
        q_gate.stride(0), at.positions, selection.counts, out, shared=20 * parts, early=True,
    )  # fmt: skip
    return out


def read_many(q_gate, selection: Selection, handle: Attention, cache: AttentionCache, batch: Batch) -> torch.Tensor:
    """`attention_read` with a few rows a block of threads, part after part."""
    sizes, at = handle.sizes, placed(batch)
    out = memory.empty((at.rows, sizes.heads * sizes.head_dim))
    if not at.rows:
        return out
    q_gate = _rows(q_gate)
    rows = max(1, min(MANY.rows, memory.most_shared_bytes() // _row_bytes(sizes, MANY)))
    shared = rows * _row_bytes(sizes, MANY)
    macros = _reading_macros(handle, MANY) | {
        "ROWS": rows, "BLOCKS_AT_ONCE": max(1, memory.most_shared_bytes() // shared), "SCRATCH_BYTES": shared
    }  # fmt: skip
    kernels.load(f"{FOLDER}/read_many.cu", "read_many", **macros)(
        (-(-at.rows // rows), _units(sizes)), rows * READ_THREADS, q_gate, q_gate.stride(0), handle.q_weight,
        handle.eps, handle.cosines, handle.sines, at.segment_of_row, at.positions, at.pages, at.pages.shape[1],
        selection.blocks, selection.counts, cache.keys, cache.values, _scale(sizes.head_dim), at.rows, out,
        shared=shared,
    )  # fmt: skip
    return out


def _reading_macros(handle: Attention, staging: Staging) -> dict[str, int]:
    sizes = handle.sizes
    return {
        "HEADS": sizes.heads, "KV_HEADS": sizes.kv_heads, "HEAD_DIM": sizes.head_dim, "BLOCK": sizes.block,
        "KEPT": sizes.kept_blocks, "ROTARY": handle.rotary_dim, "STAGE_KEYS": staging.keys, "STAGES": staging.stages,
        "THROUGH_L1": int(staging.through_l1),
    }  # fmt: skip


def _units(sizes: Sizes) -> int:
    """Pieces of up to 16 query heads of one key-value head."""
    return sizes.kv_heads * -(-(sizes.heads // sizes.kv_heads) // 16)


def _group_bytes(sizes: Sizes, staging: Staging) -> int:
    """Stages of keys and values; queries and weights of 16 heads, their highest scores and totals."""
    row = 2 * (_rounded(sizes.head_dim, 64) + 8)
    return staging.stages * staging.keys * row + 16 * (row + 2 * (2 * PART_KEYS + 8) + 8)


def _part_bytes(sizes: Sizes, staging: Staging) -> int:
    return _rounded(_group_bytes(sizes, staging) + 4 * (PART_KEYS // sizes.block), 16)


def _row_bytes(sizes: Sizes, staging: Staging) -> int:
    return _rounded(_group_bytes(sizes, staging) + 16 * 20 + 4 * (sizes.kept_blocks + 1), 16)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with the elements of a row next to each other; rows may be apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _scale(width: int) -> float:
    """float32(1 / sqrt(width))."""
    return float(np.float32(1.0 / np.sqrt(np.float64(width))))


def _index_scale(sizes: Sizes) -> float:
    return _scale(sizes.index_dim)
