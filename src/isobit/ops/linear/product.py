"""Rows times a stored weight matrix: the two ways a linear layer is computed, with equal bytes.

*Few rows*: tiles are read in the order they lie in; one row's chains take them from registers, a few rows' right after
they are decoded. *In panels*: tile columns are decoded to float32 for 128 inputs, then multiplied with all rows in
pairs of columns, a group of rows at a time.

Kernels know a layer by the address of its record, int64 fields of which some are addresses in turn.
"""

import numpy as np
from numba import cfunc, njit, types

from isobit.ops.linear import blocks
from isobit.ops.linear.blocks import BLOCK, ROW_BYTES
from isobit.ops.linear.memory import call, copy_floats, field, float_at, place_of, put_float, zero_floats

inlined = njit(forceinline=True, nogil=True, error_model="numpy")

INPUTS = 0
OUTPUTS = 1
TILE_ROWS = 2
TILE_COLUMNS = 3
TILES = 4
TILE_BYTES = 5
DECODE = 6
MULTIPLY_ROW = 7
INPUT_SCALES = 8  # of halves; 0 = plain weights, no rotation
OUTPUT_SCALES = 9  # of halves
BIAS = 10  # of float32; 0 = none
COLUMN_UNIT = 11  # outputs that one thread must compute together
MULTIPLY_PANELS = 12
ROTATE_INPUT = 13
ROTATE_OUTPUT = 14
CLOSE_SHARD = 15
PREPARE_BLOCKS = 16
CHAINS_OF_FEW = 17
CHAINS_OF_ROWS = 18
FINISH_ROW = 19
MULTIPLY_FEW = 20
FIELDS = 21

TILE = 16
BLOCK_TILES = BLOCK // TILE
PAIR_COLUMNS = 2 * TILE
TILES_FLOATS = BLOCK_TILES * TILE * TILE  # tiles decoded at a time for few rows
PANELS_FLOATS = BLOCK * BLOCK  # panels of one block of outputs for one block of inputs
NEAR_ROWS = 48  # rows of which a block of inputs stays in the nearest cache beside a pair of panels
NEAR_SUMS = 32  # blocks of 128 sums that stay in the nearest cache while few rows go through a row of tiles
LONG_INPUTS = 4096
LONG_SHARDS = 4


@inlined
def k_shards(layer):
    """How many shards the sum over inputs has: a function of the stored number of inputs alone."""
    return LONG_SHARDS if field(layer, TILE_ROWS) * TILE >= LONG_INPUTS else 1


@inlined
def input_blocks(layer):
    """How many blocks of 128 inputs the layer has, the last perhaps short."""
    return (field(layer, TILE_ROWS) + BLOCK_TILES - 1) // BLOCK_TILES


@inlined
def real_columns(layer, column, last_column):
    """How many outputs from `column` are not padding, up to `last_column` and at most a block."""
    return max(min(min(column + BLOCK, last_column), field(layer, OUTPUTS)) - column, 0)


@inlined
def prepare_row(x, layer, prepared, block_stride, spare):
    """The row at address x as the chains read it: rotated and rounded, or as it is; zeros up to whole blocks.

    Block b goes to prepared + b * block_stride. spare: room for 128 float32.
    """
    prepare_blocks(x, layer, 0, input_blocks(layer), prepared, block_stride, spare)


@inlined
def prepare_blocks(x, layer, first, last, prepared, block_stride, spare):
    """The same for blocks first to last - 1 of the row."""
    call(field(layer, PREPARE_BLOCKS), (x, layer, first, last, prepared, block_stride, spare))


@cfunc(types.void(*[types.int64] * 7), cache=True)
def _prepare_blocks(x, layer, first, last, prepared, block_stride, spare):
    inputs = field(layer, INPUTS)
    scales = field(layer, INPUT_SCALES)
    for block in range(first, last):
        column = block * BLOCK
        count = min(max(inputs - column, 0), BLOCK)
        source, target = x + 4 * column, prepared + block * block_stride
        if count < BLOCK:
            zero_floats(spare, BLOCK)
            copy_floats(source, spare, count)
            source = spare
        if scales != 0:
            call(field(layer, ROTATE_INPUT), (source, scales + 2 * column, target))
        else:
            copy_floats(source, target, BLOCK)


@inlined
def finish_row(sums, layer, column, count, out, spare):
    """The outputs `column` to column + count of one row, at address out, from the block's chains at address sums."""
    call(field(layer, FINISH_ROW), (sums, layer, column, count, out, spare))


@cfunc(types.void(*[types.int64] * 6), cache=True)
def _finish_row(sums, layer, column, count, out, spare):
    bias = field(layer, BIAS)
    source = sums
    if field(layer, OUTPUT_SCALES) != 0:
        source = out if count == BLOCK else spare
        call(field(layer, ROTATE_OUTPUT), (sums, field(layer, OUTPUT_SCALES) + 2 * column, source))
    if source != out:
        copy_floats(source, out, count)
    if bias != 0:
        for i in range(count):
            put_float(out + 4 * i, float_at(out + 4 * i) + float_at(bias + 4 * (column + i)))


@inlined
def close_step(shard, shards):
    """Which step of `blocks.close_shard` a shard is."""
    if shard == 0:
        return 0
    return 2 if shard == shards - 1 else 1


@inlined
def chains_of_few(layer, column, columns, rows, prepared, sums, totals, tiles_room):
    """Chains of `columns` outputs (a multiple of 16) from `column` for at most FEW_ROWS prepared rows.

    prepared: [blocks of inputs, rows, 128]. sums: float32 [blocks of outputs, rows, 128], the result. totals: float64
    of that size, if there are shards. tiles_room: for more than one row, room for BLOCK_TILES decoded tiles.
    """
    call(field(layer, CHAINS_OF_FEW), (layer, column, columns, rows, prepared, sums, totals, tiles_room))


@inlined
def _carry_few(layer, tiles, row_stride, first, last, begin, end, rows, prepared, sums, tiles_room):
    """Carry chains over the tiles of rows first to last - 1 and columns begin (of a whole block) to end - 1."""
    tile_bytes = field(layer, TILE_BYTES)
    decode, multiply = field(layer, DECODE), field(layer, MULTIPLY_FEW)
    for tile_row in range(first, last):
        x = prepared + tile_row // BLOCK_TILES * rows * ROW_BYTES + tile_row % BLOCK_TILES * 4 * TILE
        for tile in range(begin, end, BLOCK_TILES):
            count = min(BLOCK_TILES, end - tile)
            source = tiles + tile_row * row_stride + tile * tile_bytes
            call(decode, (source, row_stride, 1, count, tiles_room, blocks.TILE_FLOAT_BYTES))
            call(multiply, (rows, x, tiles_room, count, sums + tile // BLOCK_TILES * rows * ROW_BYTES))


@cfunc(types.void(*[types.int64] * 8), cache=True)
def _chains_of_few(layer, column, columns, rows, prepared, sums, totals, tiles_room):
    shards, all_blocks = k_shards(layer), input_blocks(layer)
    tile_bytes = field(layer, TILE_BYTES)
    row_stride = field(layer, TILE_COLUMNS) * tile_bytes
    tiles = field(layer, TILES) + column // TILE * tile_bytes
    column_tiles, column_blocks = columns // TILE, (columns + BLOCK - 1) // BLOCK
    for shard in range(shards):
        first = shard * all_blocks // shards * BLOCK_TILES
        last = min((shard + 1) * all_blocks // shards * BLOCK_TILES, field(layer, TILE_ROWS))
        zero_floats(sums, rows * column_blocks * BLOCK)
        if rows == 1:
            arguments = (tiles + first * row_stride, row_stride, last - first, column_tiles)
            call(field(layer, MULTIPLY_ROW), (*arguments, prepared + 4 * TILE * first, sums))
        else:
            near_tiles = NEAR_SUMS // rows * BLOCK_TILES
            for begin in range(0, column_tiles, near_tiles):
                end = min(begin + near_tiles, column_tiles)
                _carry_few(layer, tiles, row_stride, first, last, begin, end, rows, prepared, sums, tiles_room)
        if shards > 1:
            call(field(layer, CLOSE_SHARD), (rows * column_blocks, sums, totals, close_step(shard, shards)))


@inlined
def chains_of_rows(layer, column, columns, rows, prepared, sums, totals, panels):
    """Chains of `columns` outputs (a multiple of 16, at most 128) from `column` for `rows` prepared rows.

    prepared: [blocks, rows, 128]. sums: float32 [rows, 128], the result. totals: float64 of that size, if there are
    shards. panels: room for PANELS_FLOATS float32.
    """
    call(field(layer, CHAINS_OF_ROWS), (layer, column, columns, rows, prepared, sums, totals, panels))


@cfunc(types.void(*[types.int64] * 8), cache=True)
def _chains_of_rows(layer, column, columns, rows, prepared, sums, totals, panels):
    shards, all_blocks, all_tile_rows = k_shards(layer), input_blocks(layer), field(layer, TILE_ROWS)
    tile_bytes = field(layer, TILE_BYTES)
    row_stride = field(layer, TILE_COLUMNS) * tile_bytes
    parts = (rows + NEAR_ROWS - 1) // NEAR_ROWS
    width = PAIR_COLUMNS if parts == 1 else BLOCK
    for shard in range(shards):
        first, last = shard * all_blocks // shards, (shard + 1) * all_blocks // shards
        for block in range(first, last):
            tile_row = block * BLOCK_TILES
            tile_rows = min(BLOCK_TILES, all_tile_rows - tile_row)
            block_inputs = prepared + block * rows * ROW_BYTES
            fresh = 1 if block == first else 0
            for offset in range(0, columns, width):
                tiles = field(layer, TILES) + tile_row * row_stride + (column + offset) // TILE * tile_bytes
                some = min(width, columns - offset)
                call(field(layer, DECODE), (tiles, row_stride, tile_rows, some // TILE, panels, blocks.PANEL_BYTES))
                for part in range(parts):
                    first_row, last_row = part * rows // parts * ROW_BYTES, (part + 1) * rows // parts * ROW_BYTES
                    for pair in range(0, some, PAIR_COLUMNS):
                        arguments = (
                            (last_row - first_row) // ROW_BYTES,
                            block_inputs + first_row,
                            panels + pair // TILE * blocks.PANEL_BYTES,
                            tile_rows * TILE,
                            sums + first_row + 4 * (offset + pair),
                            fresh,
                        )
                        call(field(layer, MULTIPLY_PANELS), arguments)
        if shards > 1:
            call(field(layer, CLOSE_SHARD), (rows, sums, totals, close_step(shard, shards)))


def common_fields(record: np.ndarray) -> None:
    """Fill in the compiled pieces, which the layer's other fields decide between."""
    narrow = record[INPUT_SCALES] == 0 and record[OUTPUTS] <= blocks.NARROW_COLUMNS
    record[MULTIPLY_PANELS] = place_of(blocks.multiply_narrow if narrow else blocks.multiply_panels)
    record[ROTATE_INPUT] = place_of(blocks.rotate_input)
    record[ROTATE_OUTPUT] = place_of(blocks.rotate_output)
    record[CLOSE_SHARD] = place_of(blocks.close_shard)
    record[PREPARE_BLOCKS] = place_of(_prepare_blocks)
    record[CHAINS_OF_FEW] = place_of(_chains_of_few)
    record[CHAINS_OF_ROWS] = place_of(_chains_of_rows)
    record[FINISH_ROW] = place_of(_finish_row)
    record[MULTIPLY_FEW] = place_of(blocks.multiply_few)
