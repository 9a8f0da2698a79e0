"""The linear layer on the CPU: preparing weights, and one call for any number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as field_of

import numpy as np
from numba import cfunc, types

from isobit.checkpoint.weights import Exl3Linear, Linear, PlainLinear
from isobit.ops import buffers
from isobit.ops.linear import product
from isobit.ops.linear.blocks import BLOCK, FEW_ROWS, ROW_BYTES
from isobit.ops.linear.memory import field, place_of
from isobit.ops.linear.parallel import parts_of, run_parts
from isobit.ops.linear.product import (
    COLUMN_UNIT,
    INPUTS,
    OUTPUTS,
    TILE,
    TILE_COLUMNS,
    chains_of_few,
    chains_of_rows,
    finish_row,
    inlined,
    input_blocks,
    prepare_row,
    real_columns,
)
from isobit.ops.linear.stored import PREPARED_ROWS, check_plain, check_trellis, narrowed, narrowest_format, padded_bias
from isobit.ops.linear.tiles import FLOAT32, TileFormat, tile_format, trellis_format
from isobit.ops.work import pieces_are_forced

__all__ = ["linear", "linears", "prepare_linear"]

BY_ROW_COUNT, ROW_BY_ROW, IN_PANELS, FEW_BY_FEW = 0, 1, 2, 3  # how to compute; the first is what the model uses
MOST_ROWS = 256  # that one thread prepares at a time; their sums and one block of their inputs fit its cache
MOST_PREPARED_BYTES = 32 << 20
DECODING = 8  # what decoding a tile costs, in rows multiplied with it

# Fields of a call's plan.
HOW = 0
ROW_CUTS = 1
PASS_ROWS = 2
PART_FLOATS = 3


@dataclass(frozen=True)
class LinearHandle:
    """A linear layer ready to compute. `record` is for the kernels; `arrays` keeps what it points to alive.

    stored_inputs, stored_outputs: with padding. unit: outputs that one thread must compute together. plans: of calls
    that were made with few rows, by (rows, parts, how).
    """

    in_features: int
    out_features: int
    stored_inputs: int
    stored_outputs: int
    unit: int
    nbytes: int
    record: np.ndarray
    arrays: tuple[np.ndarray, ...]
    plans: dict[tuple[int, int, int], np.ndarray] = field_of(default_factory=dict)


def prepare_linear(weights: Linear) -> LinearHandle:
    """A layer's handle. EXL3 tiles are used where they lie, also in a mapped file; plain weights are copied to tiles.

    Raises CheckpointError when the tensors of the layer do not fit each other.
    """
    if isinstance(weights, Exl3Linear):
        return _prepare_trellis(weights)
    return _prepare_plain(weights)


def linear(x: np.ndarray, handle: LinearHandle, how: int = BY_ROW_COUNT) -> np.ndarray:
    """x float32 [R, in_features] -> float32 [R, out_features]. `how` is for the contract and changes no byte."""
    rows, width = x.shape
    if width != handle.in_features:
        raise ValueError(f"linear: x has {width} columns, expected {handle.in_features}")
    y = buffers.empty((rows, handle.out_features))
    work = work_of(rows, handle.in_features * handle.out_features)
    parts = parts_of(work)
    if rows <= FEW_ROWS and handle.stored_outputs <= handle.unit and not pieces_are_forced():
        parts = 1  # each part would decode all tiles
    plan = _plan(rows, handle, parts, how)
    run_parts(_PHASES, x, y, handle.record, plan, int(plan[PART_FLOATS]), parts, work)
    return y


def linears(x: np.ndarray, handles: Sequence[LinearHandle]) -> list[np.ndarray]:
    """Several layers of the same x: what `linear` gives for each."""
    return [linear(x, handle) for handle in handles]


def work_of(rows: int, values: int) -> int:
    """About how many multiply-adds `rows` rows times a matrix of `values` weights cost, decoding included."""
    return (rows + DECODING) * values


def _plan(rows: int, handle: LinearHandle, parts: int, how: int) -> np.ndarray:
    plan = handle.plans.get((rows, parts, how))
    if plan is None:
        plan = _new_plan(rows, handle, parts, how)
        if rows <= FEW_ROWS:
            handle.plans[rows, parts, how] = plan
    return plan


def _new_plan(rows: int, handle: LinearHandle, parts: int, how: int) -> np.ndarray:
    if how == BY_ROW_COUNT:
        how = FEW_BY_FEW if rows <= FEW_ROWS else IN_PANELS
    row_cuts = _row_cuts(rows, handle, parts)
    part_rows = -(-rows // row_cuts)
    blocks, outputs = -(-handle.stored_inputs // BLOCK), -(-handle.stored_outputs // BLOCK)
    if how == IN_PANELS:
        pass_rows = min(part_rows, MOST_ROWS, max(16, MOST_PREPARED_BYTES // (blocks * ROW_BYTES)))
        sums = 3 if handle.stored_inputs >= product.LONG_INPUTS else 1
        part_floats = pass_rows * (blocks + sums) * BLOCK + product.PANELS_FLOATS + BLOCK
    else:
        pass_rows = 1 if how == ROW_BY_ROW else min(part_rows, FEW_ROWS)
        part_floats = (pass_rows * (blocks + 3 * outputs) + 1) * BLOCK + product.TILES_FLOATS
    return np.array([how, row_cuts, pass_rows, part_floats], np.int64)


def _row_cuts(rows: int, handle: LinearHandle, parts: int) -> int:
    """Into how many parts to cut the rows, the columns being cut into parts // that; divides `parts`.

    Preparing a row costs about as much as 16 outputs.
    """
    units = -(-handle.stored_outputs // handle.unit)

    def cost(cuts: int) -> int:
        columns = -(-units // (parts // cuts)) * handle.unit
        return (-(-rows // cuts) + DECODING) * (columns + 16)

    return min((cuts for cuts in range(1, parts + 1) if parts % cuts == 0), key=cost)


def _prepare_trellis(weights: Exl3Linear) -> LinearHandle:
    check_trellis(weights)
    stored = tile_format(trellis_format(weights.codebook, weights.bits))
    arrays = [np.ascontiguousarray(array) for array in (weights.trellis, weights.suh, weights.svh)]
    return _handle(weights, stored, (weights.k // TILE, weights.n // TILE), arrays, BLOCK)


def _prepare_plain(weights: PlainLinear) -> LinearHandle:
    check_plain(weights)
    number = narrowest_format(weights.weight)
    tiles = _plain_tiles(weights.weight, number)
    return _handle(weights, tile_format(number), (tiles.shape[0], tiles.shape[1]), [tiles], product.PAIR_COLUMNS)


def _plain_tiles(weight: np.ndarray, number: int) -> np.ndarray:
    """[N, K] -> tiles [K/16, N/16, 16, 16], inputs first, padded with zeros; a few rows of N at a time."""
    n, k = weight.shape
    tile_rows, tile_columns = -(-k // TILE), -(-n // TILE)
    tiles = np.empty((tile_rows, tile_columns, TILE, TILE), np.uint32 if number == FLOAT32 else np.uint16)
    for first in range(0, n, PREPARED_ROWS):
        values = narrowed(weight[first : first + PREPARED_ROWS], number)
        columns = -(-len(values) // TILE)
        padded = np.zeros((columns * TILE, tile_rows * TILE), values.dtype)
        padded[: len(values), :k] = values
        column = first // TILE
        tiles[:, column : column + columns] = padded.reshape(columns, TILE, tile_rows, TILE).transpose(2, 0, 3, 1)
    return tiles


def _handle(
    weights: Linear, stored: TileFormat, shape: tuple[int, int], arrays: list[np.ndarray], unit: int
) -> LinearHandle:
    record = np.zeros(product.FIELDS, np.int64)
    record[INPUTS], record[OUTPUTS], record[COLUMN_UNIT] = weights.in_features, weights.out_features, unit
    record[product.TILE_ROWS], record[TILE_COLUMNS] = shape
    record[product.TILES], record[product.TILE_BYTES] = arrays[0].ctypes.data, stored.tile_bytes
    record[product.DECODE], record[product.MULTIPLY_ROW] = stored.decode, stored.multiply_row
    if len(arrays) > 1:
        record[product.INPUT_SCALES], record[product.OUTPUT_SCALES] = (array.ctypes.data for array in arrays[1:3])
    if weights.bias is not None:
        arrays = [*arrays, padded_bias(weights, shape[1] * TILE)]
        record[product.BIAS] = arrays[-1].ctypes.data
    nbytes = sum(array.nbytes for array in arrays)
    product.common_fields(record)
    sizes = weights.in_features, weights.out_features, shape[0] * TILE, shape[1] * TILE
    return LinearHandle(*sizes, unit, nbytes, record, tuple(arrays))


@inlined
def _few_by_few(x, first_row, last_row, layer, first_column, last_column, y, most, scratch):
    """Stored columns [first_column, last_column) of rows [first_row, last_row) of y, at most `most` rows at a time."""
    inputs, outputs = field(layer, INPUTS), field(layer, OUTPUTS)
    columns = last_column - first_column
    padded = (columns + BLOCK - 1) // BLOCK * BLOCK
    spare = scratch + most * input_blocks(layer) * ROW_BYTES
    sums = spare + ROW_BYTES
    totals = sums + 4 * most * padded
    tiles_room = totals + 8 * most * padded
    for start in range(first_row, last_row, most):
        rows = min(most, last_row - start)
        for row in range(rows):
            source = x + 4 * (start + row) * inputs
            prepare_row(source, layer, scratch + row * ROW_BYTES, rows * ROW_BYTES, spare)
        chains_of_few(layer, first_column, columns, rows, scratch, sums, totals, tiles_room)
        for column in range(first_column, last_column, BLOCK):
            count = real_columns(layer, column, last_column)
            block_sums = sums + 4 * rows * (column - first_column)
            for row in range(rows):
                out = y + 4 * ((start + row) * outputs + column)
                finish_row(block_sums + row * ROW_BYTES, layer, column, count, out, spare)


@inlined
def _in_panels(x, first_row, last_row, layer, first_column, last_column, y, pass_rows, scratch):
    """Stored columns [first_column, last_column) of rows [first_row, last_row) of y, `pass_rows` rows at a time."""
    inputs, outputs = field(layer, INPUTS), field(layer, OUTPUTS)
    panels = scratch
    spare = panels + 4 * product.PANELS_FLOATS
    sums = spare + ROW_BYTES
    prepared = sums + pass_rows * ROW_BYTES
    totals = prepared + pass_rows * input_blocks(layer) * ROW_BYTES
    for start in range(first_row, last_row, pass_rows):
        rows = min(pass_rows, last_row - start)
        for row in range(rows):
            target = prepared + row * ROW_BYTES
            prepare_row(x + 4 * (start + row) * inputs, layer, target, rows * ROW_BYTES, spare)
        for column in range(first_column, last_column, BLOCK):
            columns = min(BLOCK, last_column - column)
            chains_of_rows(layer, column, columns, rows, prepared, sums, totals, panels)
            count = real_columns(layer, column, last_column)
            for row in range(rows):
                out = y + 4 * ((start + row) * outputs + column)
                finish_row(sums + row * ROW_BYTES, layer, column, count, out, spare)


@cfunc(types.void(*[types.int64] * 8), cache=True)
def _linear_part(rows, x, y, layer, plan, scratch, part, parts):
    unit = field(layer, COLUMN_UNIT)
    columns = field(layer, TILE_COLUMNS) * TILE
    units = (columns + unit - 1) // unit
    row_cuts = field(plan, ROW_CUTS)
    column_cuts = parts // row_cuts
    row_part, column_part = part // column_cuts, part % column_cuts
    first_row, last_row = row_part * rows // row_cuts, (row_part + 1) * rows // row_cuts
    first_column = column_part * units // column_cuts * unit
    last_column = min((column_part + 1) * units // column_cuts * unit, columns)
    if first_row == last_row or first_column >= last_column:
        return
    room = scratch + 4 * part * field(plan, PART_FLOATS)
    if field(plan, HOW) == IN_PANELS:
        _in_panels(x, first_row, last_row, layer, first_column, last_column, y, field(plan, PASS_ROWS), room)
    else:
        _few_by_few(x, first_row, last_row, layer, first_column, last_column, y, field(plan, PASS_ROWS), room)


_PHASES = np.array([place_of(_linear_part)], np.int64)
