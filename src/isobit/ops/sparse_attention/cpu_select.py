"""Choosing the blocks that rows read: scores of all finished blocks, then the best of them."""

import numpy as np
from numba import njit, prange

from isobit.ops.batch import PAGE_ROWS
from isobit.ops.scalar import ONE, ZERO, float_bits, scalar_function
from isobit.ops.sparse_attention.kernels import norm_and_rotate, padded
from isobit.ops.sparse_attention.vectors import GROUP, dots

ROW_GROUP = 8  # rows of one segment that share a scan of the pooled keys
BINS = 2048  # of the first of the three radix passes over a score's 31 bits
NEGATIVE_ZERO = np.float32(-0.0)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def select_few(
    parts, sizes, eps, queries, weight, cosines, sines, starts, segments, positions, pages, pooled,
    stride, keep, kept, kept_starts, blocks, counts,
):  # fmt: skip
    """All parts share each row's scan: part i scores the i-th range of its blocks."""
    totals = np.empty(len(positions) * stride, np.float32)
    for part in prange(parts):
        work = _new_work(sizes)
        for row in range(len(positions)):
            finished = (np.int64(positions[row]) + 1) // sizes.block
            if finished <= sizes.kept_blocks and not keep:
                continue
            share = (finished + parts * GROUP - 1) // (parts * GROUP) * GROUP
            first = part * share
            last = min(first + share, finished)
            if first < last:
                _norm_queries(sizes, eps, queries, row, 1, weight, cosines, sines, positions, work)
                _score_blocks(sizes, 1, pooled, pages, segments[row], first, last, work, totals, row * stride, stride)
    for part in prange(parts):
        bins = np.empty(BINS, np.int32)
        for row in range(part, len(positions), parts):
            finished = (np.int64(positions[row]) + 1) // sizes.block
            _finish_row(sizes, row, finished, totals, row * stride, keep, kept, kept_starts, bins, blocks, counts)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def select_many(
    parts, sizes, eps, queries, weight, cosines, sines, starts, segments, positions, pages, pooled,
    stride, keep, kept, kept_starts, blocks, counts,
):  # fmt: skip
    """Groups of a segment's rows share a scan; the groups are dealt out to the parts in turn."""
    for part in prange(parts):
        work = _new_work(sizes)
        bins = np.empty(BINS, np.int32)
        totals = np.empty(ROW_GROUP * stride, np.float32)
        group = 0
        for segment in range(len(starts) - 1):
            for first_row in range(starts[segment], starts[segment + 1], ROW_GROUP):
                group += 1
                if group % parts != part:
                    continue
                members = min(ROW_GROUP, starts[segment + 1] - first_row)
                finished = (np.int64(positions[first_row + members - 1]) + 1) // sizes.block
                if finished > sizes.kept_blocks or keep:
                    _norm_queries(sizes, eps, queries, first_row, members, weight, cosines, sines, positions, work)
                    _score_blocks(sizes, members, pooled, pages, segment, 0, finished, work, totals, 0, stride)
                for member in range(members):
                    row = first_row + member
                    finished = (np.int64(positions[row]) + 1) // sizes.block
                    at = member * stride
                    _finish_row(sizes, row, finished, totals, at, keep, kept, kept_starts, bins, blocks, counts)


@scalar_function
def _new_work(sizes):
    """Scratch of one part: normed queries, a tile of padded keys, their offsets, eight dot products, lanes."""
    width = padded(sizes.index_dim)
    queries = np.full(ROW_GROUP * sizes.index_heads * width, NEGATIVE_ZERO, np.float32)
    tile = np.zeros(GROUP * width, np.float32)
    return queries, tile, np.empty(GROUP, np.int64), np.empty(GROUP, np.float32), np.empty(32, np.float32)


@scalar_function
def _norm_queries(sizes, eps, queries, first_row, members, weight, cosines, sines, positions, work):
    normed, _, _, _, lanes = work
    width = padded(sizes.index_dim)
    for member in range(members):
        row = first_row + member
        for head in range(sizes.index_heads):
            source = (row * sizes.index_heads + head) * sizes.index_dim
            target = (member * sizes.index_heads + head) * width
            norm_and_rotate(queries, source, weight, eps, cosines, sines, positions[row], normed, target, lanes)


@scalar_function
def _score_blocks(sizes, members, pooled, pages, segment, first, last, work, totals, totals_at, stride):
    """totals[totals_at + member*stride + b] = the score of block b, first <= b < last, for each member row."""
    normed, tile, offsets, products, _ = work
    width = padded(sizes.index_dim)
    scale = ONE / np.sqrt(np.float32(sizes.index_dim))
    source = pooled
    if width != sizes.index_dim:
        source = tile
    for tile_first in range(first, last, GROUP):
        _locate_keys(sizes, pages, segment, tile_first, last, offsets)
        if width != sizes.index_dim:
            _copy_keys(sizes, pooled, tile, width, offsets)
        for member in range(members):
            at = totals_at + member * stride + tile_first
            totals[at : at + GROUP] = ZERO
            for head in range(sizes.index_heads):
                dots(normed, (member * sizes.index_heads + head) * width, source, offsets, width, products, 0)
                for i in range(GROUP):
                    totals[at + i] += products[i] if products[i] > ZERO else ZERO
            for i in range(GROUP):
                totals[at + i] *= scale


@scalar_function
def _locate_keys(sizes, pages, segment, first, last, offsets):
    """Where the pooled keys of eight blocks begin; the last block stands in for those past it."""
    page_blocks = PAGE_ROWS // sizes.block
    for i in range(GROUP):
        block = min(first + i, last - 1)
        page = np.int64(pages[segment, block // page_blocks])
        offsets[i] = (page * page_blocks + block % page_blocks) * sizes.index_dim


@scalar_function
def _copy_keys(sizes, pooled, tile, width, offsets):
    for i in range(GROUP):
        for column in range(sizes.index_dim):
            tile[i * width + column] = pooled[offsets[i] + column]
        offsets[i] = i * width


@scalar_function
def _finish_row(sizes, row, finished, totals, at, keep, kept, kept_starts, bins, blocks, counts):
    """Write a row's selection, and its scores if they are kept."""
    if keep:
        for block in range(finished):
            kept[kept_starts[row] + block] = totals[at + block]
    count = min(finished, sizes.kept_blocks)
    counts[row] = count
    if finished <= sizes.kept_blocks:
        for block in range(finished):
            blocks[row, block] = block
    else:
        _take_best(totals, at, finished, count, bins, blocks, row)
    for i in range(count, blocks.shape[1]):
        blocks[row, i] = -1


@scalar_function
def _take_best(scores, at, count, best, bins, blocks, row):
    """The `best` largest of count scores (none negative), ascending by place; ties go to the lower place."""
    threshold = np.int32(0)
    at_threshold = best
    for step in range(3):
        shift = np.int32(20 - 10 * step)
        width = np.int32(11 if step == 0 else 10)
        mask = np.int32((1 << width) - 1)
        bins[: mask + 1] = 0
        for i in range(count):
            key = float_bits(scores[at + i])
            if (key >> shift) >> width == threshold:
                bins[(key >> shift) & mask] += 1
        digit = mask
        while bins[digit] < at_threshold:
            at_threshold -= bins[digit]
            digit -= 1
        threshold = (threshold << width) | digit
    taken = 0
    for i in range(count):
        key = float_bits(scores[at + i])
        equal = key == threshold and at_threshold > 0
        if equal:
            at_threshold -= 1
        if equal or key > threshold:
            blocks[row, taken] = i
            taken += 1
