"""The mixture of experts on the CPU: preparing weights, and one call for any number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobit.checkpoint.weights import Linear
from isobit.ops import buffers
from isobit.ops.experts import grouping, product
from isobit.ops.experts.router import route
from isobit.ops.experts.stored import checked_experts
from isobit.ops.linear.blocks import BLOCK, FEW_ROWS
from isobit.ops.linear.cpu import LinearHandle, prepare_linear, work_of
from isobit.ops.linear.memory import place_of
from isobit.ops.linear.parallel import parts_of, run_parts
from isobit.ops.linear.product import FIELDS, PANELS_FLOATS
from isobit.ops.tape import do

__all__ = ["experts", "prepare_experts", "route"]

MOST_ROWS = 2048  # of one pass over the experts
MOST_PAIR_BYTES = 128 << 20  # of hidden values held between the phases
MOST_PASS_ROWS = 256  # rows of one expert that one thread prepares at a time
ROW_BLOCKS = 32  # blocks of 128 outputs of a row that a thread holds


@dataclass(frozen=True)
class ExpertsHandle:
    """The experts of one layer, ready to compute. `record` is for the kernels; `layers` keeps its weights alive.

    pair_floats: floats held between the phases for one row of one expert. row_work: multiply-adds of the same.
    most_blocks: blocks of 128 inputs in any layer. most_columns: outputs of any layer, in whole blocks.
    """

    routed: int
    hidden: int
    nbytes: int
    record: np.ndarray
    layers: tuple[LinearHandle, ...]
    pair_floats: int
    row_work: int
    most_blocks: int
    most_columns: int


def prepare_experts(
    gate: Sequence[Linear],
    up: Sequence[Linear],
    down: Sequence[Linear],
    shared_gate: Linear,
    shared_up: Linear,
    shared_down: Linear,
    shared_expert_gate: Linear,
) -> ExpertsHandle:
    """The experts' handle. Raises CheckpointError when the layers do not fit each other."""
    shared = shared_gate, shared_up, shared_down
    triples = checked_experts(gate, up, down, shared, shared_expert_gate)
    hidden = gate[0].in_features
    layers = tuple(prepare_linear(weights) for triple in triples for weights in triple)
    layers = (*layers, prepare_linear(shared_expert_gate))
    hidden_stride = _whole_blocks(max(layer.out_features for layer in layers[0::3]))
    ready_blocks = max(-(-layer.stored_inputs // BLOCK) for layer in layers[2::3])
    most_columns = max(_whole_blocks(layer.stored_outputs) for layer in layers)
    record = np.zeros(product.RECORD_HEADER + FIELDS * len(layers), np.int64)
    record[product.ROUTED] = len(gate)
    record[product.HIDDEN_STRIDE], record[product.READY_BLOCKS] = hidden_stride, ready_blocks
    record[product.SWISH] = place_of(product.swish)
    record[product.RECORD_HEADER :] = np.concatenate([layer.record for layer in layers])
    return ExpertsHandle(
        routed=len(gate),
        hidden=hidden,
        nbytes=sum(layer.nbytes for layer in layers),
        record=record,
        layers=layers,
        pair_floats=hidden_stride + ready_blocks * BLOCK,
        row_work=sum(layer.in_features * layer.out_features for layer in layers[:3]),
        most_blocks=max(-(-layer.stored_inputs // BLOCK) for layer in layers),
        most_columns=most_columns,
    )


def experts(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, handle: ExpertsHandle, how: int = product.BY_COUNT
) -> np.ndarray:
    """The chosen experts' weighted sum and the shared expert: x float32 [R, H] -> float32 [R, H].

    ids: int32 [R, chosen], ascending in a row, as `route` gives them. weights: float32 [R, chosen]. `how` is for the
    contract and changes no byte. Raises MemoryError when the buffers cannot be had.
    """
    rows, width = x.shape
    if width != handle.hidden:
        raise ValueError(f"experts: x has {width} columns, expected {handle.hidden}")
    y = buffers.empty((rows, width))
    most_rows = _most_rows(handle, ids.shape[1])
    if 0 < rows <= most_rows:
        _experts(x, ids, weights, handle, how, y)
        return y
    for first in range(0, rows, most_rows):
        part = slice(first, min(first + most_rows, rows))
        _experts(x[part], ids[part], weights[part], handle, how, y[part])
    return y


def _experts(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, handle: ExpertsHandle, how: int, y: np.ndarray
) -> None:
    rows, chosen = ids.shape
    pairs = rows * (chosen + 1)
    decoded = min(pairs, handle.routed + 1)
    work = work_of(-(-pairs // decoded), decoded * handle.row_work // len(_PHASES))
    parts = parts_of(work)
    pass_rows = min(rows, MOST_PASS_ROWS)
    column_blocks = min(max(1, ROW_BLOCKS // rows), -(-handle.hidden // BLOCK))
    sums_floats = max(min(rows, FEW_ROWS) * handle.most_columns, pass_rows * BLOCK)
    kernel_floats = 2 * BLOCK + PANELS_FLOATS + 3 * sums_floats
    part_floats = kernel_floats + pass_rows * handle.most_blocks * BLOCK + (pairs * column_blocks + 4) * BLOCK
    shared_floats = pairs * handle.pair_floats + _whole_blocks(rows)
    plan = grouping.empty_plan(rows, chosen, handle.routed)
    plan[grouping.HOW], plan[grouping.PASS_ROWS], plan[grouping.COLUMN_BLOCKS] = how, pass_rows, column_blocks
    plan[grouping.SHARED_FLOATS], plan[grouping.PART_FLOATS] = shared_floats, part_floats
    plan[grouping.SUMS_FLOATS] = sums_floats
    do(grouping.fill_plan, ids, weights, handle.routed, plan)
    run_parts(_PHASES, x, y, handle.record, plan, part_floats, parts, work, shared_floats)


def _most_rows(handle: ExpertsHandle, chosen: int) -> int:
    return max(1, min(MOST_ROWS, MOST_PAIR_BYTES // (4 * handle.pair_floats * (chosen + 1))))


def _whole_blocks(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


_PHASES = np.array([place_of(phase) for phase in (product.hidden_phase, product.output_phase)], np.int64)
