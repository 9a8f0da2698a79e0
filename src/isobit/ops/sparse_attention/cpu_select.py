"""Choosing the blocks that rows read: scores of all finished blocks, then the best of them."""

import numpy as np
from numba import njit

from isobit.ops.batch import PAGE_ROWS
from isobit.ops.scalar import ZERO, float_bits, scalar_function
from isobit.ops.sparse_attention.kernels import NEGATIVE_ZERO, filled, norm_and_rotate, padded
from isobit.ops.sparse_attention.vectors import GROUP, dots

BINS = 2048  # of the first of the three radix passes over a score's 31 bits


@njit(nogil=True, cache=True, error_model="numpy")
def score_rows(
    sizes, eps, index_q, weight, cosines, sines, starts, positions, pages, pooled,
    first_row, last_row, together, span, totals, parts, first_part, last_part,
):  # fmt: skip
    """totals[row - first_row, b] = the score of finished block b, for rows first_row to last_row - 1.

    The work is cut into `together` rows of one segment by `span` blocks (a multiple of 8), dealt out to the parts.
    Columns up to the next multiple of 8 are written too. Values of `together` and `span` change no byte.
    """
    width, heads = padded(sizes.index_dim), sizes.index_heads
    queries = filled(together * heads * width, NEGATIVE_ZERO)
    tile = filled(GROUP * width, ZERO)
    source = pooled if width == sizes.index_dim else tile
    offsets = np.empty(GROUP, np.int64)
    products, sums = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    scale = np.float32(1.0 / np.sqrt(np.float64(sizes.index_dim)))
    unit = 0
    for segment in range(len(starts) - 1):
        segment_first, segment_last = max(starts[segment], first_row), min(starts[segment + 1], last_row)
        for group_first in range(segment_first, segment_last, together):
            group_last = min(group_first + together, segment_last)
            finished = (np.int64(positions[group_last - 1]) + 1) // sizes.block
            for span_first in range(0, finished, span):
                unit += 1
                if not first_part <= unit % parts < last_part:
                    continue
                _norm_queries(sizes, eps, index_q, weight, cosines, sines, positions, group_first, group_last, queries)
                for tile_first in range(span_first, min(span_first + span, finished), GROUP):
                    _locate_keys(sizes, pages, segment, tile_first, finished, offsets)
                    if width != sizes.index_dim:
                        _copy_keys(sizes, pooled, tile, width, offsets)
                    for member in range(group_last - group_first):
                        row = group_first + member - first_row
                        at = member * heads * width
                        _score_tile(at, heads, width, queries, source, offsets, products, sums)
                        for i in range(GROUP):
                            totals[row, tile_first + i] = sums[i] * scale


@scalar_function
def _norm_queries(sizes, eps, index_q, weight, cosines, sines, positions, first_row, last_row, queries):
    width = padded(sizes.index_dim)
    for head in range(first_row * sizes.index_heads, last_row * sizes.index_heads):
        target = (head - first_row * sizes.index_heads) * width
        position = np.int64(positions[head // sizes.index_heads])
        norm_and_rotate(index_q, head * sizes.index_dim, weight, eps, cosines, sines, position, queries, target)


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
def _score_tile(at, heads, width, queries, keys, offsets, products, sums):
    """sums[i] = the sum over heads of the positive parts of the dot products with the i-th of eight keys."""
    for i in range(GROUP):
        sums[i] = ZERO
    for head in range(heads):
        dots(queries, at + head * width, keys, offsets, width, products)
        for i in range(GROUP):
            sums[i] += products[i] if products[i] > ZERO else ZERO


@njit(nogil=True, cache=True, error_model="numpy")
def choose_blocks(sizes, positions, first_row, last_row, totals, blocks, counts, parts, first_part, last_part):
    """The kept blocks of rows first_row to last_row - 1, ascending, then -1; all finished ones if they are no more."""
    bins = np.empty(BINS, np.int32)
    kept = sizes.kept_blocks
    for row in range(first_row, last_row):
        if not first_part <= row % parts < last_part:
            continue
        finished = (np.int64(positions[row]) + 1) // sizes.block
        threshold, spare = np.int32(-1), 0
        if finished > kept:
            threshold, spare = _threshold(totals, row - first_row, finished, kept, bins)
        count = 0
        for block in range(finished):
            key = float_bits(totals[row - first_row, block]) if finished > kept else np.int32(0)
            equal = key == threshold and spare > 0
            spare -= equal
            if equal or key > threshold:
                blocks[row, count] = block
                count += 1
        counts[row] = count
        for i in range(count, kept):
            blocks[row, i] = -1


@scalar_function
def _threshold(totals, row, count, best, bins):
    """(bits of the `best`-th largest of a row's scores, how many equal ones belong to the best); none is negative."""
    threshold = np.int32(0)
    for step in range(3):
        shift, width = np.int32(20 - 10 * step), np.int32(11 if step == 0 else 10)
        highest = np.int32((1 << width) - 1)
        for i in range(highest + 1):
            bins[i] = 0
        for i in range(count):
            key = float_bits(totals[row, i]) >> shift
            if key >> width == threshold:
                bins[key & highest] += 1
        digit = highest
        while bins[digit] < best:
            best -= bins[digit]
            digit -= 1
        threshold = (threshold << width) | digit
    return threshold, best
