"""Attending over the selected keys: fixed parts of each row's list of keys, merged in order."""

import numpy as np
from numba import njit

from isobit.ops.batch import PAGE_ROWS
from isobit.ops.lanes import LANES
from isobit.ops.scalar import ZERO, exp32, scalar_function, sigmoid32
from isobit.ops.sparse_attention.kernels import NEGATIVE_ZERO, filled, norm_and_rotate, padded
from isobit.ops.sparse_attention.vectors import GROUP, add_weighted, dots, widen_rows

PART_KEYS = 256  # keys of one part of a row's list; part of the op's definition
TILE_KEYS = 16  # keys widened to float32 at a time, so that all query heads of a group share them


@njit(nogil=True, cache=True, error_model="numpy")
def read_parts(
    sizes, eps, q_gate, weight, cosines, sines, segments, positions, pages, keys, values, blocks, counts,
    first_row, last_row, most_parts, records, parts, first_part, last_part,
):  # fmt: skip
    """The records of rows first_row to last_row - 1: [row, head, key part] of [max, sum, 30 unused, weighted values].

    A unit of work is a row's key part for one key-value head; the units are dealt out to the parts in turn.
    """
    width, group_heads = padded(sizes.head_dim), sizes.heads // sizes.kv_heads
    queries = filled(group_heads * width, NEGATIVE_ZERO)
    scores = np.empty(group_heads * PART_KEYS, np.float32)
    tile = filled(TILE_KEYS * width, ZERO)
    offsets, products = np.empty(GROUP, np.int64), np.empty(GROUP, np.float32)
    places = np.empty(PART_KEYS, np.int64)
    head_step = most_parts * (LANES + width)
    for row in range(first_row, last_row):
        position = np.int64(positions[row])
        listed = np.int64(counts[row]) * sizes.block + (position + 1) % sizes.block
        unit = row
        for kv_head in range(sizes.kv_heads):
            first_head = kv_head * group_heads
            for first in range(0, listed, PART_KEYS):
                unit += 1
                if not first_part <= unit % parts < last_part:
                    continue
                count = min(PART_KEYS, listed - first)
                _locate_keys(sizes, pages, segments[row], position, blocks, counts, row, kv_head, first, count, places)
                for i in range(group_heads):
                    source = (row * sizes.heads + first_head + i) * 2 * sizes.head_dim
                    norm_and_rotate(q_gate, source, weight, eps, cosines, sines, position, queries, i * width)
                _score_keys(sizes, keys, places, count, queries, tile, offsets, products, scores)
                head = (row - first_row) * sizes.heads + first_head
                at = head * head_step + first // PART_KEYS * (LANES + width)
                for i in range(group_heads):
                    _weigh(scores, i * PART_KEYS, count, records, at + i * head_step)
                _add_values(sizes, values, places, count, scores, tile, records, at, head_step)


@scalar_function
def _locate_keys(sizes, pages, segment, position, blocks, counts, row, kv_head, first, count, places):
    """Where the keys of one part of a row's list begin in the pools: selected blocks, then the unfinished one."""
    selected = np.int64(counts[row]) * sizes.block
    tail = (position + 1) // sizes.block * sizes.block
    for i in range(count):
        rank = first + i
        at = tail + rank - selected
        if rank < selected:
            at = np.int64(blocks[row, rank // sizes.block]) * sizes.block + rank % sizes.block
        slot = np.int64(pages[segment, at // PAGE_ROWS]) * PAGE_ROWS + at % PAGE_ROWS
        places[i] = (slot * sizes.kv_heads + kv_head) * sizes.head_dim


@scalar_function
def _score_keys(sizes, keys, places, count, queries, tile, offsets, products, scores):
    """scores[head, i] = the scaled dot product of a query head and the i-th key; up to a multiple of 8 are written."""
    width = padded(sizes.head_dim)
    scale = np.float32(1.0 / np.sqrt(np.float64(sizes.head_dim)))
    for first in range(0, count, TILE_KEYS):
        found = min(TILE_KEYS, count - first)
        widen_rows(keys, places, first, found, sizes.head_dim, tile, width)
        for start in range(0, found, GROUP):
            for i in range(GROUP):
                offsets[i] = min(start + i, found - 1) * width
            for head in range(sizes.heads // sizes.kv_heads):
                dots(queries, head * width, tile, offsets, width, products)
                for i in range(GROUP):
                    scores[head * PART_KEYS + first + start + i] = products[i] * scale


@scalar_function
def _weigh(scores, at, count, records, record_at):
    """Scores become exp(score - max); the record gets the max and the sum."""
    highest = scores[at]
    for i in range(at + 1, at + count):
        highest = scores[i] if scores[i] > highest else highest
    for i in range(at, at + count):
        scores[i] = exp32(scores[i] - highest)
    total = ZERO
    for i in range(at, at + count):
        total += scores[i]
    records[record_at] = highest
    records[record_at + 1] = total


@scalar_function
def _add_values(sizes, values, places, count, scores, tile, records, at, head_step):
    width = padded(sizes.head_dim)
    for first in range(0, count, TILE_KEYS):
        found = min(TILE_KEYS, count - first)
        widen_rows(values, places, first, found, sizes.head_dim, tile, width)
        for head in range(sizes.heads // sizes.kv_heads):
            target = at + head * head_step + LANES
            if first == 0:
                for i in range(target, target + width):
                    records[i] = ZERO
            add_weighted(records, target, width, scores, head * PART_KEYS + first, found, tile, 0, width)


@njit(nogil=True, cache=True, error_model="numpy")
def finish_rows(
    sizes, q_gate, positions, counts, first_row, last_row, most_parts, records, out, parts, first_part, last_part
):  # fmt: skip
    """Merge the key parts of each head in order, divide by the sum, and multiply by the gate's sigmoid."""
    width = sizes.head_dim
    record = LANES + padded(width)
    for row in range(first_row, last_row):
        if not first_part <= row % parts < last_part:
            continue
        listed = np.int64(counts[row]) * sizes.block + (np.int64(positions[row]) + 1) % sizes.block
        for head in range(sizes.heads):
            at = ((row - first_row) * sizes.heads + head) * most_parts * record
            for key_part in range(1, (listed + PART_KEYS - 1) // PART_KEYS):
                _merge_record(records, at, at + key_part * record, record)
            total = records[at + 1]
            target = row * sizes.heads + head
            for i in range(width):
                gate = sigmoid32(q_gate[(2 * target + 1) * width + i])
                out[target * width + i] = (records[at + LANES + i] / total) * gate


@scalar_function
def _merge_record(records, at, other, size):
    """Add the record at `other` to the one at `at`, both scaled to the larger of their maxima."""
    highest = records[at] if records[at] > records[other] else records[other]
    scale, other_scale = exp32(records[at] - highest), exp32(records[other] - highest)
    records[at] = highest
    records[at + 1] = records[at + 1] * scale + records[other + 1] * other_scale
    for i in range(LANES, size):
        records[at + i] = records[at + i] * scale + records[other + i] * other_scale
