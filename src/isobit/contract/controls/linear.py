"""Defects of the linear layer: the order of its sums, its shards, its rotations, its edges."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from isobit.checkpoint.weights import Exl3Linear, Linear, PlainLinear
from isobit.contract.controls.planted import (
    Call,
    as_halves,
    overrun,
    plant,
    rebuffered,
    run_and_lend,
    unwritten,
    with_weightless_neighbours,
)
from isobit.ops.contract import Outputs
from isobit.ops.linear import reference

BLOCK, TILE_COLUMNS = 128, 16
LONG_INPUTS, SHARDS = 4096, 4
GROUP_ROWS = 6
ROW_TILE = 8


def without_bias(weights: Linear) -> Linear:
    return replace(weights, bias=None)


def with_bias(call: Call, y: np.ndarray) -> Outputs:
    bias = call.case.inputs["weights"].bias
    return {"y": y if bias is None else y + bias[: y.shape[1]].astype(np.float32)}


def partial_sums(call: Call, bounds: list[int]) -> list[np.ndarray]:
    """What the inputs between neighbouring bounds alone give, without bias."""
    x, weights = call.case.inputs["x"], without_bias(call.case.inputs["weights"])
    parts = []
    for first, last in pairwise(bounds):
        part = np.zeros_like(x)
        part[:, first:last] = x[:, first:last]
        parts.append(call.replay(f"{first} to {last}", x=part, weights=weights)["y"])
    return parts


def split_in_two(call: Call) -> Outputs:
    """k is split in the middle, and the two sums are added."""
    inputs = call.case.inputs["x"].shape[1]
    middle = max(BLOCK, inputs // 2 // BLOCK * BLOCK)
    first, second = partial_sums(call, [0, min(middle, inputs), inputs])
    return with_bias(call, first + second)


def shards_in_float32(call: Call) -> Outputs:
    """The shards of a long layer are added in float32."""
    inputs = call.case.inputs["x"].shape[1]
    if inputs < LONG_INPUTS:
        return call.run()
    blocks = -(-inputs // BLOCK)
    parts = partial_sums(call, [min(shard * blocks // SHARDS * BLOCK, inputs) for shard in range(SHARDS + 1)])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return with_bias(call, total)


def blocks_backwards(call: Call) -> Outputs:
    """k runs from the last block of 128 to the first; of plain weights, from the last input to the first."""
    x, weights = call.case.inputs["x"], call.case.inputs["weights"]
    if isinstance(weights, PlainLinear):
        columns = replace(weights, weight=np.ascontiguousarray(weights.weight[:, ::-1]))
        return call.replay("backwards", x=np.ascontiguousarray(x[:, ::-1]), weights=columns)
    padded = np.zeros((len(x), weights.k), np.float32)
    padded[:, : x.shape[1]] = x

    def backwards(array: np.ndarray, axis: int, size: int) -> np.ndarray:
        blocks = array.reshape(*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
        return np.ascontiguousarray(np.flip(blocks, axis)).reshape(array.shape)

    turned = replace(
        weights,
        trellis=backwards(weights.trellis, 0, BLOCK // 16),
        suh=backwards(weights.suh, 0, BLOCK),
        in_features=weights.k,
    )
    return call.replay("backwards", x=backwards(padded, 1, BLOCK), weights=turned)


def upper_halves_exchanged(call: Call) -> Outputs:
    """Each column of tiles has the upper half of the column before it."""
    weights = call.case.inputs["weights"]
    if not isinstance(weights, Exl3Linear):
        return call.run()
    trellis = weights.trellis.copy()
    half = len(trellis) // 2
    trellis[:half] = np.roll(trellis[:half], 1, axis=1)
    return call.replay(weights=replace(weights, trellis=trellis))


@plant("linear", "reference", "inputs past the last whole block of 128 are not read")
def last_inputs_not_read(call: Call) -> Outputs:
    x = call.case.inputs["x"].copy()
    x[:, x.shape[1] // BLOCK * BLOCK :] = 0
    return call.replay(x=x)


@plant("linear", "reference", "the states go through another codebook")
def another_codebook(call: Call) -> Outputs:
    weights = call.case.inputs["weights"]
    if not isinstance(weights, Exl3Linear) or weights.bits != int(weights.bits):
        return call.run()
    return call.replay(weights=replace(weights, codebook="mcg" if weights.codebook != "mcg" else "mul1"))


@plant("linear", "reference", "the rows of a tile are exchanged in pairs")
def tile_rows_exchanged(call: Call) -> Outputs:
    weights = call.case.inputs["weights"]
    if isinstance(weights, PlainLinear):
        pairs = np.arange(weights.weight.shape[1] // 2 * 2).reshape(-1, 2)[:, ::-1].ravel()
        swapped = weights.weight.copy()
        swapped[:, : pairs.size] = weights.weight[:, pairs]
        return call.replay(weights=replace(weights, weight=swapped))
    return call.replay(weights=replace(weights, trellis=np.ascontiguousarray(weights.trellis[..., ::-1])))


@plant("linear", "reference", "the bias is left out")
def no_bias(call: Call) -> Outputs:
    return call.replay(weights=without_bias(call.case.inputs["weights"]))


@plant("linear", "rows", "more than one row split k in two")
def split_by_row_count(call: Call) -> Outputs:
    return call.run() if call.rows == 1 else split_in_two(call)


@plant("linear", "rows", "the first row of each group of 6 takes the inputs of the row before")
def group_edge_leak(call: Call) -> Outputs:
    y = call.run()["y"]
    y[GROUP_ROWS::GROUP_ROWS] = y[GROUP_ROWS - 1 :: GROUP_ROWS][: len(y[GROUP_ROWS::GROUP_ROWS])]
    return {"y": y}


@plant("linear", "rows", "a short last group of rows takes k backwards")
def short_group(call: Call) -> Outputs:
    y, other = call.run()["y"], blocks_backwards(call)["y"]
    whole = call.rows // GROUP_ROWS * GROUP_ROWS
    return {"y": np.concatenate([y[:whole], other[whole:]]) if whole else y}


@plant("linear", "rows", "the row before has a part in a row, of weight zero")
def weightless_neighbour(call: Call) -> Outputs:
    """What is finite leaves no trace of that."""
    return {"y": with_weightless_neighbours(call.run()["y"])}


@plant("linear", "replaces", "k is split in two")
def split_k(call: Call) -> Outputs:
    return split_in_two(call)


@plant("linear", "replaces", "k runs from the last block to the first")
def k_backwards(call: Call) -> Outputs:
    return blocks_backwards(call)


@plant("linear", "replaces", "the shards of a long layer are added in float32")
def single_shards(call: Call) -> Outputs:
    return shards_in_float32(call)


@plant("linear", "replaces", "the sum is exact and rounded once, at the end")
def rounded_late(call: Call) -> Outputs:
    call.run()
    x, weights = call.case.inputs["x"][call.streams], call.case.inputs["weights"]
    with np.errstate(over="ignore"):
        return {"y": reference.linear(x, weights).astype(np.float32)}


@plant("linear", "replaces", "the output is rounded to half on its way")
def rounded_twice(call: Call) -> Outputs:
    return {"y": as_halves(call.run()["y"])}


@plant("linear", "replaces", "a launch's later layer rotates its inputs with the scales of the one before")
def scales_of_another_layer(call: Call) -> Outputs:
    weights = call.case.inputs["weights"]
    if not isinstance(weights, Exl3Linear):
        return call.run()
    return call.replay(weights=replace(weights, suh=np.roll(weights.suh, 1)))


@plant("linear", "rows", "more than one row take the columns where a launch's layer before would have them")
def columns_of_another_layer(call: Call) -> Outputs:
    weights = call.case.inputs["weights"]
    if call.rows == 1 or not isinstance(weights, Exl3Linear):
        return call.run()
    return call.replay(weights=replace(weights, trellis=np.roll(weights.trellis, 1, axis=1)))


@plant("linear", "replaces", "the lower half of a column of tiles goes on with the chains of the column before")
def chains_of_another_column(call: Call) -> Outputs:
    return upper_halves_exchanged(call)


@plant("linear", "rows", "more than 8 rows resume a column of tiles with the chains of the column before")
def chains_of_another_column_by_row_count(call: Call) -> Outputs:
    return call.run() if call.rows <= ROW_TILE else upper_halves_exchanged(call)


@plant("linear", "hygiene", "columns past the last whole block of 128 are not written")
def last_columns_unwritten(call: Call) -> Outputs:
    y = call.run()["y"]
    return {"y": unwritten(y, ..., slice((y.shape[1] - 1) // BLOCK * BLOCK, None))}


@plant("linear", "hygiene", "the last tile of 16 columns is written whole")
def last_tile_overrun(call: Call) -> Outputs:
    y = rebuffered(call.run()["y"])
    overrun(y, 4 * (-y.shape[1] % TILE_COLUMNS))
    return {"y": y}


@plant("linear", "hygiene", "the chains start from what the output held")
def accumulating_chains(call: Call) -> Outputs:
    y = call.run()["y"]
    buffer = unwritten(y, ...)
    with np.errstate(all="ignore"):
        buffer += y
    return {"y": buffer}


@plant("linear", "hygiene", "the inputs are rotated in place")
def rotated_in_place(call: Call) -> Outputs:
    outputs, (x,) = run_and_lend(call)
    with np.errstate(all="ignore"):
        x[:, 0] += x[:, -1] + 1
    return outputs


@plant("linear", "hygiene", "two parts add to one output, in whichever order they end")
def unordered_parts(call: Call) -> Outputs:
    return call.run() if call.number % 2 else split_in_two(call)
