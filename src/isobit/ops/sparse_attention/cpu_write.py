"""Storing rows: keys and values as binary16, raw index keys, and the blocks that a row finishes."""

import numpy as np
from numba import njit

from isobit.ops.batch import PAGE_ROWS
from isobit.ops.scalar import half_bits, round_to_half, scalar_function
from isobit.ops.sparse_attention.kernels import norm_and_rotate, padded


@njit(nogil=True, cache=True, error_model="numpy")
def write_rows(
    sizes, eps, k, v, index_k, k_weight, index_weight, cosines, sines, segments, positions, pages,
    keys, values, raw, pooled, parts, first_part, last_part,
):  # fmt: skip
    """Store rows in the pools. All rows of a block belong to one part, so whoever finishes it has seen them all."""
    work = np.empty(padded(max(sizes.head_dim, sizes.index_dim)), np.float32)
    width, index_width = sizes.kv_heads * sizes.head_dim, sizes.index_dim
    start = np.int64(0)
    for row in range(len(positions)):
        position = np.int64(positions[row])
        if not first_part <= position // sizes.block % parts < last_part:
            continue
        page = np.int64(pages[segments[row], position // PAGE_ROWS])
        slot = page * PAGE_ROWS + position % PAGE_ROWS
        for head in range(0, width, sizes.head_dim):
            norm_and_rotate(k, row * width + head, k_weight, eps, cosines, sines, position, work, start)
            _store_halves(work, start, keys, slot * width + head, sizes.head_dim)
        _store_halves(v, row * width, values, slot * width, width)
        for i in range(index_width):
            raw[slot * index_width + i] = index_k[row * index_width + i]
        if (position + 1) % sizes.block == 0:
            first_slot, first_position = slot + 1 - sizes.block, position + 1 - sizes.block
            _average_rows(raw, first_slot * index_width, sizes.block, index_width, work)
            target = first_slot // sizes.block * index_width
            norm_and_rotate(work, start, index_weight, eps, cosines, sines, first_position, pooled, target)


@scalar_function
def _store_halves(x, at, halves, halves_at, width):
    for i in range(width):
        halves[halves_at + i] = half_bits(round_to_half(x[at + i]))


@scalar_function
def _average_rows(raw, at, rows, width, average):
    for i in range(width):
        total = raw[at + i]
        for row in range(1, rows):
            total += raw[at + row * width + i]
        average[i] = total / np.float32(rows)
