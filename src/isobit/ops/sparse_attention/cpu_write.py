"""Storing rows: keys and values as binary16, raw index keys, and the blocks that a row finishes."""

import numpy as np
from numba import njit, prange

from isobit.ops.batch import PAGE_ROWS
from isobit.ops.scalar import half_bits, round_to_half, scalar_function
from isobit.ops.sparse_attention.kernels import norm_and_rotate, padded


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def write_rows(
    parts, sizes, eps, k, v, index_k, k_weight, index_weight, cosines, sines, segments, positions, pages,
    keys, values, raw, pooled,
):  # fmt: skip
    """Store all rows in the pools. A block's rows belong to one part, so that whoever finishes it has seen them all."""
    for part in prange(parts):
        work = np.empty(padded(max(sizes.head_dim, sizes.index_dim)), np.float32)
        lanes = np.empty(32, np.float32)
        for row in range(len(positions)):
            position = np.int64(positions[row])
            if (position // sizes.block) % parts != part:
                continue
            page = np.int64(pages[segments[row], position // PAGE_ROWS])
            slot = page * PAGE_ROWS + position % PAGE_ROWS
            _store_key_and_value(sizes, eps, k, v, row, slot, position, k_weight, cosines, sines, keys, values, work, lanes)
            for i in range(sizes.index_dim):
                raw[slot * sizes.index_dim + i] = index_k[row * sizes.index_dim + i]
            if (position + 1) % sizes.block == 0:
                first = position + 1 - sizes.block
                _pool_block(sizes, eps, raw, slot, first, index_weight, cosines, sines, pooled, work, lanes)


@scalar_function
def _store_key_and_value(
    sizes, eps, k, v, row, slot, position, k_weight, cosines, sines, keys, values, work, lanes
):  # fmt: skip
    width = sizes.kv_heads * sizes.head_dim
    for head in range(sizes.kv_heads):
        offset = head * sizes.head_dim
        norm_and_rotate(k, row * width + offset, k_weight, eps, cosines, sines, position, work, 0, lanes)
        for i in range(sizes.head_dim):
            keys[slot * width + offset + i] = half_bits(round_to_half(work[i]))
    for i in range(width):
        values[slot * width + i] = half_bits(round_to_half(v[row * width + i]))


@scalar_function
def _pool_block(sizes, eps, raw, last_slot, first_position, index_weight, cosines, sines, pooled, work, lanes):
    """The mean of a block's raw index keys, normed and rotated at the block's first position."""
    width = sizes.index_dim
    first_slot = last_slot + 1 - sizes.block
    for i in range(width):
        total = raw[first_slot * width + i]
        for row in range(1, sizes.block):
            total += raw[(first_slot + row) * width + i]
        work[i] = total / np.float32(sizes.block)
    target = first_slot // sizes.block * width
    norm_and_rotate(work, 0, index_weight, eps, cosines, sines, first_position, pooled, target, lanes)
