"""The gated read of a few rows at a time, all of its steps while their normed streams are near in the cache.

Its plain linear layers run in the pieces of `linear.product`, on blocks of 128 columns: [blocks, rows, 128] float32.
"""

import numpy as np
from numba import njit

from isobit.ops.lanes import LANES, lanes_load_first, lanes_store_first
from isobit.ops.linear.blocks import BLOCK, FEW_ROWS
from isobit.ops.linear.memory import address_of, field
from isobit.ops.linear.product import (
    OUTPUTS,
    PANELS_FLOATS,
    TILE,
    TILE_COLUMNS,
    chains_of_few,
    chains_of_rows,
    inlined,
    input_blocks,
)
from isobit.ops.norm.cpu import inverse_rms_at, scale_at
from isobit.ops.scalar import ZERO, sigmoid32, silu32

TWO = np.float32(2.0)


@njit(nogil=True, cache=True, error_model="numpy")
def read_rows(streams, weight, eps, count, down, up, inject, most_rows, mixed, written, injection, first, last):
    """Rows first to last - 1 of mixed [R, H] and injection [R, written] from streams [R, count, H], all given flat.

    weight: the norm's, [count*H]. down, up, inject: records of plain layers without bias. most_rows: taken at a time.
    """
    most_rows = min(most_rows, last - first)
    normed = np.empty(input_blocks(address_of(down)) * most_rows * BLOCK, np.float32)
    low = np.empty(input_blocks(address_of(up)) * most_rows * BLOCK, np.float32)
    scratch = np.empty(PANELS_FLOATS + 3 * most_rows * BLOCK, np.float32)
    sums = np.empty(most_rows * BLOCK, np.float32)
    for start in range(first, last, most_rows):
        rows = min(most_rows, last - start)
        for row in range(rows):
            _norm_streams(streams, start + row, weight, eps, count, normed, row, rows)
        for column in range(0, field(address_of(down), OUTPUTS), BLOCK):
            _chains(down, column, rows, address_of(normed), address_of(low) + 4 * column * rows, scratch)
        _activate_rows(low, field(address_of(down), OUTPUTS), count, rows)
        if written > 0:
            _chains(inject, 0, rows, address_of(normed), address_of(sums), scratch)
            for row in range(rows):
                write_injection(sums, row * BLOCK, written, count, injection, (start + row) * written)
        for column in range(0, weight.size, BLOCK):
            _chains(up, column, rows, address_of(low), address_of(sums), scratch)
            _mix_rows(sums, normed, column, rows, count, weight.size // count, mixed, start)


@inlined
def _norm_streams(streams, row, weight, eps, count, normed, place, rows):
    """The normed streams of a row, into `place` of each block of `rows` rows."""
    wide = weight.size
    hidden = wide // count
    for begin in range(0, wide, hidden):
        inverse = inverse_rms_at(streams, row * wide + begin, hidden, eps)
        at = begin
        while at < begin + hidden:
            run = min(BLOCK - at % BLOCK, begin + hidden - at)
            target = (at // BLOCK * rows + place) * BLOCK + at % BLOCK
            scale_at(streams, row * wide + at, inverse, weight, at, run, normed, target)
            at += run
    for at in range(wide, -(-wide // BLOCK) * BLOCK):
        normed[(at // BLOCK * rows + place) * BLOCK + at % BLOCK] = ZERO


@inlined
def _chains(record, column, rows, prepared, sums, scratch):
    """A layer's chains for at most 128 outputs from `column`, to address sums: [rows, 128]."""
    layer = address_of(record)
    columns = min(BLOCK, field(layer, TILE_COLUMNS) * TILE - column)
    panels = address_of(scratch)
    totals = panels + 4 * PANELS_FLOATS
    if rows <= FEW_ROWS:
        chains_of_few(layer, column, columns, rows, prepared, sums, totals, panels)
    else:
        chains_of_rows(layer, column, columns, rows, prepared, sums, totals, panels)


@inlined
def activate(low, at, count, streams):
    """low = silu(low / streams), `count` values from flat element `at`."""
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        lanes_store_first(low, at + i, silu32(lanes_load_first(low, at + i, some) / np.float32(streams)), some)


@inlined
def write_injection(sums, at, count, streams, injection, target):
    """injection = 2 * sigmoid(sums / streams), `count` values between flat elements."""
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        value = TWO * sigmoid32(lanes_load_first(sums, at + i, some) / np.float32(streams))
        lanes_store_first(injection, target + i, value, some)


@inlined
def mix(up, up_at, normed, normed_at, count, stream, streams, mixed, target):
    """Add sigmoid(up) * normed of one stream to `mixed`, `count` values; the first begins, the last divides."""
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        value = sigmoid32(lanes_load_first(up, up_at + i, some)) * lanes_load_first(normed, normed_at + i, some)
        if stream > 0:
            value = lanes_load_first(mixed, target + i, some) + value
        if stream == streams - 1:
            value = value / np.float32(streams)
        lanes_store_first(mixed, target + i, value, some)


@inlined
def _activate_rows(low, rank, streams, rows):
    """silu(low / streams) in place, and zeros up to whole tiles, as the next layer reads it."""
    for column in range(0, rank, BLOCK):
        count = min(BLOCK, rank - column)
        for row in range(rows):
            at = column * rows + row * BLOCK
            activate(low, at, count, streams)
            for i in range(count, -(-count // TILE) * TILE):
                low[at + i] = ZERO


@inlined
def _mix_rows(sums, normed, column, rows, streams, hidden, mixed, first_row):
    """Mix 128 columns of all streams, from `column`: runs of columns of one stream."""
    end = min(column + BLOCK, streams * hidden)
    for row in range(rows):
        at = column
        while at < end:
            count = min(hidden - at % hidden, end - at)
            source, target = row * BLOCK + at - column, (first_row + row) * hidden + at % hidden
            mix(sums, source, normed, column * rows + source, count, at // hidden, streams, mixed, target)
            at += count
