"""What the ops of one forward share: which rows belong to which stream, and where the streams' state lies."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = Any  # an array of the device: NumPy on the CPU, a PyTorch tensor on CUDA; opaque outside ops/

PAGE_ROWS = 64  # rows in one page of the key-value pools; a multiple of the indexer's block


@dataclass(frozen=True)
class Batch:
    """The rows of one forward: segments of consecutive rows of one stream each, laid end to end. S segments, R rows.

    slots: int32 [S], the state slot of each segment's stream.
    starts: int32 [S+1], where each segment begins among the rows; starts[S] = R.
    first: int32 [S], the position of each segment's first row in its stream.
    pages: int32 [S, P], the stream's pages in order: position p lies in page pages[s, p // PAGE_ROWS].
    journal: int32 [R], the journal row that takes a copy of the stream's state after that row, -1 for none; None when
    nothing is journaled. journal_rows: how many rows the journals have, one array [journal_rows, ...] a state pool.
    """

    slots: np.ndarray
    starts: np.ndarray
    first: np.ndarray
    pages: np.ndarray
    journal: np.ndarray | None = None
    journal_rows: int = 0

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def segments(self) -> int:
        return len(self.slots)

    @property
    def most_rows(self) -> int:
        """The most rows that a stream of this batch may have after it: what its pages hold."""
        return self.pages.shape[1] * PAGE_ROWS

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 [R], each row's position in its stream."""
        if self._is_one_row_each:
            return self.first
        counts = np.diff(self.starts)
        offsets = np.arange(self.rows, dtype=np.int32) - np.repeat(self.starts[:-1], counts)
        return (np.repeat(self.first, counts) + offsets).astype(np.int32)

    @cached_property
    def segment_of_row(self) -> np.ndarray:
        """int32 [R], the segment that each row belongs to."""
        each = np.arange(self.segments, dtype=np.int32)
        return each if self._is_one_row_each else np.repeat(each, np.diff(self.starts))

    @cached_property
    def _is_one_row_each(self) -> bool:
        return self.rows == self.segments and self.starts.tolist() == [*range(self.segments + 1)]


@dataclass(frozen=True)
class AttentionCache:
    """The pools of one attention layer, shared by all streams; a stream owns pages of them.

    keys, values: float16 bits (uint16 on the CPU) [pages, PAGE_ROWS, kv_heads, head_dim].
    index_raw: float32 [pages, PAGE_ROWS, index_dim], the indexer's raw key of every row.
    index_pooled: float32 [pages, PAGE_ROWS // block, index_dim], the normed and roped key of every finished block.
    """

    keys: Array
    values: Array
    index_raw: Array
    index_pooled: Array


@dataclass(frozen=True)
class Selection:
    """The finished blocks each row reads. blocks: int32 [R, B], ascending, the first counts[r] are valid.

    counts: int32 [R]. scores: one float32 [finished blocks of the row] array a row when asked for, else None.
    """

    blocks: Array
    counts: Array
    scores: list[Array] | None = None
