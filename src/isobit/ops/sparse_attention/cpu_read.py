"""Attending over the selected keys: fixed parts of each row's list of keys, merged in order."""

import numpy as np
from numba import njit, prange

from isobit.ops.batch import PAGE_ROWS
from isobit.ops.scalar import ONE, ZERO, exp32, scalar_function, sigmoid32
from isobit.ops.sparse_attention.kernels import norm_and_rotate, padded
from isobit.ops.sparse_attention.vectors import GROUP, LANES, add_weighted, dots, widen

PART_KEYS = 256  # keys of one part of a row's list; part of the op's definition
TILE_KEYS = 16  # keys widened to float32 at a time, so that all query heads of a group share them
NEGATIVE_ZERO = np.float32(-0.0)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def read_few(
    parts, sizes, eps, q_gate, weight, cosines, sines, segments, positions, pages, keys, values,
    blocks, counts, most_key_parts, out,
):  # fmt: skip
    """Each part of a row's list, for one key-value head, is a unit of work; the units are dealt out in turn."""
    group_heads = sizes.heads // sizes.kv_heads
    record = padded(sizes.head_dim) + LANES
    unit_size = group_heads * record
    results = np.empty(len(positions) * sizes.kv_heads * most_key_parts * unit_size, np.float32)
    for part in prange(parts):
        work = _new_work(sizes)
        unit = 0
        for row in range(len(positions)):
            listed = _list_keys(sizes, pages, segments[row], positions[row], blocks, counts, row, work)
            for kv_head in range(sizes.kv_heads):
                for first in range(0, listed, PART_KEYS):
                    unit += 1
                    if unit % parts != part:
                        continue
                    place = (row * sizes.kv_heads + kv_head) * most_key_parts + first // PART_KEYS
                    _norm_queries(sizes, eps, q_gate, row, kv_head, weight, cosines, sines, positions[row], work)
                    last = min(first + PART_KEYS, listed)
                    _read_part(sizes, keys, values, kv_head, first, last, work, results, place * unit_size)
    for part in prange(parts):
        for unit in range(part, len(positions) * sizes.kv_heads, parts):
            row, kv_head = unit // sizes.kv_heads, unit % sizes.kv_heads
            at = unit * most_key_parts * unit_size
            key_parts = (_listed_keys(sizes, positions[row], counts[row]) + PART_KEYS - 1) // PART_KEYS
            for key_part in range(1, key_parts):
                _merge_part(sizes, results, at, at + key_part * unit_size)
            _finish_heads(sizes, q_gate, row, kv_head, results, at, out)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def read_many(
    parts, sizes, eps, q_gate, weight, cosines, sines, segments, positions, pages, keys, values,
    blocks, counts, most_key_parts, out,
):  # fmt: skip
    """Each row is computed by one part; neighbouring rows go to different parts, so that all are equally long."""
    for part in prange(parts):
        work = _new_work(sizes)
        unit_size = sizes.heads // sizes.kv_heads * (padded(sizes.head_dim) + LANES)
        results = np.empty(2 * unit_size, np.float32)
        for row in range(part, len(positions), parts):
            listed = _list_keys(sizes, pages, segments[row], positions[row], blocks, counts, row, work)
            for kv_head in range(sizes.kv_heads):
                _norm_queries(sizes, eps, q_gate, row, kv_head, weight, cosines, sines, positions[row], work)
                for first in range(0, listed, PART_KEYS):
                    last = min(first + PART_KEYS, listed)
                    at = 0 if first == 0 else unit_size
                    _read_part(sizes, keys, values, kv_head, first, last, work, results, at)
                    if first > 0:
                        _merge_part(sizes, results, 0, unit_size)
                _finish_heads(sizes, q_gate, row, kv_head, results, 0, out)


@scalar_function
def _new_work(sizes):
    """Scratch of one part: normed queries, scores, a tile of widened rows and its offsets, pool rows of keys, lanes."""
    width = padded(sizes.head_dim)
    group_heads = sizes.heads // sizes.kv_heads
    queries = np.full(group_heads * width, NEGATIVE_ZERO, np.float32)
    scores = np.empty(group_heads * PART_KEYS, np.float32)
    tile = np.zeros(TILE_KEYS * width, np.float32)
    pool_rows = np.empty((sizes.kept_blocks + 1) * sizes.block, np.int64)
    return queries, scores, tile, np.empty(GROUP, np.int64), pool_rows, np.empty(32, np.float32)


@scalar_function
def _listed_keys(sizes, position, count):
    """How many keys a row reads: its selected blocks' and those of the unfinished block."""
    return count * sizes.block + (position + 1) % sizes.block


@scalar_function
def _list_keys(sizes, pages, segment, position, blocks, counts, row, work):
    """Put the pool rows of a row's keys into the scratch, by ascending position; returns how many they are."""
    pool_rows = work[4]
    listed = 0
    for i in range(counts[row]):
        start = np.int64(blocks[row, i]) * sizes.block
        pool_start = np.int64(pages[segment, start // PAGE_ROWS]) * PAGE_ROWS + start % PAGE_ROWS
        for offset in range(sizes.block):
            pool_rows[listed] = pool_start + offset
            listed += 1
    tail = (position + 1) % sizes.block
    start = np.int64(position) + 1 - tail
    for at in range(start, start + tail):
        pool_rows[listed] = np.int64(pages[segment, at // PAGE_ROWS]) * PAGE_ROWS + at % PAGE_ROWS
        listed += 1
    return listed


@scalar_function
def _norm_queries(sizes, eps, q_gate, row, kv_head, weight, cosines, sines, position, work):
    queries, _, _, _, _, lanes = work
    group_heads = sizes.heads // sizes.kv_heads
    for i in range(group_heads):
        source = (row * sizes.heads + kv_head * group_heads + i) * 2 * sizes.head_dim
        target = i * padded(sizes.head_dim)
        norm_and_rotate(q_gate, source, weight, eps, cosines, sines, position, queries, target, lanes)


@scalar_function
def _read_part(sizes, keys, values, kv_head, first, last, work, results, at):
    """One part for the query heads of a key-value head: each head's record is [max, sum, .., weighted values]."""
    _score_keys(sizes, keys, kv_head, first, last, work)
    scores = work[1]
    group_heads = sizes.heads // sizes.kv_heads
    record = padded(sizes.head_dim) + LANES
    for i in range(group_heads):
        _weigh(scores, i * PART_KEYS, last - first, results, at + i * record)
        results[at + i * record + LANES : at + (i + 1) * record] = ZERO
    _add_values(sizes, values, kv_head, first, last, work, results, at)


@scalar_function
def _score_keys(sizes, keys, kv_head, first, last, work):
    queries, scores, tile, offsets, pool_rows, _ = work
    width = padded(sizes.head_dim)
    scale = ONE / np.sqrt(np.float32(sizes.head_dim))
    for tile_first in range(first, last, TILE_KEYS):
        count = min(TILE_KEYS, last - tile_first)
        _widen_rows(sizes, keys, kv_head, tile_first, count, pool_rows, tile)
        for start in range(0, count, GROUP):
            for i in range(GROUP):
                offsets[i] = min(start + i, count - 1) * width
            for i in range(sizes.heads // sizes.kv_heads):
                target = i * PART_KEYS + tile_first - first + start
                dots(queries, i * width, tile, offsets, width, scores, target)
                for j in range(target, target + GROUP):
                    scores[j] *= scale


@scalar_function
def _widen_rows(sizes, halves, kv_head, first, count, pool_rows, tile):
    width = padded(sizes.head_dim)
    for i in range(count):
        source = (pool_rows[first + i] * sizes.kv_heads + kv_head) * sizes.head_dim
        widen(halves, source, sizes.head_dim, tile, i * width)


@scalar_function
def _weigh(scores, at, count, results, record_at):
    """Scores become exp(score - max); the record gets the max and the sum."""
    highest = scores[at]
    for i in range(at + 1, at + count):
        highest = scores[i] if scores[i] > highest else highest
    for i in range(at, at + count):
        scores[i] = exp32(scores[i] - highest)
    total = ZERO
    for i in range(at, at + count):
        total += scores[i]
    results[record_at] = highest
    results[record_at + 1] = total


@scalar_function
def _add_values(sizes, values, kv_head, first, last, work, results, at):
    _, scores, tile, _, pool_rows, _ = work
    width = padded(sizes.head_dim)
    record = width + LANES
    for tile_first in range(first, last, TILE_KEYS):
        count = min(TILE_KEYS, last - tile_first)
        _widen_rows(sizes, values, kv_head, tile_first, count, pool_rows, tile)
        for i in range(sizes.heads // sizes.kv_heads):
            target = at + i * record + LANES
            add_weighted(results, target, width, scores, i * PART_KEYS + tile_first - first, count, tile, 0, width)


@scalar_function
def _merge_part(sizes, results, at, other_at):
    """Add the records at `other_at` to those at `at`."""
    record = padded(sizes.head_dim) + LANES
    for i in range(sizes.heads // sizes.kv_heads):
        ours, theirs = at + i * record, other_at + i * record
        highest = results[ours] if results[ours] > results[theirs] else results[theirs]
        scale, other_scale = exp32(results[ours] - highest), exp32(results[theirs] - highest)
        results[ours] = highest
        results[ours + 1] = results[ours + 1] * scale + results[theirs + 1] * other_scale
        for j in range(LANES, record):
            results[ours + j] = results[ours + j] * scale + results[theirs + j] * other_scale


@scalar_function
def _finish_heads(sizes, q_gate, row, kv_head, results, at, out):
    group_heads = sizes.heads // sizes.kv_heads
    record = padded(sizes.head_dim) + LANES
    for i in range(group_heads):
        head = row * sizes.heads + kv_head * group_heads + i
        source, target, gate = at + i * record, head * sizes.head_dim, (2 * head + 1) * sizes.head_dim
        total = results[source + 1]
        for j in range(sizes.head_dim):
            out[target + j] = (results[source + LANES + j] / total) * sigmoid32(q_gate[gate + j])
